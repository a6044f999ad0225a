"use strict";
// The charts of training: one per quantity, with linked zoom, log axis, smoothing, and enlarged by a click.

/** @typedef {{name: string, colour: string, x: number[], mean: number[], low: number[], high: number[]}} Series */
/** @typedef {{key: string, title: string, unit: string, series: Series[]}} Chart */

/** In this order, with their titles and what the axis counts; the loss's own terms come after the loss.
 *  @type {Record<string, [string, string]>} */
const METRICS = {
  loss: ["loss", "loss"],
  "": ["", ""],
  rho: ["ρ of the two views' curvature", "ρ"],
  effective_rank: ["effective rank of z", "directions"],
  z_std: ["spread of z", "standard deviation"],
  knn: ["kNN on held-out images", "accuracy, %"],
  rankme: ["RankMe of h", "directions"],
  alpha_req: ["α-ReQ of h", "exponent"],
  nesum: ["NESum of h", "directions"],
  stable_rank: ["stable rank of h", "directions"],
  selfcluster: ["SelfCluster of h", "0 to 1"],
  twonn: ["TwoNN of h", "dimensions"],
  lidar: ["LiDAR of h", "directions"],
  lr: ["learning rate", "learning rate"],
  grad_norm: ["gradient norm", "length"],
  views_per_s: ["views per second", "views / s"],
  epoch_seconds: ["wall time of an epoch", "seconds"],
  seconds: ["wall time since the start", "seconds"],
};
const SMALL = { width: 330, height: 200, left: 58, bottom: 34 };
const FLAT = 1 / 7; // of the axis: a curve that covers less of a linear axis, and more of a log axis, gets a log axis
const drawn = { axis: "fitting", smooth: 1, from: -Infinity, to: Infinity, enlarged: "" };
/** @type {Chart[]} */
let charts = [];

