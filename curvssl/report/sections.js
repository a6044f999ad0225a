"use strict";
// The parts of the page that are built once for the runs in view: tables, galleries, provenance.

const MANY = 40; // with more classes than this a confusion matrix is too large to read

/** @param {Split} split @param {number} row @param {string} [text] */
function thumbnail(split, row, text) {
  const label = split.label ? `, ${split.classes[split.label[row]]}` : "";
  const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", {
    width: split.side, height: split.side, class: split.exact ? "thumb exact" : "thumb", role: "img",
    "aria-label": `${split.path(row)}${label}`, "data-row": row,
  }));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  if (split.ready) split.paint(context, row, 0, 0, split.side);
  if (text === undefined) return canvas;
  return element("figure", {}, canvas, element("figcaption", {}, text));
}

/** Thumbnails that select their image when pressed. @param {Mapped} run @param {number[]} rows
 *  @param {(row: number) => string} caption */
function gallery(run, rows, caption) {
  return element("div", { class: "gallery" }, ...rows.map((row) => element("button", {
    type: "button", class: "bare", title: run.split.path(row), onclick: () => choose(run, row),
  }, thumbnail(run.split, row, caption(row)))));
}

/** @param {string | (string | Node)[]} title @param {string} note @param {Node[]} content */
function card(title, note, ...content) {
  return element("div", { class: "card" }, element("h4", {}, ...[title].flat()), element("p", { class: "note" }, note), ...content);
}

/** @param {Score | undefined} score */
function percent(score) {
  if (!score || typeof score.mean !== "number") return "–";
  const spread = score.accuracy && score.accuracy.length > 1 && typeof score.std === "number";
  return score.mean.toFixed(1) + (spread ? ` ± ${Number(score.std).toFixed(1)}` : "");
}

/** Mean and deviation of a score over several runs; for a single run, over the seeds of its probe.
 *  @param {RawRun[]} runs @param {string[]} path where probes.json keeps the score @returns {Score | undefined} */
function pooled(runs, path) {
  const scores = runs.map((run) => path.reduce((tree, name) => tree?.[name], /** @type {any} */ (run.probes)))
    .filter((score) => typeof score?.mean === "number");
  if (scores.length < 2) return scores[0];
  const accuracy = scores.map((score) => score.mean);
  const middle = mean(accuracy);
  const std = Math.sqrt(accuracy.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (accuracy.length - 1));
  return { accuracy, mean: middle, std };
}

/** What these probes read without pretraining. It is almost the same in all runs on a data set: the first one's.
 *  @param {Payload} payload @param {string[]} probes @returns {{name: string, run: RawRun, floor: string}[]} */
function floors(payload, probes) {
  const sets = new Map(payload.runs.map((run) => [run.config.dataset, payload.runs.filter((one) => one.config.dataset === run.config.dataset)]));
  const has = (/** @type {RawRun} */ run, /** @type {string} */ name) => probes.some((probe) => typeof run.probes[name]?.[probe]?.mean === "number");
  const names = [...new Set(payload.runs.flatMap((run) => Object.keys(run.probes).filter((name) => has(run, name))))];
  return names.flatMap((floor) => [...sets].flatMap(([dataset, runs]) => {
    const run = runs.find((one) => has(one, floor));
    return run ? [{ name: sets.size > 1 ? `${floor}, ${dataset}` : floor, run, floor }] : [];
  }));
}

