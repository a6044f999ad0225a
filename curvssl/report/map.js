"use strict";
// A cloud of points on a canvas with pan, zoom, hover and lasso: for the maps and the curvature scatter plot.

/** @typedef {{hover: number, pinned: number, selected: Set<number>, what: string, hidden: Set<number>}} Choice */
/** @typedef {{label: string, edges: boolean, xy: Float32Array, axes?: (view: Cloud, context: CanvasRenderingContext2D) => void}} CloudOptions */
/** @typedef {{choice: (run: Mapped) => Choice, tool: () => string, hovered: (run: Mapped, row: number, at?: PointerEvent) => void,
 *   pinned: (run: Mapped, row: number, at?: PointerEvent) => void, selected: (run: Mapped, rows: number[], what: string, add?: boolean) => void,
 *   released: () => void, wantTool: (tool: string) => void}} Listeners */

const SUBPIXELS = 4; // discs are rendered for 4 × 4 offsets inside a pixel, so that points move smoothly
const IMAGES = 160; // with at most this many points in view the images themselves are drawn
const GRID = 128; // cells per side of the grid index that finds the point under the cursor

/** @typedef {{dx: Int8Array, dy: Int8Array, jump: Int32Array, cover: Uint16Array}} Disc */

/** A disc as its pixels with their coverage, 0…256, for every subpixel offset. @param {number} radius in device pixels
 *  @param {number} width of the canvas, for the jumps between its rows @returns {Disc[]} */
function discs(radius, width) {
  const reach = Math.ceil(radius + 0.5);
  return Array.from({ length: SUBPIXELS * SUBPIXELS }, (_, offset) => {
    const [x, y] = [(offset % SUBPIXELS + 0.5) / SUBPIXELS, (Math.floor(offset / SUBPIXELS) + 0.5) / SUBPIXELS];
    const found = [];
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const cover = Math.round(256 * Math.min(1, radius + 0.5 - Math.hypot(dx + 0.5 - x, dy + 0.5 - y)));
        if (cover > 0) found.push([dx, dy, cover]);
      }
    }
    return {
      dx: Int8Array.from(found, (one) => one[0]),
      dy: Int8Array.from(found, (one) => one[1]),
      jump: Int32Array.from(found, (one) => one[1] * width + one[0]),
      cover: Uint16Array.from(found, (one) => one[2]),
    };
  });
}

class Cloud {
  /** @param {HTMLElement} host @param {Mapped} run @param {CloudOptions} options @param {Listeners} listeners */
  constructor(host, run, options, listeners) {
    this.run = run;
    this.options = options;
    this.listeners = listeners;
    this.colours = /** @type {Uint32Array} */ (new Uint32Array(run.split.count));
    this.points = /** @type {HTMLCanvasElement} */ (element("canvas", { class: "points", "aria-hidden": "true" }));
    this.over = /** @type {HTMLCanvasElement} */ (element("canvas", {
      class: "over", tabindex: 0, role: "application", "aria-label": options.label,
    }));
    host.append(this.points, this.over);
    this.context = /** @type {CanvasRenderingContext2D} */ (this.points.getContext("2d", { alpha: false }));
    this.overContext = /** @type {CanvasRenderingContext2D} */ (this.over.getContext("2d"));
    this.scale = 1; // CSS pixels per unit
    this.x = 0; // position of the unit square's corner, in CSS pixels
    this.y = 0;
    this.width = this.height = this.ratio = 0;
    this.home = 1; // the scale at which the whole cloud is in view
    this.moved = false;
    this.pictured = false; // whether images are drawn instead of dots
    /** @type {number[][]} */
    this.loop = [];
    this.redraw = 0;
    this.buildGrid();
    listen(this);
    new ResizeObserver(() => this.resize()).observe(host);
    this.resize();
  }

