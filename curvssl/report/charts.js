"use strict";
// Parts of charts: axes and ticks, histograms, the axes of a scatter plot, the star of edges; in the page's colours.

/** About `count` round numbers between low and high, with their text. @param {number} low @param {number} high
 *  @param {number} count @param {boolean} [whole] whether they must be integers @returns {[number, string][]} */
function ticks(low, high, count, whole) {
  const raw = Math.max((high - low) / count || 1, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = power * ([1, 2, 5].find((factor) => raw <= factor * power) ?? 10);
  const digits = Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  /** @type {[number, string][]} */
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-6; at++) {
    const value = at * size || 0; // never −0
    const text = digits > 4 ? short(value) : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    found.push([at * size, text.replace("-", "−")]);
  }
  return found;
}

/** Powers of ten and, where these are few, their multiples by 2 and 5. @param {number} low @param {number} high
 *  @returns {[number, string][]} */
function logTicks(low, high) {
  const factors = high / low > 1000 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5];
  /** @type {[number, string][]} */
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) found.push([factor * 10 ** power, short(Number((factor * 10 ** power).toPrecision(6)))]);
  }
  const inside = found.filter(([value]) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 4).filter(([value]) => value > 0);
}

/** Axes with their titles, grid and the functions from values to coordinates. @param {[number, number]} xs
 *  @param {[number, number]} ys @param {{width: number, height: number, left: number, bottom: number}} size
 *  @param {{x: string, y: string, whole?: boolean, log?: boolean, bare?: boolean}} axes bare: no numbers upwards */