/** One row per group and per floor, one column per probe. @param {Payload} payload @returns {HTMLElement} */
function probeTable(payload) {
  const groups = payload.groups.map((group) => ({ ...group, runs: group.runs.map((id) => payload.runs[id]) }));
  const entries = payload.runs.flatMap((run) => Object.entries(run.probes));
  const probes = [...new Set(entries.filter(([, score]) => typeof score?.mean === "number").map(([name]) => name))];
  const figures = [...new Set(payload.runs.flatMap((run) => Object.keys(run.probes.retrieval ?? {})))];
  /** The mean over runs of a figure of retrieval. @param {RawRun[]} runs @param {string[]} path */
  const figure = (runs, path) => {
    const values = runs.map((run) => path.reduce((tree, name) => tree?.[name], /** @type {any} */ (run.probes))).filter(Number.isFinite);
    return values.length ? mean(values).toFixed(1) : "–";
  };
  if (!probes.length) return element("p", { class: "note" }, "No probe has been run: the images have no labels.");
  const best = probes.map((probe) => Math.max(...groups.map((group) => pooled(group.runs, [probe])?.mean ?? -1)));
  const rows = groups.map((group) => element("tr", {},
    element("th", { scope: "row" }, group.name, group.runs.length > 1 ? `, ${group.runs.length} seeds` : ""),
    ...probes.map((probe, i) => {
      const score = pooled(group.runs, [probe]);
      return element("td", groups.length > 1 && score?.mean === best[i] ? { class: "best" } : {}, percent(score));
    }), ...figures.map((name) => element("td", {}, figure(group.runs, ["retrieval", name])))));
  const below = floors(payload, probes);
  rows.push(...below.map(({ name, run, floor }) => element("tr", { class: "floor" }, element("th", { scope: "row" }, name),
    ...probes.map((probe) => element("td", {}, percent(pooled([run], [floor, probe])))),
    ...figures.map((one) => element("td", {}, figure([run], [floor, "retrieval", one]))))));
  const head = element("tr", {}, element("th", {}, ""), ...probes.map((probe) => element("th", { scope: "col" }, term(probe))),
    ...figures.map((name) => element("th", { scope: "col" }, term(name === "mAP" ? "mAP" : "recall", name))));
  return element("div", { class: "card scroll" }, element("h4", {}, `Probes: accuracy${figures.length ? " and retrieval" : ""} on the test split, in percent`),
    element("table", { class: "figures" }, element("thead", {}, head), element("tbody", {}, ...rows)),
    element("p", { class: "note" }, "± is the standard deviation over seeds: of the run where a row has several, of the probe where it has one. ",
      ...(below.length ? ["The rows in italics are ", term("floor", "floors"), ": what a probe reads without pretraining."] : [])));
}

/** What `curvssl quality` measured: a run, the same encoder before training, and the verdict. @param {Payload} payload */
function qualityTable(payload) {
  const runs = payload.runs.filter((run) => run.quality);
  if (!runs.length) return [element("p", { class: "note" }, "How good the features are without labels: ", element("code", {}, "curvssl quality RUN"), " measures it.")];
  const names = Object.keys(runs[0].quality?.measures ?? {});
  const row = (/** @type {string} */ name, /** @type {Record<string, number | null>} */ values, /** @type {Tree} */ kind) => element("tr", kind,
    element("th", { scope: "row" }, name), ...names.map((measure) => element("td", {}, short(values[measure] ?? null))));
  const rows = runs.flatMap(({ name, quality }) => (quality ? [row(name, quality.measures, {}), row("before training", quality.untrained, { class: "floor" })] : []));
  return [element("div", { class: "card scroll" }, element("h4", {}, "Without labels"),
    element("table", { class: "figures" }, element("thead", {}, element("tr", {}, element("th", {}, ""), ...names.map((name) => element("th", { scope: "col" }, term(name))))),
      element("tbody", {}, ...rows)),
    ...runs.map(({ name, quality }) => element("p", { class: "note" }, `${name}: ${quality?.verdict}`)))];
}