  /** The points sorted by grid cell: `order` lists them, `starts` has the first position of each cell. */
  buildGrid() {
    const { xy } = this.options;
    const n = this.run.split.count;
    const starts = new Uint32Array(GRID * GRID + 1);
    const cells = new Uint16Array(n);
    for (let row = 0; row < n; row++) {
      cells[row] = cell(xy[2 * row + 1]) * GRID + cell(xy[2 * row]);
      starts[cells[row] + 1]++;
    }
    for (let i = 0; i < GRID * GRID; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    this.order = new Uint32Array(n);
    for (let row = 0; row < n; row++) this.order[next[cells[row]]++] = row;
    this.starts = starts;
    let [left, right, bottom, top] = [1, 0, 1, 0];
    for (let row = 0; row < n; row++) {
      left = Math.min(left, xy[2 * row]);
      right = Math.max(right, xy[2 * row]);
      bottom = Math.min(bottom, xy[2 * row + 1]);
      top = Math.max(top, xy[2 * row + 1]);
    }
    this.bounds = { left, right, bottom, top };
  }

  resize() {
    const box = this.over.getBoundingClientRect();
    if (!box.width || !box.height) return;
    const [dx, dy] = [(box.width - this.width) / 2, (box.height - this.height) / 2];
    [this.width, this.height, this.ratio] = [box.width, box.height, matchMedia("print").matches ? 3 : Math.min(devicePixelRatio || 1, 2)];
    for (const canvas of [this.points, this.over]) {
      canvas.width = Math.round(box.width * this.ratio);
      canvas.height = Math.round(box.height * this.ratio);
    }
    this.image = this.context.createImageData(this.points.width, this.points.height);
    if (this.moved) this.pan(dx, dy); // keeps the centre of the view
    else this.reset();
    this.draw(); // now, because printing does not wait for the next frame
  }

  /** Shows the whole cloud. */
  reset() {
    const { left, right, bottom, top } = this.bounds ?? { left: 0, right: 1, bottom: 0, top: 1 };
    const margin = this.options.axes ? 60 : 18;
    this.scale = this.home = Math.min((this.width - 2 * margin) / (right - left || 1), (this.height - 2 * margin) / (top - bottom || 1));
    this.x = this.width / 2 - (this.scale * (left + right)) / 2;
    this.y = this.height / 2 - this.scale * (1 - (bottom + top) / 2);
    this.moved = false;
    this.change();
  }

  /** @param {number} dx @param {number} dy */
  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.moved = true;
    this.change();
  }

  /** @param {number} factor @param {number} x the place that stays @param {number} y */
  zoom(factor, x, y) {
    const limited = Math.max(this.home / 4, Math.min(this.home * 400, this.scale * factor)) / this.scale;
    this.scale *= limited;
    this.pan((this.x - x) * (limited - 1), (this.y - y) * (limited - 1));
  }

  /** Centres the view on a point, unless the point is already well inside. @param {number} row */
  show(row) {
    const [x, y] = this.screen(row);
    if (x > 15 && y > 15 && x < this.width - 15 && y < this.height - 15) return;
    this.pan(this.width / 2 - x, this.height / 2 - y);
  }

  /** Zooms to these points. @param {number[]} rows */
  fit(rows) {
    const { xy } = this.options;
    const [xs, ys] = [0, 1].map((axis) => quantiles([Float32Array.from(rows, (row) => xy[2 * row + axis])], 0, 1));
    const span = Math.max((xs[1] - xs[0]) / (this.width - 80), (ys[1] - ys[0]) / (this.height - 80)) || 1e-9;
    this.zoom(1 / span / this.scale, this.width / 2, this.height / 2);
    const [x, y] = [this.x + (this.scale * (xs[0] + xs[1])) / 2, this.y + this.scale * (1 - (ys[0] + ys[1]) / 2)];
    this.pan(this.width / 2 - x, this.height / 2 - y);
  }

  /** @param {number} row @returns {[number, number]} CSS pixels inside the canvas */
  screen(row) {
    const { xy } = this.options;
    return [this.x + this.scale * xy[2 * row], this.y + this.scale * (1 - xy[2 * row + 1])];
  }

  /** @param {number} row */
  hidden(row) {
    const { label } = this.run.split;
    return label !== null && this.listeners.choice(this.run).hidden.has(label[row]);
  }