function frame(xs, ys, { width, height, left: least, bottom }, axes) {
  const [right, top] = [12, 10];
  const marks = axes.bare ? [] : axes.log ? logTicks(ys[0], ys[1]) : ticks(ys[0], ys[1], 5);
  const left = Math.max(least, 26 + 6.5 * Math.max(...marks.map(([, text]) => text.length))); // the axis title is left of them
  const scale = axes.log ? Math.log : (/** @type {number} */ value) => value;
  const [floor, ceiling] = ys.map(scale);
  const x = (/** @type {number} */ value) => left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - left - right);
  const y = (/** @type {number} */ value) => height - bottom - ((scale(value) - floor) / (ceiling - floor || 1)) * (height - top - bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const [value, text] of marks) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, text));
  }
  for (const [value, text] of ticks(xs[0], xs[1], 5, axes.whole)) {
    drawing.append(svg("text", { x: x(value), y: height - bottom + 14, "text-anchor": "middle" }, text));
  }
  drawing.append(svg("text", { class: "axis", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, axes.x));
  const middle = (top + height - bottom) / 2;
  drawing.append(svg("text", { class: "axis", x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, axes.y));
  return { drawing, x, y };
}

/** Sets colours through the CSSOM, because the page's security policy forbids style attributes. @param {HTMLElement} host */
function tint(host) {
  for (const each of /** @type {NodeListOf<HTMLElement>} */ (host.querySelectorAll("[data-colour]"))) {
    each.style.setProperty("--tint", each.dataset.colour ?? "");
  }
}

/** Two histograms over the same bins. @param {Float32Array[]} values @param {string[]} names @param {string[]} colours
 *  @param {string} kind of curvature */
function histogram(values, names, colours, kind) {
  const [low, high] = quantiles(values, 0, 1);
  const bins = Math.max(12, Math.min(48, Math.round(Math.sqrt(values[0].length))));
  const width = (high - low || 1) / bins;
  const counts = values.map((part) => {
    const count = new Float32Array(bins);
    for (const value of part) count[Math.min(bins - 1, Math.floor((value - low) / width))]++;
    return count;
  });
  const top = Math.max(...counts.flatMap((count) => Array.from(count)));
  const { drawing, x, y } = frame([low, high], [0, top * 1.04], { width: innerWidth < 720 ? 340 : 600, height: innerWidth < 720 || state.shown.length > 1 ? 230 : 400, left: 58, bottom: 36 }, { x: `curvature, ${kind}`, y: "images" });
  counts.forEach((count, which) => {
    let path = `M${x(low)},${y(0)}`;
    count.forEach((value, i) => (path += `V${y(value).toFixed(1)}H${x(low + (i + 1) * width).toFixed(1)}`));
    drawing.append(svg("path", { class: "steps", d: `${path}V${y(0)}Z`, fill: colours[which], stroke: colours[which] }));
  });
  drawing.setAttribute("aria-label", `Histogram of curvature, ${names.join(" and ")}, from ${short(low)} to ${short(high)}`);
  return drawing;
}

/** The axes of the curvature scatter plot, redrawn when it moves. @param {number} low @param {number} extent */
function scatterAxes(low, extent) {
  return (/** @type {Cloud} */ view, /** @type {CanvasRenderingContext2D} */ context) => {
    const style = getComputedStyle(view.over);
    const unit = (/** @type {number} */ value) => (value - low) / extent;
    const value = (/** @type {number} */ at) => low + at * extent;
    const across = [value(-view.x / view.scale), value((view.width - view.x) / view.scale)];
    const upward = [value(1 - (view.height - view.y) / view.scale), value(1 + view.y / view.scale)];
    context.fillStyle = style.getPropertyValue("--muted");
    context.font = "11px system-ui, sans-serif";
    for (const [at, text] of ticks(across[0], across[1], 6)) context.fillText(text, view.x + view.scale * unit(at) - 6, view.height - 8);
    for (const [at, text] of ticks(upward[0], upward[1], 6)) context.fillText(text, 6, view.y + view.scale * (1 - unit(at)) + 4);
    context.textAlign = "center";
    context.fillText("curvature, first view", view.width / 2, view.height - 24);
    context.save();
    context.translate(46, view.height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("curvature, second view", 0, 0);
    context.restore();
    context.textAlign = "start";
    context.setLineDash([3, 4]);
    const corner = (/** @type {number} */ at) => [view.x + view.scale * at, view.y + view.scale * (1 - at)];
    line(context, [corner(-9), corner(10)], style.getPropertyValue("--muted"), 1); // equal in both views
    context.setLineDash([]);
  };
}

/** A point's edges to its neighbours, projected to the plane that keeps most of their squared length: √λ v of the two
 *  largest eigenpairs of the edges' Gram matrix. @param {Mapped} run @param {number} row */
function edgePlane(run, row) {
  const { k } = run;
  const length = run.distances.subarray(row * k, (row + 1) * k);
  const cosine = cosinesOf(run, row);
  const gram = Array.from({ length: k }, (_, a) => Array.from({ length: k }, (_, b) => length[a] * length[b] * cosine[a][b]));
  const total = gram.reduce((sum, line, a) => sum + line[a], 0) || 1;
  /** @type {number[][]} */
  const axes = [];
  for (let axis = 0; axis < 2; axis++) {
    let vector = gram.map((_, a) => 1 + a * 0.37 + axis); // any start that is not an eigenvector
    let value = 0;
    for (let turn = 0; turn < 200; turn++) {
      const next = gram.map((line) => line.reduce((sum, entry, b) => sum + entry * vector[b], 0));
      value = Math.hypot(...next);
      if (!value) break;
      vector = next.map((entry) => entry / value);
    }
    axes.push(vector.map((entry) => entry * Math.sqrt(value)));
    gram.forEach((line, a) => line.forEach((_, b) => (line[b] -= value * vector[a] * vector[b])));
  }
  const held = axes.flat().reduce((sum, entry) => sum + entry ** 2, 0) / total;
  return { tips: Array.from({ length: k }, (_, a) => [axes[0][a], axes[1][a]]), held, cosine };
}

/** The k × k cosines between a point's edges, from the stored upper triangle. @param {Mapped} run @param {number} row */
function cosinesOf(run, row) {
  const { k } = run;
  const table = Array.from({ length: k }, (_, a) => Array.from({ length: k }, (_, b) => Number(a === b)));
  let at = (row * k * (k - 1)) / 2;
  for (let a = 0; a < k; a++) for (let b = a + 1; b < k; b++) table[a][b] = table[b][a] = run.cosines[at++];
  return table;
}

/** @param {HTMLCanvasElement} canvas @param {Mapped} run @param {number} row @param {number[][]} tips */
function drawStar(canvas, run, row, tips) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(canvas);
  const [size, thumb] = [canvas.width, canvas.width * 0.12];
  const [xs, ys] = [0, 1].map((axis) => [0, ...tips.map((tip) => tip[axis])]);
  const span = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys)) || 1;
  const middle = (/** @type {number[]} */ values) => (Math.max(...values) + Math.min(...values)) / 2;
  const scale = (size - 1.5 * thumb) / span;
  const at = ([x, y] = /** @type {number[]} */ ([0, 0])) => [size / 2 + scale * (x - middle(xs)), size / 2 - scale * (y - middle(ys))];
  context.clearRect(0, 0, size, size);
  for (const tip of tips) line(context, [at(), at(tip)], style.getPropertyValue("--muted"), 2);
  context.imageSmoothingEnabled = run.split.side > thumb || !run.split.exact;
  const near = neighborsOf(run, row);
  const framed = (/** @type {number} */ which, /** @type {number[]} */ [x, y], /** @type {number} */ side, /** @type {string} */ colour) => {
    context.fillStyle = colour;
    context.fillRect(x - side / 2 - 3, y - side / 2 - 3, side + 6, side + 6);
    run.split.paint(context, which, x - side / 2, y - side / 2, side);
  };
  tips.forEach((tip, a) => framed(near[a], at(tip), thumb, run.split.label ? classColour(run.split.label[near[a]]) : style.getPropertyValue("--muted")));
  framed(row, at(), thumb * 1.25, style.getPropertyValue("--accent"));
}