function curves() {
  const groups = payload.groups.map((group, id) => ({ ...group, colour: GROUP_COLOURS[id % GROUP_COLOURS.length], runs: group.runs.map((run) => payload.runs[run]) }));
  const order = Object.keys(METRICS);
  const place = (/** @type {string} */ key) => (key in METRICS ? order.indexOf(key) : 1);
  const keys = [...new Set(payload.runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => !["epoch", "step"].includes(key));
  charts = keys.sort((a, b) => place(a) - place(b)).flatMap((key) => {
    const series = groups.flatMap((group) => seriesOf(group.runs.map((run) => run.metrics), key, group.name, group.colour) ?? []);
    const name = key.replaceAll("_", " ");
    const [title, unit] = METRICS[key] ?? [name, name];
    return series.length ? [{ key, title, unit, series }] : [];
  });
  const several = groups.some((group) => group.runs.length > 1);
  byId("curve-key").replaceChildren(...groups.map((group) => {
    const dot = element("i", {});
    dot.style.setProperty("--tint", group.colour);
    return element("span", {}, dot, group.name + (group.runs.length > 1 ? `, mean of ${group.runs.length} seeds` : ""));
  }), several ? element("span", { class: "note" }, "The band is ± one standard deviation over the seeds.") : "");
  byId("training").hidden = !charts.length;
  if (charts.length) drawCurves();
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

function drawCurves() {
  byId("curves").replaceChildren(...charts.map((chart) => lineChart(chart, SMALL)));
  byId("all-epochs").hidden = drawn.from === -Infinity && drawn.to === Infinity;
  const epochs = charts.flatMap(({ series }) => series.flatMap(({ x }) => [x[0], x[x.length - 1]]));
  for (const [id, value] of /** @type {[string, number][]} */ ([["from-epoch", Math.max(drawn.from, Math.min(...epochs))], ["to-epoch", Math.min(drawn.to, Math.max(...epochs))]])) {
    /** @type {HTMLInputElement} */ (byId(id)).value = String(value);
  }
  drawEnlarged();
}

function drawEnlarged() {
  const large = charts.find(({ key }) => key === drawn.enlarged);
  const size = innerWidth < 720 ? { width: 360, height: 300, left: 58, bottom: 36 } : { width: 900, height: 460, left: 70, bottom: 40 };
  byId("enlarged-chart").replaceChildren(...(large ? [lineChart(large, size)] : []));
}

/** A running mean over so many epochs. @param {Series} series @param {number} epochs @returns {number[]} */
function smoothed({ x, mean: values }, epochs) {
  return x.map((at) => mean(values.filter((_, i) => Math.abs(x[i] - at) <= (epochs - 1) / 2)));
}

/** Which axis flattens no curve: linear, log or, where a log axis would flatten one as well, one for each curve.
 *  @param {number[][]} lines @returns {"linear" | "log" | "own"} */
function fitting(lines) {
  const all = lines.flat();
  if (all.length < 2 || Math.min(...all) <= 0 || Math.max(...all) <= 4 * Math.min(...all)) return "linear";
  /** The share of the axis that the middle of a curve covers. @param {(value: number) => number} scale */
  const covered = (scale) => lines.map((values) => {
    const sorted = values.map(scale).sort((a, b) => a - b);
    const at = (/** @type {number} */ share) => sorted[Math.round(share * (sorted.length - 1))];
    return (at(0.9) - at(0.1)) / (scale(Math.max(...all)) - scale(Math.min(...all)) || 1);
  });
  const [linear, log] = [covered((value) => value), covered(Math.log)];
  if (!linear.some((share, i) => share < FLAT && log[i] > 1.5 * share)) return "linear";
  return lines.length > 1 && Math.min(...log) < FLAT ? "own" : "log";
}

/** The series between the chosen epochs; a neighbour outside keeps the curve running to the edge. @param {Series} one
 *  @returns {Series} */
function within(one) {
  const keep = one.x.flatMap((x, i) => (x >= drawn.from && x <= drawn.to ? [i] : []));
  const pick = (/** @type {number[]} */ values) => keep.map((i) => values[i]);
  return { ...one, x: pick(one.x), mean: pick(one.mean), low: pick(one.low), high: pick(one.high) };
}

/** Room around the values: never so narrow that noise looks like a trend, never outside what the quantity can be.
 *  @param {string} key @param {number} low @param {number} high @returns {[number, number]} */
function rangeOf(key, low, high) {
  const least = { rho: 0.2, knn: 5 }[key] ?? 0.05 * Math.max(Math.abs(low), Math.abs(high));
  const room = Math.max((high - low) * 0.06, (least - (high - low)) / 2, high === low ? 0.5 * Math.abs(high) || 1 : 0);
  const [bottom, top] = { rho: [-1, 1], knn: [0, 100] }[key] ?? [low >= 0 ? 0 : -Infinity, Infinity];
  return [Math.max(bottom, low - room), Math.min(top, high + room)];
}

/** @param {Chart} chart @param {typeof SMALL} size @returns {HTMLElement} */
function lineChart({ key, title, unit, series: whole }, size) {
  const series = whole.map(within).filter(({ x }) => x.length);
  if (!series.length) return element("figure", { class: "card chart" }, element("figcaption", {}, title), element("p", { class: "note" }, "Nothing was measured in these epochs."));
  const lines = series.map((one) => smoothed(one, drawn.smooth));
  const all = (/** @type {keyof Series} */ name) => series.flatMap((one) => /** @type {number[]} */ (one[name])).filter(Number.isFinite);
  const fit = fitting(series.map((one) => one.mean));
  const own = drawn.axis === "fitting" && fit === "own" && key === "loss"; // only of losses the heights mean nothing
  const log = !own && Math.min(...all("mean")) > 0 && (drawn.axis === "log" || (drawn.axis === "fitting" && fit !== "linear"));
  const xs = /** @type {[number, number]} */ ([Math.min(...all("x")), Math.max(...all("x"))]);
  if (xs[0] === xs[1]) [xs[0], xs[1]] = [xs[0] - 1, xs[1] + 1];
  const positive = Math.min(...all("mean"));
  const [low, high] = log ? [Math.max(Math.min(...all("low")), positive / 2), Math.max(...all("high"))] : [Math.min(...all("low")), Math.max(...all("high"))];
  const ys = log ? /** @type {[number, number]} */ ([low / 1.1, high * 1.1]) : rangeOf(key, low, high);
  const { drawing, x, y: height } = frame(xs, own ? [0, 1] : ys, size, { x: "epoch", y: log ? `${unit}, log axis` : own ? `${unit}, each on its own axis` : unit, whole: true, log, bare: own });
  series.forEach(({ colour, x: at, mean: middle, low: lower, high: upper }, which) => {
    const [bottom, top] = own ? rangeOf(key, Math.min(...lower), Math.max(...upper)) : [0, 1];
    const y = (/** @type {number} */ value) => height((value - bottom) / (top - bottom));
    const path = (/** @type {number[]} */ values) => at.map((value, i) => `${x(value).toFixed(1)},${y(Math.max(values[i], log ? ys[0] : -Infinity)).toFixed(1)}`);
    if (lower.some((value, i) => value !== upper[i])) {
      drawing.append(svg("polygon", { class: "band", fill: colour, points: [...path(lower), ...path(upper).reverse()].join(" ") }));
    }
    if (drawn.smooth > 1) drawing.append(svg("polyline", { class: "curve faint", stroke: colour, points: path(middle).join(" ") }));
    drawing.append(svg("polyline", { class: "curve", stroke: colour, points: path(lines[which]).join(" ") }));
    if (at.length < 4) at.forEach((value, i) => drawing.append(svg("circle", { cx: x(value), cy: y(middle[i]), r: 3, fill: colour })));
  });
  const last = series.map((one, i) => `${one.name} ${short(lines[i][lines[i].length - 1])}`).join(", ");
  drawing.setAttribute("aria-label", `${title}; at the end: ${last}`);
  const readout = element("span", { class: "readout" });
  const show = (/** @type {string} */ where, /** @type {(one: Series) => number} */ of) => {
    readout.replaceChildren(where, ...series.map((one, i) => element("b", { "data-colour": one.colour, title: one.name }, `${size === SMALL || series.length < 2 ? "" : `${one.name} `}${short(lines[i][of(one)])}`)));
    tint(readout);
  };
  const rest = () => {
    cursor.setAttribute("visibility", "hidden");
    show("", (one) => one.x.length - 1);
  };
  const [cursor, band] = [svg("line", { class: "cursor", y1: 10, y2: size.height - size.bottom, visibility: "hidden" }), svg("rect", { class: "chosen-epochs", y: 10, height: size.height - size.bottom - 10, width: 0 })];
  drawing.append(band, cursor);
  const place = (/** @type {PointerEvent} */ event) => {
    const box = drawing.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * size.width;
  };
  const epochAt = (/** @type {number} */ at) => xs[0] + ((at - x(xs[0])) / (x(xs[1]) - x(xs[0]))) * (xs[1] - xs[0]);
  let start = NaN;
  drawing.addEventListener("pointerdown", (event) => (start = place(/** @type {PointerEvent} */ (event))));
  drawing.addEventListener("pointermove", (event) => {
    const at = place(/** @type {PointerEvent} */ (event));
    if (Math.abs(at - start) > 4) Object.entries({ x: Math.min(at, start), width: Math.abs(at - start) }).forEach(([name, value]) => band.setAttribute(name, String(value)));
    const nearest = (/** @type {Series} */ one) => one.x.reduce((best, value, i) => (Math.abs(x(value) - at) < Math.abs(x(one.x[best]) - at) ? i : best), 0);
    const where = series[0].x[nearest(series[0])];
    cursor.setAttribute("x1", String(x(where)));
    cursor.setAttribute("x2", String(x(where)));
    cursor.setAttribute("visibility", "visible");
    show(`epoch ${short(where)} `, nearest);
  });
  drawing.addEventListener("pointerup", (event) => {
    const at = place(/** @type {PointerEvent} */ (event));
    if (Math.abs(at - start) > 8) zoomEpochs(epochAt(Math.min(at, start)), epochAt(Math.max(at, start)));
    else if (Number.isFinite(start)) enlarge(key);
    start = NaN;
  });
  drawing.addEventListener("pointerleave", () => {
    start = NaN;
    band.setAttribute("width", "0");
    rest();
  });
  rest();
  const name = element("span", {}, term(key, title));
  const larger = element("button", { type: "button", class: "quiet larger", "aria-label": `Enlarge ${title}`, onclick: () => enlarge(key) }, "⤢");
  return element("figure", { class: "card chart", "data-key": key }, element("figcaption", {}, name, ...(size === SMALL ? [larger] : []), readout), drawing);
}

/** Shows these epochs in every chart: at least one step of the axis. @param {number} from @param {number} to */
function zoomEpochs(from, to) {
  [drawn.from, drawn.to] = [Math.floor(from), Math.max(Math.ceil(to), Math.floor(from) + 1)];
  drawCurves();
}

/** @param {string} key */
function enlarge(key) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("enlarged"));
  if (dialog.open) return;
  drawn.enlarged = key;
  drawEnlarged(); // not the small ones: the button that was pressed stays, and has the focus again afterwards
  dialog.showModal();
}

function wireCurves() {
  const axis = /** @type {HTMLSelectElement} */ (byId("axis"));
  const smooth = /** @type {HTMLSelectElement} */ (byId("smooth"));
  axis.addEventListener("change", () => {
    drawn.axis = axis.value;
    drawCurves();
  });
  smooth.addEventListener("change", () => {
    drawn.smooth = Number(smooth.value);
    drawCurves();
  });
  const [from, to] = ["from-epoch", "to-epoch"].map((id) => /** @type {HTMLInputElement} */ (byId(id)));
  for (const field of [from, to]) field.addEventListener("change", () => zoomEpochs(Number(from.value), Number(to.value)));
  byId("all-epochs").addEventListener("click", () => {
    [drawn.from, drawn.to] = [-Infinity, Infinity];
    drawCurves();
  });
  const dialog = /** @type {HTMLDialogElement} */ (byId("enlarged"));
  byId("enlarged-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => (drawn.enlarged = ""));
}
