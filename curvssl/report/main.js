"use strict";
// The page's state: what is selected, and the updates when the selection changes.

const payload = /** @type {Payload} */ (JSON.parse(byId("data").textContent ?? ""));
const GROUP_COLOURS = ["#2f6fd0", "#e07b00", "#8a3ab9", "#0d9488", "#b3261e", "#7a6a55", "#c2478f", "#5b6472"];
const VIEW_COLOURS = ["#2f6fd0", "#e07b00"];
const NARROW = 1100; // pixels, as in page.css: up to this width the images are listed below the maps, not beside them
const splits = payload.splits.map((raw) => openSplit(raw, () => build()));
/** @type {Mapped[]} */
const mapped = payload.runs.flatMap((raw, id) => (raw.points ? [openRun(raw, raw.points, id, splits[raw.split])] : []));
/** @type {Choice[]} */
const choices = splits.map(() => ({ hover: -1, pinned: -1, selected: new Set(), what: "", hidden: new Set() }));
const state = {
  shown: mapped.slice(0, 2), // one run, or two side by side
  colouring: splits[0]?.label ? "class" : "outlier",
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
    use(run.splitId);
    tip(run, row, at);
    chosen();
    if (!at && row >= 0) byId("announce").textContent = describe(run, row);
  },
  pinned(run, row, at) {
    Object.assign(choices[run.splitId], { pinned: row, hover: row });
    use(run.splitId);
    tip(run, row, at);
    chosen();
    if (at && row >= 0) byId("announce").textContent = describe(run, row);
  },
  selected(run, rows, what, add) {
    const choice = choices[run.splitId];
    choice.selected = new Set(add ? [...choice.selected, ...rows] : rows);
    choice.what = what;
    if (rows.length) { // the images take the place of the one that was kept: below it nobody would see them
      Object.assign(choice, { hover: -1, pinned: -1 });
      tip(run, -1);
    }
    use(run.splitId);
    selectionChanged();
    bringSelection();
    byId("announce").textContent = counted(choice.selected.size, "image", `${what} selected`);
  },
  released() {
    for (const choice of choices) Object.assign(choice, { hover: -1, pinned: -1, selected: new Set() });
    tip(mapped[0], -1);
    chosen();
    selectionChanged();
  },
  wantTool: setTool,
};

/** Makes a split the one that the panel beside the map and the legend are about. @param {number} id */
function use(id) {
  if (state.split === id) return;
  state.split = id;
  showSelection();
}

/** Keeps an image and shows it on the maps. @param {Mapped} run @param {number} row */
function choose(run, row) {
  listeners.pinned(run, row);
  for (const view of maps) if (view.run.splitId === run.splitId) view.show(row);
  bringMaps();
}

/** Scrolls to the maps, unless one can be seen. */
function bringMaps() {
  const box = byId("maps").getBoundingClientRect();
  if (box.bottom < 160 || box.top > innerHeight - 160) byId("explorer").scrollIntoView();
}

/** Scrolls to the selected images: beside the maps or, on a narrow screen, to their beginning below the last map. */
function bringSelection() {
  if (!choices[state.split].selected.size || document.activeElement === byId("search-text")) return;
  if (innerWidth > NARROW) bringMaps();
  else byId("selection").scrollIntoView();
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
  return `${split.path(row)}${label}, curvature ${short(run.curvature[0][row])} and ${short(run.curvature[1][row])}`;
}

