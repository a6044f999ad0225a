"use strict";
// Beside the map: the image under the cursor, the images that are selected, and the search for them.

const SHOWN = 48; // images of a selection, until more are wanted

/** @param {number} count @param {string} thing @param {string} [rest] */
function counted(count, thing, rest) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}${rest ? ` ${rest}` : ""}`;
}

function inspect() {
  const choice = choices[state.split];
  const split = splits[state.split];
  const row = choice.hover >= 0 ? choice.hover : choice.pinned;
  const runs = state.shown.filter((run) => run.split === split);
  const host = byId("chosen");
  if (row < 0 || !runs.length) {
    const touch = matchMedia("(hover: none)").matches;
    host.replaceChildren(...(choice.selected.size ? [] : [element("p", { class: "empty" }, touch ? "Tap a dot to see its image here." : "Point at a dot to see its image. Click to keep it.")]));
    return;
  }
  const label = split.label ? split.classes[split.label[row]] : "";
  /** @type {[string, string, (run: Mapped) => string][]} */
  const facts = [
    ["curvature", "curvature, view 1", (run) => short(run.curvature[0][row])],
    ["curvature", "curvature, view 2", (run) => short(run.curvature[1][row])],
    ["agreement", "agreement", (run) => short(run.agreement[row])],
    ["outlier", "outlier score", (run) => short(run.outlier[row])],
  ];
  if (runs.some((run) => isJudged(run, row))) {
    facts.unshift(["read_as", "read as", (run) => (isJudged(run, row) && run.predicted ? split.classes[run.predicted[row]] : "–")],
      ["confidence", "confidence", (run) => (isJudged(run, row) && run.confidence ? `${(100 * run.confidence[row]).toFixed(0)} %` : "–")]);
  } else if (runs.some((run) => run.predicted)) facts.unshift(["read_as", "read as", () => "not asked"]);
  const wrong = (/** @type {Mapped} */ run) => isJudged(run, row) && run.predicted?.[row] !== split.label?.[row];
  const head = runs.length > 1 ? [element("tr", {}, element("td"), ...runs.map((run) => element("th", { scope: "col" }, run.name)))] : [];
  const path = split.path(row);
  host.replaceChildren(
    element("div", { class: "chosen" }, thumbnail(split, row),
      element("div", {}, element("h3", {}, label || fileName(path)),
        element("p", { class: "note path" }, label ? path : path.slice(0, -fileName(path).length - 1), choice.pinned === row ? element("b", {}, label || path !== fileName(path) ? " · kept" : "kept") : ""))),
    element("table", { class: "facts" }, ...head, ...facts.map(([word, name, of]) => element("tr", {}, element("th", { scope: "row" }, term(word, name)),
      ...runs.map((run) => element("td", word === "read_as" && wrong(run) ? { class: "miss" } : {}, of(run)))))),
    ...runs.flatMap((run) => [
      element("h4", {}, runs.length > 1 ? `Nearest neighbours, ${run.name}` : "Nearest neighbours by their features"),
      gallery(run, Array.from(neighborsOf(run, row)), (near) => (split.label ? split.classes[split.label[near]] : fileName(split.path(near)))),
    ]));
}

/** @param {number} [most] images to show */
function showSelection(most = SHOWN) {
  const split = splits[state.split];
  const rows = [...(choices[state.split]?.selected ?? [])].sort((a, b) => a - b);
  const host = byId("selection");
  host.hidden = !rows.length;
  inspect();
  if (!rows.length) return host.replaceChildren();
  const run = inUse();
  const copied = element("button", { type: "button", onclick: () => copy(rows.map(split.path).join("\n"), copied) }, "Copy names");
  const ids = new Map();
  if (split.label) for (const row of rows) ids.set(split.label[row], (ids.get(split.label[row]) ?? 0) + 1);
  const share = [...ids].sort((a, b) => b[1] - a[1]).map(([id, count]) => `${split.classes[id]}: ${count}`);
  const more = rows.length > most ? [element("button", { type: "button", onclick: () => showSelection(most + 4 * SHOWN) },
    `Show more: ${most.toLocaleString("en")} of ${rows.length.toLocaleString("en")} are here`)] : [];
  return host.replaceChildren(
    element("div", { class: "row" }, element("h3", {}, counted(rows.length, "image", "selected")),
      element("button", { type: "button", onclick: () => listeners.selected(run, [], "") }, "Clear")),
    element("p", { class: "note" }, [choices[state.split].what, ...(share.length > 1 ? share.slice(0, 8) : []), ...(share.length > 8 ? ["…"] : [])].join(" · ")),
    element("div", { class: "row" },
      element("button", { type: "button", id: "zoom-selection", onclick: () => maps.forEach((view) => view.run.split === split && view.fit(rows)) }, "Zoom in"), copied,
      element("button", { type: "button", id: "export", onclick: () => exportCsv(rows) }, "Export CSV")),
    gallery(run, rows.slice(0, most), (row) => fileName(split.path(row))), ...more);
}

/** @param {number[]} rows */
function exportCsv(rows) {
  const address = URL.createObjectURL(new Blob([csvOf(rows)], { type: "text/csv" }));
  element("a", { href: address, download: "selection.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** @param {number[]} rows */
function csvOf(rows) {
  const split = splits[state.split];
  const quoted = (/** @type {string} */ text) => `"${text.replaceAll('"', '""')}"`;
  const safe = (/** @type {string} */ path) => (/^[=+\-@\t\r]/.test(path) ? `./${path}` : path); // a file, and no formula
  const lines = rows.map((row) => [split.index(row), quoted(safe(split.path(row))), split.label ? quoted(split.classes[split.label[row]]) : ""].join(","));
  return ["index,image,label", ...lines, ""].join("\n");
}

/** @param {string} text @param {HTMLElement} said */
function copy(text, said) {
  const before = said.textContent;
  navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed here").then((answer) => {
    said.textContent = answer;
    setTimeout(() => (said.textContent = before), 1500);
  });
}

/** While one types, the images whose names match are selected; Enter goes from one to the next. */
function wireSearch() {
  const field = /** @type {HTMLInputElement} */ (byId("search-text"));
  const named = payload.splits.filter(({ files }) => files.length).length;
  const numbered = splits.some(({ label }) => label) ? "class or number" : "number";
  field.placeholder = !named ? numbered : named < splits.length ? "name or number" : "part of a file name";
  let timer = 0;
  let at = -1;
  let asked = "";
  const look = () => {
    clearTimeout(timer);
    // The images in use come first; if none of them is meant, those of the other map are.
    const ids = [...new Set([inUse(), ...state.shown].map((run) => run.splitId))];
    const found = ids.map((id) => splits[id].matching(field.value));
    const which = Math.max(0, found.findIndex((rows) => rows.length));
    const rows = found[which];
    [at, asked] = [-1, field.value];
    const where = ids.length > 1 ? `of ${splits[ids[which]].name}` : "";
    byId("search-answer").textContent = field.value.trim() ? (rows.length ? counted(rows.length, "image", where) : "no image") : "";
    ids.forEach((id) => choices[id].selected.clear());
    listeners.selected(/** @type {Mapped} */ (state.shown.find((run) => run.splitId === ids[which])), rows, `found by “${field.value.trim()}”`);
  };
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(look, 200);
  });
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    if (asked !== field.value) look();
    const run = inUse();
    const rows = [...choices[run.splitId].selected].sort((a, b) => a - b);
    if (!rows.length) return;
    at = (at + 1) % rows.length;
    choose(run, rows[at]);
  });
}
