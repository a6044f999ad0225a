"use strict";
// Builds the page: first the parts that depend on the runs in view, then the controls, which are set up once.

/** @param {Mapped} run @returns {number} */
function slot(run) {
  return state.shown.indexOf(run);
}

function build() {
  const shown = state.shown;
  byId("maps").replaceChildren();
  byId("scatters").replaceChildren();
  document.body.classList.toggle("two", shown.length > 1);
  maps = shown.map((run) => {
    const host = element("div", { class: "canvas" });
    const zoom = (/** @type {number} */ factor) => () => maps[slot(run)].zoom(factor, host.clientWidth / 2, host.clientHeight / 2);
    byId("maps").append(element("figure", { class: "panel" },
      element("figcaption", {}, element("span", {}, run.name), element("span", { class: "note" }, `${run.split.name} · ${run.split.count.toLocaleString("en")} images`),
        element("button", { type: "button", "aria-label": `Zoom in, ${run.name}`, onclick: zoom(1.5) }, "+"),
        element("button", { type: "button", "aria-label": `Zoom out, ${run.name}`, onclick: zoom(1 / 1.5) }, "−")), host));
    return new Cloud(host, run, { label: `Map of ${run.name}: arrow keys walk from image to image`, edges: true, xy: run.xy }, listeners);
  });
  scatters = shown.map((run) => {
    const [low, high] = quantiles(run.curvature, 0, 1);
    const extent = high - low || 1;
    const xy = new Float32Array(2 * run.split.count);
    run.curvature.forEach((values, axis) => values.forEach((value, row) => (xy[2 * row + axis] = (value - low) / extent)));
    const host = element("div", { class: "canvas" });
    byId("scatters").append(card(`ρ = ${run.rho.toFixed(3)}`, `${run.name}: curvature of the first view across, of the second upwards; on the dashed line they are equal.`, host));
    return new Cloud(host, run, { label: `Curvature of the two views, ${run.name}`, edges: false, xy, axes: scatterAxes(low, extent) }, listeners);
  });
  byId("histograms").replaceChildren(...shown.map((run) => card(`Curvature, ${run.name}`, "", viewKey(), histogram(run.curvature, ["first view", "second view"], VIEW_COLOURS))));
  byId("extremes").replaceChildren(...shown.flatMap((run) => {
    const both = run.curvature[0].map((value, row) => (value + run.curvature[1][row]) / 2);
    const caption = (/** @type {number} */ row) => short(both[row]);
    return [element("div", { class: "card" }, element("h4", {}, `Most curved, ${run.name}`), gallery(run, largest(both, 16), caption, choose),
      element("h4", {}, "Least curved"), gallery(run, largest(both.map((value) => -value), 16), caption, choose))];
  }));
  judged();
  recolour();
  chosen();
  showSelection();
}

function viewKey() {
  return element("div", { class: "key" }, ...["first view", "second view"].map((name, which) => {
    const dot = element("i", {});
    dot.style.setProperty("--tint", VIEW_COLOURS[which]);
    return element("span", {}, dot, name);
  }));
}

/** The parts that need labels and predictions. */
function judged() {
  const runs = state.shown.filter((run) => run.predicted && run.split.label);
  const colours = runs.map((run) => GROUP_COLOURS[payload.runs[run.id].group % GROUP_COLOURS.length]);
  byId("confusions").replaceChildren(...runs.map((run) => card(`Confusion, ${run.name}`, run.split.classes.length > MANY ? "The commonest mix-ups, what it is → what the linear probe reads; press one to select its images." : "What it is in rows, what the linear probe reads in columns. Press a cell to select its images on the map.",
    confusionTable(run, (of, rows) => listeners.lassoed(of, rows, false)))));
  const together = runs.length > 1 && runs[0].split === runs[1].split;
  const sets = together ? [runs] : runs.map((run) => [run]);
  byId("per-class").replaceChildren(...sets.map((set) => card(`Accuracy by class, %${set[0].split.classes.length > MANY ? `: the ${MANY} lowest` : ""}`, set.map((run) => run.name).join(" above "),
    classBars(set, set.map((run) => colours[runs.indexOf(run)])))));
  byId("mistakes").replaceChildren(...runs.map((run) => {
    const { label, classes } = run.split;
    const rows = largest(run.confidence ?? [], 16, (row) => label?.[row] !== run.predicted?.[row]);
    return card(`Most confident mistakes, ${run.name}`, rows.length ? "What it is → what the linear probe reads." : "None.",
      gallery(run, rows, (row) => `${classes[label?.[row] ?? 0]} → ${classes[run.predicted?.[row] ?? 0]}, ${(100 * (run.confidence?.[row] ?? 0)).toFixed(0)} %`, choose));
  }));
}

