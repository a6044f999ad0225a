"use strict";
// The page's state: what is selected, and the updates when the selection changes.

const payload = /** @type {Payload} */ (JSON.parse(byId("data").textContent ?? ""));
const GROUP_COLOURS = ["#2f6fd0", "#e07b00", "#8a3ab9", "#0d9488", "#b3261e", "#7a6a55", "#c2478f", "#5b6472"];
const VIEW_COLOURS = ["#2f6fd0", "#e07b00"];
const splits = payload.splits.map((raw) => openSplit(raw, () => build()));
/** @type {Mapped[]} */
const mapped = payload.runs.flatMap((raw, id) => (raw.points ? [openRun(raw, raw.points, id, splits[raw.split])] : []));
/** @type {Choice[]} */
const choices = splits.map(() => ({ hover: -1, pinned: -1, selected: new Set(), hidden: new Set() }));
const state = {
  shown: mapped.slice(0, 2), // one run, or two side by side
  colouring: splits[0]?.label ? "class" : "curvature0",
  tool: "pan",
  split: 0, // the last one used: the inspector shows its selection
};
/** @type {Cloud[]} */
let maps = [];
/** @type {Cloud[]} */
let scatters = [];

// ---- selection

/** @type {Listeners} */
const listeners = {
  choice: (run) => choices[run.splitId],
  tool: () => state.tool,
  hovered(run, row, at) {
    if (choices[run.splitId].hover === row && !at) return;
    choices[run.splitId].hover = row;
    state.split = run.splitId;
    tip(run, row, at);
    chosen();
    if (!at && row >= 0) byId("announce").textContent = describe(run, row);
  },
  pinned(run, row) {
    Object.assign(choices[run.splitId], { pinned: row, hover: row });
    state.split = run.splitId;
    chosen();
  },
  lassoed(run, rows, add) {
    choices[run.splitId].selected = new Set(add ? [...choices[run.splitId].selected, ...rows] : rows);
    state.split = run.splitId;
    selectionChanged();
    byId("announce").textContent = `${choices[run.splitId].selected.size} images selected`;
  },
  released() {
    for (const choice of choices) Object.assign(choice, { hover: -1, pinned: -1, selected: new Set() });
    tip(mapped[0], -1);
    chosen();
    selectionChanged();
  },
  wantTool: setTool,
};

/** Selects an image and shows it on the maps. @param {Mapped} run @param {number} row */
function choose(run, row) {
  listeners.pinned(run, row);
  for (const view of maps) if (view.run.splitId === run.splitId) view.show(row);
}

/** @param {string} tool */
function setTool(tool) {
  state.tool = tool;
  for (const name of ["pan", "lasso"]) byId(`tool-${name}`).setAttribute("aria-pressed", String(name === tool));
  document.body.classList.toggle("lasso", tool === "lasso");
}

/** @param {Mapped} run @param {number} row */
function describe(run, row) {
  const { split } = run;
  const label = split.label ? `, ${split.classes[split.label[row]]}` : "";
  return `Image ${split.index(row)}${label}, curvature ${short(run.curvature[0][row])} and ${short(run.curvature[1][row])}`;
}

// ---- updates

let waiting = 0;
let resting = 0;
function chosen() {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    for (const view of [...maps, ...scatters]) view.drawOver();
    inspect();
  });
  clearTimeout(resting);
  resting = setTimeout(stars, 150); // drawn only when the cursor stops
}

function selectionChanged() {
  for (const view of [...maps, ...scatters]) view.change();
  showSelection();
}

/** @param {Mapped} run @param {number} row @param {PointerEvent} [at] */
function tip(run, row, at) {
  const box = byId("tip");
  box.hidden = row < 0 || !at;
  if (box.hidden || !at) return;
  const { split } = run;
  box.replaceChildren(thumbnail(split, row), element("span", {}, split.label ? split.classes[split.label[row]] : `image ${split.index(row)}`));
  const left = at.clientX + 18 + 110 > innerWidth ? at.clientX - 118 : at.clientX + 18;
  box.style.transform = `translate(${left}px, ${Math.max(8, at.clientY - 110)}px)`;
}