/** The run on the page whose images are in use. @returns {Mapped} */
function inUse() {
  return state.shown.find((one) => one.splitId === state.split) ?? state.shown[0];
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
  const label = split.label ? [element("span", {}, split.classes[split.label[row]])] : [];
  box.replaceChildren(thumbnail(split, row), ...label, element("span", {}, fileName(split.path(row))));
  const left = at.clientX + 18 + 130 > innerWidth ? at.clientX - 148 : at.clientX + 18;
  box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(8, at.clientY - 130)}px)`;
}

function stars() {
  const choice = choices[state.split];
  const wanted = choice.hover >= 0 ? choice.hover : choice.pinned;
  /** @type {(() => void)[]} */
  const paint = [];
  byId("stars").replaceChildren(...state.shown.map((run) => {
    const own = run.split === splits[state.split] && wanted >= 0;
    const row = own ? wanted : run.curvature[0].reduce((best, value, at, all) => (value > all[best] ? at : best), 0);
    const { tips, held, cosine } = edgePlane(run, row);
    const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { width: 520, height: 520, class: "star", role: "img", "aria-label": `Edges from ${run.split.path(row)} to its neighbours` }));
    const near = neighborsOf(run, row);
    const cells = cosine.map((line, a) => element("tr", {}, element("th", { scope: "row" }, thumbnail(run.split, near[a])), ...line.map((value, b) => {
      const td = element("td", {}, a === b ? "" : fixed(value, 2));
      td.style.setProperty("--share", String(a === b ? 0 : value));
      return td;
    })));
    const sum = cosine.flatMap((line, a) => line.slice(a + 1)).reduce((total, value) => total + value, 0);
    const made = card(`Edges of ${fileName(run.split.path(row))}`, `${run.name}: to its ${run.k} nearest in feature space, in the plane that holds ${(100 * held).toFixed(0)} % of their squared length. The cosines between them sum to ${short(sum)}.${own ? "" : " Choose any image on the map."}`,
      element("div", { class: "edges" }, canvas, element("table", { class: "cosines", "aria-label": "Cosines between the edges" }, ...cells)));
    if (run.split.ready) paint.push(() => drawStar(canvas, run, row, tips));
    return made;
  }));
  paint.forEach((draw) => draw()); // colours are known only after the canvas is on the page
}

// ---- the legend and the colours

function recolour() {
  const { values, label, term: word } = COLOURINGS[state.colouring];
  const comparable = (/** @type {Mapped} */ run) => (word === "curvature" ? run.kind : "");
  const kinds = [...new Set(state.shown.map(comparable))];
  const host = byId("legend");
  host.replaceChildren();
  for (const kind of kinds) { // curvature of another kind has another scale
    const alike = state.shown.filter((run) => comparable(run) === kind);
    const range = values ? quantiles(alike.map(values), 0.01, 0.99) : /** @type {[number, number]} */ ([0, 1]);
    for (const view of [...maps, ...scatters].filter(({ run }) => alike.includes(run))) {
      view.colours = pointPixels(view.run, state.colouring, range);
      view.change();
    }
    if (!values) continue;
    const whose = kinds.length > 1 ? `${alike.map((run) => run.name).join(", ")}: ` : "";
    host.append(element("div", { class: "ramp" }, element("span", {}, short(range[0])), element("i"), element("span", {}, short(range[1])),
      element("em", {}, whose, term(word, label), kind && `, ${kind}`)));
  }
  const sets = [...new Set(state.shown.map((run) => run.splitId))].filter((id) => splits[id].label);
  for (const id of sets) host.append(...classLegend(id, state.shown.some((run) => run.splitId !== id)));
}

/** The classes of a set of images, each a switch. @param {number} splitId @param {boolean} named whether others are shown */
function classLegend(splitId, named) {
  const split = splits[splitId];
  const { hidden } = choices[splitId];
  const { ids } = COLOURINGS[state.colouring];
  /** @param {string} text @param {() => void} act */
  const all = (text, act) => element("button", { type: "button", class: "quiet", onclick: () => { act(); recolour(); } }, text);
  return [...(named ? [element("span", { class: "note" }, split.name)] : []),
    element("div", { class: "classes", role: "group", "aria-label": `Classes shown of ${split.name}` }, ...split.classes.map((name, id) => {
      const dot = element("i", {});
      dot.style.setProperty("--tint", ids ? classColour(id) : "var(--muted)");
      return element("button", { type: "button", "aria-pressed": String(!hidden.has(id)), "data-class": id, "data-split": splitId, onclick: () => {
        if (!hidden.delete(id)) hidden.add(id);
        recolour();
        /** @type {HTMLElement | null} */ (byId("legend").querySelector(`[data-class="${id}"][data-split="${splitId}"]`))?.focus();
      } }, dot, name);
    })), all("All", () => hidden.clear()), all("None", () => split.classes.forEach((_, id) => hidden.add(id)))];
}