function summary() {
  byId("title").textContent = payload.title;
  byId("subtitle").textContent = `Representation report · ${payload.created}`;
  byId("footer").textContent = `curvssl ${payload.version} · ${payload.created} · this page needs no network`;
  byId("summary").replaceChildren(...payload.groups.map((group, id) => {
    const runs = group.runs.map((run) => payload.runs[run]);
    const own = mapped.filter((run) => group.runs.includes(run.id));
    const last = (/** @type {string} */ key) => {
      const values = runs.flatMap((run) => (run.metrics[key] ?? []).filter((value) => typeof value === "number").slice(-1));
      return values.length ? mean(/** @type {number[]} */ (values)) : null;
    };
    const wall = runs.map((run) => Number(run.provenance.seconds ?? run.metrics.seconds?.at(-1) ?? NaN));
    const probe = ["linear", ...Object.keys(runs[0].probes)].find((name) => pooled(runs, [name]));
    /** @type {[string, string][]} */
    const facts = [
      ["kNN", percent(pooled(runs, ["knn"]))],
      ["ρ on the test split", own.length ? mean(own.map((run) => run.rho)).toFixed(3) : "–"],
      ["effective rank of z", short(last("effective_rank"))],
      ["epochs", short(last("epoch"))],
      ["wall time", wall.every(Number.isFinite) ? duration(mean(wall)) : "–"],
    ];
    const warning = runs.find((run) => run.warning)?.warning;
    const made = element("article", { class: "card stat" }, element("h3", {}, group.name),
      ...(warning ? [element("p", { class: "warning" }, `Does not learn: ${warning}.`)] : []),
      element("p", { class: "big" }, probe ? percent(pooled(runs, [probe])) : "–", element("small", {}, probe ? `% ${probe} probe` : "no probe yet")),
      element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    made.style.setProperty("--tint", GROUP_COLOURS[id % GROUP_COLOURS.length]);
    return made;
  }));
}

/** With more than two runs the reader selects which ones are shown side by side. */
function pickers() {
  if (mapped.length < 2) return;
  byId("pickers").replaceChildren(...["Left", "Right"].map((name, which) => {
    const select = /** @type {HTMLSelectElement} */ (element("select", { "aria-label": `${name} run`, onchange: () => {
      const chosenRuns = [.../** @type {NodeListOf<HTMLSelectElement>} */ (byId("pickers").querySelectorAll("select"))].map((one) => mapped[Number(one.value)]);
      state.shown = [...new Set(chosenRuns.filter(Boolean))];
      if (!state.shown.some((run) => run.splitId === state.split)) state.split = state.shown[0].splitId;
      build();
    } }, ...mapped.map((run, id) => element("option", { value: id }, run.name)), ...(which ? [element("option", { value: -1 }, "none")] : [])));
    select.value = String(which);
    return select;
  }));
}

function wire() {
  const colour = /** @type {HTMLSelectElement} */ (byId("colour"));
  const usable = Object.entries(COLOURINGS).filter(([, { ids }]) => !ids || mapped.some((run) => ids(run)));
  colour.replaceChildren(...usable.map(([name, { label }]) => element("option", { value: name }, label)));
  colour.value = state.colouring;
  colour.addEventListener("change", () => {
    state.colouring = colour.value;
    recolour();
  });
  for (const tool of ["pan", "lasso"]) byId(`tool-${tool}`).addEventListener("click", () => setTool(tool));
  byId("reset").addEventListener("click", () => [...maps, ...scatters].forEach((view) => view.reset()));
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = /** @type {HTMLInputElement} */ (byId("search-index")).value.trim();
    const run = state.shown.find((one) => one.splitId === state.split) ?? state.shown[0];
    const row = /^\d+$/.test(text) ? run.split.rowOf(Number(text)) : -1;
    byId("search-answer").textContent = row < 0 ? `no image ${text || "without a number"}` : "";
    if (row >= 0) choose(run, row);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") listeners.released();
  });
  theme();
}

/** The theme follows the system until the button is pressed; print is always light. */
function theme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => {
    [...maps, ...scatters].forEach((view) => view.resize());
    stars();
  };
  byId("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    repaint();
  });
  dark.addEventListener("change", repaint);
  matchMedia("print").addEventListener("change", repaint);
}

summary();
pickers();
wire();
byId("probes").replaceChildren(probeTable(payload));
byId("seen").hidden = !payload.seen.length;
byId("views").append(...payload.seen.map((seen) => seenTable(seen, payload.seen.length > 1)));
curves();
byId("origins").replaceChildren(...origins(payload, copy));
if (mapped.length) build();
else byId("map").hidden = byId("geometry").hidden = true;