  /** The nearest visible point within so many pixels, or −1. @param {number} x @param {number} y @param {number} [within]
   *  @returns {number} */
  pick(x, y, within = 14) {
    const reach = within / this.scale;
    const u = (x - this.x) / this.scale;
    const v = 1 - (y - this.y) / this.scale;
    const { starts, order } = this;
    if (!starts || !order) return -1;
    let [best, distance] = [-1, within];
    for (let i = cell(v - reach); i <= cell(v + reach); i++) {
      for (let at = starts[i * GRID + cell(u - reach)]; at < starts[i * GRID + cell(u + reach) + 1]; at++) {
        const [px, py] = this.screen(order[at]);
        const d = Math.hypot(px - x, py - y);
        if (d < distance && !this.hidden(order[at])) [best, distance] = [order[at], d];
      }
    }
    return best;
  }

  /** Rows inside a polygon, by crossing number. @param {number[][]} polygon @returns {number[]} */
  inside(polygon) {
    const found = [];
    for (let row = 0; row < this.run.split.count; row++) {
      if (this.hidden(row)) continue;
      const [x, y] = this.screen(row);
      let odd = false;
      for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
        const [[xi, yi], [xj, yj]] = [polygon[i], polygon[j]];
        if (yi > y !== yj > y && x < xi + ((y - yi) / (yj - yi)) * (xj - xi)) odd = !odd;
      }
      if (odd) found.push(row);
    }
    return found;
  }

  /** Requests a redraw at the next frame; several requests give one redraw. */
  change() {
    this.redraw ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.redraw = 0;
    if (!this.image) return;
    const style = getComputedStyle(this.over);
    const data = new Uint32Array(this.image.data.buffer);
    data.fill(pixel(style.getPropertyValue("--surface")));
    const choice = this.listeners.choice(this.run);
    const seen = this.splat(data, choice);
    this.context.putImageData(this.image, 0, 0);
    this.pictured = seen.length <= IMAGES && this.scale > 1.5 * this.home && this.run.split.ready;
    if (this.pictured) this.drawImages(seen, choice);
    if (this.options.axes) {
      this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      this.options.axes(this, this.context);
      this.context.setTransform(1, 0, 0, 1, 0, 0);
    }
    this.drawOver();
  }

  /** Blends every visible point into the pixels: one loop over plain arrays is several times faster than canvas calls.
   *  @param {Uint32Array} data @param {Choice} choice @returns {number[]} the first rows in view */
  splat(data, choice) {
    const { xy } = this.options;
    const { ratio, colours } = this;
    const n = this.run.split.count;
    const [width, height] = [this.points.width, this.points.height];
    const base = n > 20000 ? 1.2 : n > 4000 ? 1.8 : 3;
    const radius = ratio * Math.min(7, base * Math.max(0.6, (this.scale / this.home) ** 0.4));
    const shapes = discs(radius, width);
    const reach = Math.ceil(radius + 0.5);
    const label = choice.hidden.size ? this.run.split.label : null;
    /** @type {number[]} */
    const seen = [];
    const passes = choice.selected.size ? [false, true] : [true]; // selected points are on top
    for (const bright of passes) {
      const strength = bright ? 256 : 44;
      for (let row = 0; row < n; row++) {
        if (passes.length > 1 && choice.selected.has(row) !== bright) continue;
        if (label && choice.hidden.has(label[row])) continue;
        const px = (this.x + this.scale * xy[2 * row]) * ratio;
        const py = (this.y + this.scale * (1 - xy[2 * row + 1])) * ratio;
        const ix = Math.floor(px);
        const iy = Math.floor(py);
        if (ix < -reach || iy < -reach || ix >= width + reach || iy >= height + reach) continue;
        if (seen.length <= IMAGES) seen.push(row);
        const shape = shapes[Math.floor((py - iy) * SUBPIXELS) * SUBPIXELS + Math.floor((px - ix) * SUBPIXELS)];
        const { jump, cover } = shape;
        const colour = colours[row];
        const middle = iy * width + ix;
        const whole = ix >= reach && iy >= reach && ix < width - reach && iy < height - reach;
        for (let i = 0; i < jump.length; i++) {
          if (!whole) {
            const [x, y] = [ix + shape.dx[i], iy + shape.dy[i]];
            if (x < 0 || y < 0 || x >= width || y >= height) continue;
          }
          const share = (cover[i] * strength) >> 8;
          data[middle + jump[i]] = share === 256 ? colour : mix(data[middle + jump[i]], colour, share);
        }
      }
    }
    return seen;
  }

  /** @param {number[]} rows @param {Choice} choice */
  drawImages(rows, choice) {
    const { context, ratio } = this;
    const size = Math.round(30 * ratio);
    context.imageSmoothingEnabled = this.run.split.side > size || !this.run.split.exact;
    for (const row of rows) {
      const [x, y] = this.screen(row).map((value) => Math.round(value * ratio - size / 2));
      context.globalAlpha = choice.selected.size && !choice.selected.has(row) ? 0.25 : 1;
      context.fillStyle = "#" + (this.colours[row] & 0xffffff).toString(16).padStart(6, "0").replace(/(..)(..)(..)/, "$3$2$1");
      context.fillRect(x - 2 * ratio, y - 2 * ratio, size + 4 * ratio, size + 4 * ratio);
      this.run.split.paint(context, row, x, y, size);
    }
    context.globalAlpha = 1;
  }

  /** Draws what depends on the cursor: edges to the neighbours, rings, the lasso. */
  drawOver() {
    const context = this.overContext;
    const choice = this.listeners.choice(this.run);
    const style = getComputedStyle(this.over);
    this.over.width = Math.round(this.width * this.ratio); // clears it; after clearRect it would be printed as a white area
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    const active = choice.hover >= 0 ? choice.hover : choice.pinned;
    if (active >= 0) {
      const from = this.screen(active);
      const near = Array.from(neighborsOf(this.run, active), (row) => this.screen(row));
      if (this.options.edges) {
        for (const [x, y] of near) line(context, [from, [x, y]], style.getPropertyValue("--ink"), 1.2);
      }
      for (const at of near) ring(context, at, this.pictured ? 24 : 6, style.getPropertyValue("--ink"), style.getPropertyValue("--surface"));
      ring(context, from, this.pictured ? 26 : 10, style.getPropertyValue("--accent"), style.getPropertyValue("--surface"));
    }
    if (this.loop.length > 1) {
      context.setLineDash([5, 4]);
      line(context, [...this.loop, this.loop[0]], style.getPropertyValue("--accent"), 2);
      context.setLineDash([]);
    }
  }
}