function inspect() {
  const choice = choices[state.split];
  const split = splits[state.split];
  const row = choice.hover >= 0 ? choice.hover : choice.pinned;
  const runs = state.shown.filter((run) => run.split === split);
  const host = byId("inspector");
  if (row < 0 || !runs.length) {
    host.replaceChildren(element("p", { class: "empty" }, "Point at a dot to see its image. Click to keep it."));
    return;
  }
  /** @type {[string, (run: Mapped) => string][]} */
  const facts = [
    ["curvature, view 1", (run) => short(run.curvature[0][row])],
    ["curvature, view 2", (run) => short(run.curvature[1][row])],
    ["agreement", (run) => short(run.agreement[row])],
    ["outlier score", (run) => short(run.outlier[row])],
  ];
  if (runs.some((run) => run.predicted)) {
    facts.unshift(["read as", (run) => (run.predicted ? split.classes[run.predicted[row]] : "–")],
      ["confidence", (run) => (run.confidence ? `${(100 * run.confidence[row]).toFixed(0)} %` : "–")]);
  }
  const head = runs.length > 1 ? [element("tr", {}, element("td"), ...runs.map((run) => element("th", { scope: "col" }, run.name)))] : [];
  host.replaceChildren(
    element("div", { class: "chosen" }, thumbnail(split, row),
      element("div", {}, element("h3", {}, split.label ? split.classes[split.label[row]] : `Image ${split.index(row)}`),
        element("p", { class: "note" }, `image ${split.index(row)}${choice.pinned === row ? " · kept" : ""}`))),
    element("table", { class: "facts" }, ...head, ...facts.map(([name, of]) => element("tr", {}, element("th", { scope: "row" }, name),
      ...runs.map((run) => element("td", split.label && name === "read as" && run.predicted && run.predicted[row] !== split.label[row] ? { class: "miss" } : {}, of(run)))))),
    ...runs.flatMap((run) => [
      element("h4", {}, runs.length > 1 ? `Neighbours, ${run.name}` : "Nearest neighbours in feature space"),
      gallery(run, Array.from(neighborsOf(run, row)), (near) => (split.label ? split.classes[split.label[near]] : String(split.index(near))), choose),
    ]));
}

function showSelection() {
  const split = splits[state.split];
  const rows = [...(choices[state.split]?.selected ?? [])].sort((a, b) => a - b);
  const host = byId("selection");
  host.hidden = !rows.length;
  if (!rows.length) return host.replaceChildren();
  const run = state.shown.find((one) => one.split === split) ?? state.shown[0];
  const indices = rows.map((row) => split.index(row));
  const list = /** @type {HTMLTextAreaElement} */ (element("textarea", { readonly: "", rows: 3, "aria-label": "Selected indices", id: "indices" }));
  list.value = indices.join(", ");
  const copied = element("button", { type: "button", onclick: () => copy(list.value, copied) }, "Copy indices");
  const ids = new Map();
  if (split.label) for (const row of rows) ids.set(split.label[row], (ids.get(split.label[row]) ?? 0) + 1);
  const share = [...ids].sort((a, b) => b[1] - a[1]).map(([id, count]) => `${split.classes[id]} ${count}`).join(" · ");
  return host.replaceChildren(
    element("div", { class: "row" }, element("h3", {}, `${rows.length.toLocaleString("en")} ${rows.length === 1 ? "image" : "images"} selected`), copied,
      element("button", { type: "button", id: "export", onclick: () => exportCsv(rows) }, "Export CSV"),
      element("button", { type: "button", onclick: () => listeners.lassoed(run, [], false) }, "Clear")),
    element("p", { class: "note" }, share), list,
    gallery(run, rows.slice(0, 48), (row) => String(split.index(row)), choose),
    element("p", { class: "note" }, rows.length > 48 ? `The first 48 are shown; the list and the export hold all ${rows.length.toLocaleString("en")}.` : ""));
}

/** @param {number[]} rows */
function exportCsv(rows) {
  const split = splits[state.split];
  const quoted = (/** @type {string} */ text) => `"${text.replaceAll('"', '""')}"`;
  const lines = rows.map((row) => [split.index(row), split.label ? quoted(split.classes[split.label[row]]) : ""].join(","));
  const address = URL.createObjectURL(new Blob([["index,label", ...lines, ""].join("\n")], { type: "text/csv" }));
  element("a", { href: address, download: "selection.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** @param {string} text @param {HTMLElement} said */
function copy(text, said) {
  const before = said.textContent;
  navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed here").then((answer) => {
    said.textContent = answer;
    setTimeout(() => (said.textContent = before), 1500);
  });
}

function stars() {
  const choice = choices[state.split];
  const wanted = choice.hover >= 0 ? choice.hover : choice.pinned;
  /** @type {(() => void)[]} */
  const paint = [];
  byId("stars").replaceChildren(...state.shown.map((run) => {
    const own = run.split === splits[state.split] && wanted >= 0;
    const row = own ? wanted : largest(run.curvature[0], 1)[0];
    const { tips, held, cosine } = edgePlane(run, row);
    const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { width: 520, height: 520, class: "star", role: "img", "aria-label": `Edges from image ${run.split.index(row)} to its neighbours` }));
    const near = neighborsOf(run, row);
    const cells = cosine.map((line, a) => element("tr", {}, element("th", { scope: "row" }, thumbnail(run.split, near[a])), ...line.map((value, b) => {
      const td = element("td", {}, a === b ? "" : value.toFixed(2).replace("-", "−"));
      td.style.setProperty("--share", String(a === b ? 0 : value));
      return td;
    })));
    const sum = cosine.flatMap((line, a) => line.slice(a + 1)).reduce((total, value) => total + value, 0);
    const made = card(`Edges of image ${run.split.index(row)}`, `${run.name}: to its ${run.k} nearest in feature space, in the plane that holds ${(100 * held).toFixed(0)} % of their squared length. The cosines between them sum to ${short(sum)}.${own ? "" : " Choose any image on the map."}`,
      element("div", { class: "edges" }, canvas, element("table", { class: "cosines", "aria-label": "Cosines between the edges" }, ...cells)));
    if (run.split.ready) paint.push(() => drawStar(canvas, run, row, tips));
    return made;
  }));
  paint.forEach((draw) => draw()); // colours are known only after the canvas is on the page
}

