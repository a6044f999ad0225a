"use strict";
// Builds the page from its parts: first the parts that depend on the runs in view, then the controls, which are set up once.

/** @param {Mapped} run @returns {number} */
function slot(run) {
  return state.shown.indexOf(run);
}

function build() {
  const shown = state.shown;
  byId("maps").replaceChildren();
  byId("scatters").replaceChildren();
  document.body.classList.toggle("two", shown.length > 1);
  document.body.classList.toggle("unlabelled", shown.every((run) => !run.split.label)); // file names need more room
  maps = shown.map((run) => {
    const host = element("div", { class: "canvas" });
    const zoom = (/** @type {number} */ factor) => () => maps[slot(run)].zoom(factor, host.clientWidth / 2, host.clientHeight / 2);
    byId("maps").append(element("figure", { class: "panel" },
      element("figcaption", {}, element("span", {}, run.name), element("span", { class: "note" }, whichImages(run.split)),
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
    byId("scatters").append(card([term("rho"), ` = ${fixed(run.rho, 3)}`], `${run.name}, ${run.kind}: curvature of the first view across, of the second upwards; on the dashed line they are equal.`, host));
    return new Cloud(host, run, { label: `Curvature of the two views, ${run.name}`, edges: false, xy, axes: scatterAxes(low, extent) }, listeners);
  });
  byId("histograms").replaceChildren(...shown.map((run) => card([term("curvature", "Curvature"), `, ${run.name}`], "", viewKey(), histogram(run.curvature, ["first view", "second view"], VIEW_COLOURS, run.kind))));
  byId("extremes").replaceChildren(...shown.flatMap((run) => {
    const both = run.curvature[0].map((value, row) => (value + run.curvature[1][row]) / 2);
    const caption = (/** @type {number} */ row) => short(both[row]);
    return [element("div", { class: "card" }, element("h4", {}, `Most curved, ${run.name}`), gallery(run, largest(both, 16), caption),
      element("h4", {}, "Least curved"), gallery(run, largest(both.map((value) => -value), 16), caption))];
  }));
  const small = Math.min(...shown.map((run) => run.split.side));
  byId("thumbnails").textContent = shown.some((run) => run.split.count > 2500) ? ` Thumbnails of ${small}×${small} pixels keep this file small.` : "";
  judged();
  found();
  recolour();
  chosen();
  showSelection();
  const above = maps[0].over.getBoundingClientRect().top + scrollY;
  document.documentElement.style.setProperty("--above", `${above}px`); // the maps end where the first screen ends
}

/** Which images are on a map. @param {Split} split */
function whichImages(split) {
  const all = split.total > split.count ? `${split.count.toLocaleString("en")} of ${split.total.toLocaleString("en")} images, drawn at random` : counted(split.count, "image");
  return `${all} · ${split.name}`;
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
  byId("confusions").replaceChildren(...runs.map((run) => card(`Confusion, ${run.name}`, run.split.classes.length > MANY ? "The commonest mix-ups, what it is → what the linear probe reads; press one to see its images beside the map." : "What it is in rows, what the linear probe reads in columns. Press a cell to see its images beside the map.",
    confusionTable(run))));
  const together = runs.length > 1 && runs[0].split === runs[1].split;
  const sets = together ? [runs] : runs.map((run) => [run]);
  byId("per-class").replaceChildren(...sets.map((set) => card(`Accuracy by class, %${set[0].split.classes.length > MANY ? `: the ${MANY} lowest` : ""}`, set.map((run) => run.name).join(" above "),
    classBars(set, set.map((run) => colours[runs.indexOf(run)])))));
  byId("mistakes").replaceChildren(...runs.map((run) => {
    const { label, classes } = run.split;
    const rows = largest(run.confidence ?? [], 16, (row) => isJudged(run, row) && label?.[row] !== run.predicted?.[row]);
    return card(`Most confident mistakes, ${run.name}`, rows.length ? "What it is → what the linear probe reads." : "None.",
      gallery(run, rows, (row) => `${classes[label?.[row] ?? 0]} → ${classes[run.predicted?.[row] ?? 0]}, ${(100 * (run.confidence?.[row] ?? 0)).toFixed(0)} %`));
  }));
}

/** One line per group of runs, what a run that does not learn says, and the floors. */
function summary() {
  byId("title").textContent = payload.title;
  byId("footer").textContent = `curvssl ${payload.version} · ${payload.created} · this page needs no network`;
  const probed = ["linear", "knn"].filter((name) => payload.runs.some((run) => pooled([run], [name])));
  const rows = payload.groups.map((group, id) => {
    const runs = group.runs.map((run) => payload.runs[run]);
    const own = mapped.filter((run) => group.runs.includes(run.id));
    const last = (/** @type {string} */ key) => {
      const values = runs.flatMap((run) => (run.metrics[key] ?? []).filter((value) => typeof value === "number").slice(-1));
      return values.length ? mean(/** @type {number[]} */ (values)) : null;
    };
    const wall = runs.map((run) => Number(run.provenance.seconds ?? run.metrics.seconds?.at(-1) ?? NaN));
    const rank = last("effective_rank");
    const directions = element("td", {}, short(rank), ...(rank !== null && runs[0].config.d_z ? [element("span", {}, ` of ${runs[0].config.d_z}`)] : []));
    const values = [...probed.map((name) => percent(pooled(runs, [name]))), own.length ? fixed(mean(own.map((run) => run.rho)), 3) : "–",
      directions, short(last("epoch")), wall.every(Number.isFinite) ? duration(mean(wall)) : "–"];
    const name = element("th", { scope: "row" }, element("i", { class: "dot" }), group.name, group.runs.length > 1 ? `, ${group.runs.length} seeds` : "");
    const warning = runs.find((run) => run.warning)?.warning;
    const made = [element("tr", { class: "stat" }, name, ...values.map((value) => (typeof value === "string" ? element("td", {}, value) : value))),
      ...(warning ? [element("tr", {}, element("td", { class: "warning", colspan: values.length + 1 }, element("div", {}, `Does not learn: ${warning}.`)))] : [])];
    made[0].style.setProperty("--tint", GROUP_COLOURS[id % GROUP_COLOURS.length]);
    return made;
  });
  const heads = [...probed.map((name) => [term(name, `${TERMS[name][0]}, %`)]), [term("rho")], [term("effective_rank")], ["epochs"], ["wall time"]];
  const below = floors(payload, probed).map(({ name, run, floor }) => element("tr", { class: "floor" },
    element("th", { scope: "row" }, term("floor", name)), ...probed.map((probe) => element("td", {}, percent(pooled([run], [floor, probe]))))));
  byId("summary").replaceChildren(element("table", { class: "summary" },
    element("thead", {}, element("tr", {}, element("th", {}, ""), ...heads.map((words) => element("th", { scope: "col" }, ...words)))),
    element("tbody", {}, ...rows.flat(), ...below)),
    element("p", { class: "note" }, `${rows.length > 1 ? "Each row is an encoder that" : "The encoder"} learned from images without their labels. `,
      below.length ? "Then a simple classifier, the probe, reads the labels off its features. In italics: the same without pretraining. " : "",
      "Underlined words are explained where they stand."));
}

/** What `curvssl inspect` found in the images of the runs in view. */
function found() {
  const runs = state.shown.filter((run) => payload.runs[run.id].findings);
  const parts = runs.flatMap((run) => {
    const { duplicates, outliers, fence, beyond, typical, unreadable } = /** @type {Findings} */ (payload.runs[run.id].findings);
    const whose = runs.length > 1 ? `, ${run.name}` : "";
    const named = (/** @type {number} */ row) => fileName(run.split.path(row));
    const rowsOf = (/** @type {{row: number}[]} */ entries) => entries.map(({ row }) => row);
    /** @param {number[]} rows @param {string} what */
    const select = (rows, what) => element("button", { type: "button", onclick: () => listeners.selected(run, rows, what) }, `Show all ${rows.length.toLocaleString("en")} on the map`);
    const scores = new Map(outliers.map(({ row, score }) => [row, short(score)]));
    const far = outliers.filter(({ score }) => score > (fence ?? Infinity)); // the list goes on with the next ones
    const stands = new Map(typical.map(({ row, stands_for: count }) => [row, count.toLocaleString("en")]));
    return [
      ...(duplicates.length ? [card([term("duplicates", "Near-duplicates"), whose], `${counted(duplicates.length, "group")} of images that are almost the same.`,
        element("div", { class: "groups" }, ...duplicates.slice(0, 40).map((group) => gallery(run, rowsOf(group).slice(0, 12), named))),
        select(rowsOf(duplicates.flat()), "near-duplicates"))] : []),
      ...(outliers.length ? [card([term("outlier", "Outliers"), whose], `The oddest first, with their scores. Outliers begin at ${short(fence)}: ${counted(beyond ?? 0, "image")}.`,
        gallery(run, rowsOf(outliers).slice(0, 24), (row) => `${scores.get(row)}\n${named(row)}`), ...(far.length ? [select(rowsOf(far), "outliers")] : []))] : []),
      ...(typical.length ? [card([term("typical", "Typical images"), whose], "With how many others each stands for.",
        gallery(run, rowsOf(typical), (row) => `${stands.get(row)}\n${named(row)}`), select(rowsOf(typical), "typical images"))] : []),
      ...(unreadable.length ? [card(["Unreadable files", whose], `${counted(unreadable.length, "file")} could not be read and took no part.`,
        element("ul", { class: "files" }, ...unreadable.map(({ name, error }) => element("li", {}, element("code", {}, name), error ? ` ${error}` : ""))))] : []),
    ];
  });
  byId("found").hidden = byId("to-found").hidden = !parts.length;
  byId("findings").replaceChildren(...parts);
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
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    explain(null);
    if (mapped.length) listeners.released();
  });
  document.addEventListener("scroll", () => (byId("tip").hidden = true), { passive: true });
  wireSearch();
  wireCurves();
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
byId("quality").replaceChildren(...qualityTable(payload));
byId("seen").hidden = !payload.seen.length;
byId("views").append(...payload.seen.map((seen) => seenTable(seen, payload.seen.length > 1)));
curves();
glossary();
byId("origins").replaceChildren(...origins(payload, copy));
if (mapped.length) build();
else byId("map").hidden = byId("found").hidden = byId("to-found").hidden = byId("geometry").hidden = true;