/** Blends one pixel over another with weight `share` / 256; red and blue in one multiplication. @param {number} under
 *  @param {number} over @param {number} share */
function mix(under, over, share) {
  const low = under & 0xff00ff;
  const high = under & 0xff00;
  const redBlue = (low + (Math.imul((over & 0xff00ff) - low, share) >>> 8)) & 0xff00ff;
  const green = (high + (Math.imul((over & 0xff00) - high, share) >> 8)) & 0xff00;
  return 0xff000000 | redBlue | green;
}

/** @param {Mapped} run @param {number} row @returns {Integers} */
function neighborsOf(run, row) {
  return run.neighbors.subarray(row * run.k, (row + 1) * run.k);
}

/** @param {number} unit */
function cell(unit) {
  return Math.max(0, Math.min(GRID - 1, Math.floor(unit * GRID)));
}

/** @param {CanvasRenderingContext2D} context @param {number[][]} path @param {string} colour @param {number} width */
function line(context, path, colour, width) {
  context.beginPath();
  for (const [x, y] of path) context.lineTo(x, y);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}

/** @param {CanvasRenderingContext2D} context @param {number[]} at @param {number} radius @param {string} colour
 *  @param {string} halo */
function ring(context, [x, y], radius, colour, halo) {
  for (const [stroke, width] of /** @type {[string, number][]} */ ([[halo, 5], [colour, 2.5]])) {
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.stroke();
  }
}