/** One row per image: the image, then its views. @param {Seen} seen @param {boolean} named whether the page has several */
function seenTable({ groups, columns }, named) {
  const head = columns.map(({ name, size }) => element("th", { scope: "col" }, name, element("small", {}, size)));
  const rows = columns[0].images.map((_, row) => element("tr", {}, ...columns.map(({ name, images }) => element("td", {},
    element("img", { src: images[row], alt: `row ${row + 1}, ${name}` })))));
  const blended = columns.some(({ name }) => name === "blend");
  return element("div", { class: "card" }, ...(named ? [element("h4", {}, groups.join(", "))] : []),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Views, ${groups.join(", ")}` },
      element("table", { class: "seen" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))),
    ...(blended ? [element("p", { class: "note" }, "A blend mixes the first views of two rows: the first and the second, the third and the fourth, and so on.")] : []));
}

/** @param {Mapped} run @returns {number[][]} rows are the true classes */
function confusion(run) {
  const size = run.split.classes.length;
  const table = Array.from({ length: size }, () => new Array(size).fill(0));
  const { label } = run.split;
  if (label && run.predicted) run.predicted.forEach((guess, row) => guess < size && table[label[row]][guess]++);
  return table;
}

/** The images of one class that are predicted as another. @param {Mapped} run @param {number} truth @param {number} guess */
function readAs(run, truth, guess) {
  return Array.from(run.split.label ?? []).flatMap((id, row) => (id === truth && run.predicted?.[row] === guess ? [row] : []));
}

/** Selects those images. @param {Mapped} run @param {number} truth @param {number} guess */
function pickRead(run, truth, guess) {
  const { classes } = run.split;
  listeners.selected(run, readAs(run, truth, guess), `${classes[truth]} that ${run.name} reads as ${classes[guess]}`);
}

/** For many classes: the most frequent confusions, as buttons. @param {Mapped} run */
function mixUps(run) {
  const { classes } = run.split;
  const cells = confusion(run).flatMap((line, truth) => line.map((count, guess) => ({ count, truth, guess })));
  const worst = cells.filter(({ count, truth, guess }) => count && truth !== guess).sort((a, b) => b.count - a.count);
  return element("div", { class: "mixups" }, ...worst.slice(0, 40).map(({ count, truth, guess }) => element("button", {
    type: "button", onclick: () => pickRead(run, truth, guess),
  }, `${classes[truth]} → ${classes[guess]} `, element("b", {}, String(count)))));
}

/** @param {Mapped} run */
function confusionTable(run) {
  const { classes } = run.split;
  if (classes.length > MANY) return mixUps(run);
  const counts = confusion(run);
  const body = element("tbody");
  counts.forEach((line, truth) => {
    const total = line.reduce((sum, count) => sum + count, 0) || 1;
    body.append(element("tr", {}, element("th", { scope: "row" }, classes[truth]), ...line.map((count, guess) => {
      const td = element("td", {
        tabindex: truth || guess ? -1 : 0, "data-share": (count / total).toFixed(3), class: truth === guess && count > total / 2 ? "right" : truth === guess ? "right weak" : "wrong",
        "aria-label": `${count} of ${classes[truth]} read as ${classes[guess]}`, title: `${count} of ${classes[truth]} read as ${classes[guess]}`,
        onclick: () => pickRead(run, truth, guess),
      }, count && classes.length <= 20 ? String(count) : "");
      td.style.setProperty("--share", String(count / total));
      return td;
    })));
  });
  body.addEventListener("keydown", (event) => {
    const from = /** @type {HTMLTableCellElement} */ (event.target);
    const move = ARROWS[event.key];
    if (event.key === "Enter" || event.key === " ") from.click();
    else if (!move) return;
    event.preventDefault();
    if (!move) return;
    const line = /** @type {HTMLTableRowElement} */ (from.parentElement);
    const to = /** @type {HTMLTableRowElement | undefined} */ (body.children[line.rowIndex - 1 + move[1]])?.cells[from.cellIndex + move[0]];
    if (!to || to.tagName !== "TD") return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
  const head = element("tr", {}, element("th", { class: "corner" }, element("span", {}, "read as →")), ...classes.map((name) => element("th", { scope: "col" }, element("span", {}, name))));
  return element("div", { class: "scroll" }, element("table", { class: "confusion" }, element("thead", {}, head), body));
}

/** @param {Mapped[]} runs that share their split; one bar each @param {string[]} colours */
function classBars(runs, colours) {
  const tables = runs.map(confusion);
  const { classes } = runs[0].split;
  const missed = classes.map((_, id) => 1 - tables[0][id][id] / (tables[0][id].reduce((sum, count) => sum + count, 0) || 1));
  const shown = classes.length > MANY ? largest(missed, MANY) : classes.map((_, id) => id);
  const host = element("div", { class: "bars" }, ...shown.map((id) => {
    const name = classes[id];
    const bars = tables.map((table, which) => {
      const total = table[id].reduce((sum, count) => sum + count, 0);
      const share = total ? table[id][id] / total : 0;
      const bar = element("i", { class: "level" });
      bar.style.setProperty("--share", String(share));
      bar.style.setProperty("--tint", colours[which]);
      return element("span", { class: "track" }, bar, element("b", {}, total ? (100 * share).toFixed(1) : "–"));
    });
    return element("div", { class: "class" }, element("span", { class: "name" }, name), element("div", {}, ...bars));
  }));
  host.style.setProperty("--name", `${Math.min(14, Math.max(...classes.map((name) => name.length)) + 1)}ch`);
  return host;
}

/** Nested settings as dotted names. @param {Tree} tree @param {string} [prefix] @returns {[string, string][]} */
function flat(tree, prefix = "") {
  return Object.entries(tree).flatMap(([name, value]) => {
    if (value && typeof value === "object" && !Array.isArray(value)) return flat(value, `${prefix}${name}.`);
    const shown = Array.isArray(value) ? value.join(", ") : value === null || value === undefined ? "–" : String(value);
    return /** @type {[string, string][]} */ ([[prefix + name, shown]]);
  });
}

/** One row per setting, one column per run; rows where the runs differ are marked. @param {RawRun[]} runs
 *  @param {(run: RawRun) => Tree} of @param {string} corner */
function settingsTable(runs, of, corner) {
  const columns = runs.map((run) => new Map(flat(of(run))));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const body = names.map((name) => {
    const values = columns.map((column) => column.get(name) ?? "–");
    const same = values.every((value) => value === values[0]);
    return element("tr", same ? {} : { class: "differs" }, element("th", { scope: "row" }, name),
      ...(same ? [element("td", { colspan: runs.length }, values[0])] : values.map((value) => element("td", {}, value))));
  });
  const head = element("tr", {}, element("th", { scope: "col" }, corner), ...runs.map((run) => element("th", { scope: "col" }, run.name)));
  return element("div", { class: "scroll" }, element("table", { class: "settings" }, element("thead", {}, head), element("tbody", {}, ...body)));
}

/** @param {Payload} payload @param {(text: string, said: HTMLElement) => void} copy */
function origins(payload, copy) {
  const commands = payload.runs.filter((run) => run.provenance.command).map((run) => {
    const command = Array.isArray(run.provenance.command) ? run.provenance.command.join(" ") : String(run.provenance.command);
    const button = element("button", { type: "button", onclick: () => copy(command, button) }, "Copy");
    return element("div", { class: "command" }, element("span", { class: "name" }, run.name), element("code", {}, command), button);
  });
  const rest = (/** @type {RawRun} */ run) => Object.fromEntries(Object.entries(run.provenance).filter(([name]) => name !== "command"));
  return [
    element("div", { class: "card" }, element("h4", {}, "To run again"), ...commands),
    element("details", { class: "card", open: "" }, element("summary", {}, "Machine, versions and data"), settingsTable(payload.runs, rest, "Fact")),
    element("details", { class: "card" }, element("summary", {}, "Configuration"),
      element("p", { class: "note" }, "Marked rows differ between the runs."), settingsTable(payload.runs, (run) => run.config, "Setting")),
  ];
}