// ---- the legend and the colours

function recolour() {
  const { ids, values } = COLOURINGS[state.colouring];
  const range = values ? quantiles(state.shown.map(values), 0.01, 0.99) : /** @type {[number, number]} */ ([0, 1]);
  for (const view of [...maps, ...scatters]) {
    view.colours = pointPixels(view.run, state.colouring, range);
    view.change();
  }
  const host = byId("legend");
  host.replaceChildren();
  if (values) {
    host.append(element("div", { class: "ramp" }, element("span", {}, short(range[0])), element("i"), element("span", {}, short(range[1])),
      element("em", {}, COLOURINGS[state.colouring].label)));
  }
  const split = splits[state.split];
  if (!split?.label) return;
  const { hidden } = choices[state.split];
  /** @param {string} text @param {() => void} act */
  const all = (text, act) => element("button", { type: "button", class: "quiet", onclick: () => { act(); recolour(); } }, text);
  host.append(element("div", { class: "classes", role: "group", "aria-label": "Classes shown" }, ...split.classes.map((name, id) => {
    const dot = element("i", {});
    dot.style.setProperty("--tint", ids ? classColour(id) : "var(--muted)");
    return element("button", { type: "button", "aria-pressed": String(!hidden.has(id)), "data-class": id, onclick: () => {
      if (!hidden.delete(id)) hidden.add(id);
      recolour();
      /** @type {HTMLElement | null} */ (host.querySelector(`[data-class="${id}"]`))?.focus();
    } }, dot, name);
  })), all("All", () => hidden.clear()), all("None", () => split.classes.forEach((_, id) => hidden.add(id))));
}

// ---- building

function curves() {
  const groups = payload.groups.map((group, id) => ({ ...group, colour: GROUP_COLOURS[id % GROUP_COLOURS.length], runs: group.runs.map((run) => payload.runs[run]) }));
  const known = ["loss", "", "rho", "effective_rank", "z_std", "knn", "rankme", "alpha_req", "nesum", "stable_rank", "lr", "grad_norm", "views_per_s", "epoch_seconds", "seconds"];
  const has = [...new Set(payload.runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => !["epoch", "step"].includes(key));
  const place = (/** @type {string} */ key) => (known.includes(key) ? known.indexOf(key) : 1);
  const keys = has.sort((a, b) => place(a) - place(b));
  const names = { rho: "ρ of the two views' curvature", effective_rank: "effective rank of z", knn: "kNN on held-out images, %", rankme: "RankMe of h, directions in use", alpha_req: "α-ReQ of h, good near 1", nesum: "NESum of h", stable_rank: "stable rank of h", lr: "learning rate", epoch_seconds: "wall time of an epoch, s", seconds: "wall time since the start, s", z_std: "standard deviation of z", grad_norm: "gradient norm", views_per_s: "views per second" };
  byId("curves").replaceChildren(...keys.flatMap((key) => {
    const series = groups.flatMap((group) => {
      const made = seriesOf(group.runs.map((run) => run.metrics), key, group.name, group.colour);
      return made ? [made] : [];
    });
    return series.length ? [lineChart(/** @type {Record<string, string>} */ (names)[key] ?? key.replaceAll("_", " "), series, "epoch")] : [];
  }));
  const several = groups.some((group) => group.runs.length > 1);
  byId("curve-key").replaceChildren(...groups.map((group) => {
    const dot = element("i", {});
    dot.style.setProperty("--tint", group.colour);
    return element("span", {}, dot, group.name + (group.runs.length > 1 ? `, mean of ${group.runs.length} seeds` : ""));
  }), several ? element("span", { class: "note" }, "The band is ± one standard deviation over the seeds.") : "");
}

/** Mean and standard deviation over the runs at each epoch. @param {Record<string, (number | null)[]>[]} metrics
 *  @param {string} key @param {string} name @param {string} colour @returns {Series | null} */
function seriesOf(metrics, key, name, colour) {
  /** @type {Map<number, number[]>} */
  const at = new Map();
  for (const columns of metrics) {
    (columns[key] ?? []).forEach((value, i) => {
      const x = columns.epoch?.[i];
      if (typeof value === "number" && typeof x === "number") at.set(x, [...(at.get(x) ?? []), value]);
    });
  }
  const points = [...at].sort((a, b) => a[0] - b[0]);
  if (!points.length) return null;
  const means = points.map(([, values]) => mean(values));
  const spread = points.map(([, values], i) => Math.sqrt(values.reduce((sum, value) => sum + (value - means[i]) ** 2, 0) / Math.max(1, values.length - 1)));
  return { name, colour, x: points.map(([x]) => x), mean: means, low: means.map((m, i) => m - spread[i]), high: means.map((m, i) => m + spread[i]) };
}
