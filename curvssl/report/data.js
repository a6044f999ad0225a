"use strict";
// The page's data: decodes arrays from base64 and thumbnails from sprite sheets, and turns values into colours.

/** @typedef {{type: "u8" | "u16" | "u32", data: string, low?: number, high?: number}} Packed */
/** @typedef {{name: string, classes: string[], count: number, total: number, files: string[], side: number,
 *   exact: boolean, columns: number, perSheet: number, sheets: string[], index: Packed | null, label: Packed | null}} RawSplit */
/** @typedef {{kind: string, xy: Packed, predicted: Packed | null, confidence: Packed | null, curvature: Packed[], outlier: Packed,
 *   neighbors: Packed, distances: Packed, cosines: Packed}} RawPoints */
/** @typedef {{accuracy?: number[], mean?: number, std?: number}} Score */
/** @typedef {{groups: string[], columns: {name: string, size: string, images: string[]}[]}} Seen */
/** @typedef {{duplicates: {row: number}[][], outliers: {row: number, score: number}[], fence?: number, beyond?: number,
 *   typical: {row: number, stands_for: number}[], unreadable: {name: string, error?: string}[]}} Findings */
/** @typedef {Record<string, any>} Tree */
/** @typedef {{name: string, group: number, split: number, config: Tree, provenance: Tree, probes: Tree,
 *   metrics: Record<string, (number | null)[]>, warning: string, points: RawPoints | null, findings: Findings | null,
 *   quality: {measures: Record<string, number | null>, untrained: Record<string, number | null>, verdict: string} | null}} RawRun */
/** @typedef {{title: string, created: string, version: string, splits: RawSplit[], runs: RawRun[],
 *   groups: {name: string, runs: number[]}[], seen: Seen[]}} Payload */

/** @typedef {Uint8Array | Uint16Array | Uint32Array} Integers */
/** @typedef {{name: string, classes: string[], count: number, total: number, side: number, exact: boolean, label: Integers | null,
 *   index: (row: number) => number, path: (row: number) => string, matching: (text: string) => number[], ready: boolean,
 *   paint: (context: CanvasRenderingContext2D, row: number, x: number, y: number, size: number) => void}} Split */
/** @typedef {{id: number, name: string, split: Split, splitId: number, kind: string, xy: Float32Array, predicted: Integers | null,
 *   confidence: Float32Array | null, curvature: Float32Array[], agreement: Float32Array, outlier: Float32Array,
 *   rho: number, neighbors: Integers, k: number, distances: Float32Array, cosines: Float32Array}} Mapped */

/** @param {Packed} packed @returns {Integers} */
function integers(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  if (packed.type === "u8") return bytes;
  return packed.type === "u16" ? new Uint16Array(bytes.buffer) : new Uint32Array(bytes.buffer);
}

/** Numbers that were stored as integers between low and high. @param {Packed} packed @returns {Float32Array} */
function numbers(packed) {
  const low = packed.low ?? 0;
  const step = ((packed.high ?? 1) - low) / (packed.type === "u8" ? 255 : 65535);
  return Float32Array.from(integers(packed), (value) => low + value * step);
}

/** @param {RawSplit} raw @param {() => void} loaded called when the thumbnails can be painted @returns {Split} */
function openSplit(raw, loaded) {
  const own = raw.index ? integers(raw.index) : null;
  const label = raw.label && integers(raw.label);
  const index = (/** @type {number} */ row) => (own ? own[row] : row);
  /** What is searched for each image: its file's name, or else its number and its class. @type {string[]} */
  let texts = [];
  const sheets = raw.sheets.map((address) => Object.assign(new Image(), { src: address }));
  /** @type {Split} */
  const split = {
    name: raw.name,
    classes: raw.classes,
    count: raw.count,
    total: raw.total,
    side: raw.side,
    exact: raw.exact,
    label,
    index,
    path: (row) => raw.files[row] ?? `image ${index(row)}`,
    matching(text) {
      const phrase = folded(text).trim();
      const words = phrase.split(/\s+/).filter(Boolean);
      if (!raw.files.length && words.length && words.every((word) => /^\d+$/.test(word))) {
        return Array.from({ length: raw.count }, (_, row) => row).filter((row) => words.includes(String(index(row))));
      }
      if (!texts.length) texts = raw.files.length ? raw.files.map(folded) : Array.from(label ?? [], (id) => folded(raw.classes[id]));
      const holding = (/** @type {string[]} */ parts) => texts.flatMap((name, row) => (parts.every((part) => name.includes(part)) ? [row] : []));
      const whole = words.length ? holding([phrase]) : [];
      return whole.length || words.length < 2 ? whole : holding(words); // words anywhere, unless they stand together somewhere
    },
    ready: false,
    paint(context, row, x, y, size) {
      const place = row % raw.perSheet;
      const left = (place % raw.columns) * raw.side;
      const top = Math.floor(place / raw.columns) * raw.side;
      const sheet = sheets[Math.floor(row / raw.perSheet)];
      context.drawImage(sheet, left, top, raw.side, raw.side, x, y, size, size);
    },
  };
  Promise.all(sheets.map((sheet) => sheet.decode())).then(() => {
    split.ready = true;
    loaded();
  });
  return split;
}

/** Without case; a letter with an accent is one character, however the file system writes it. @param {string} text */
function folded(text) {
  return text.normalize("NFC").toLowerCase();
}

/** The last part of a path, which names the file. @param {string} path */
function fileName(path) {
  return path.slice(path.lastIndexOf("/") + 1);
}

/** Whether the probe was asked about an image. @param {Mapped} run @param {number} row */
function isJudged(run, row) {
  return run.predicted !== null && run.predicted[row] < run.split.classes.length;
}

/** @param {RawRun} raw @param {RawPoints} points @param {number} id @param {Split} split @returns {Mapped} */
function openRun(raw, points, id, split) {
  const curvature = points.curvature.map(numbers);
  const [a, b] = curvature.map(standardised);
  const neighbors = integers(points.neighbors);
  // ρ = 1 − ½ mean (ã − b̃)², so these values are each image's contribution to the correlation.
  const agreement = a.map((value, row) => 1 - (value - b[row]) ** 2 / 2);
  return {
    id,
    name: raw.name,
    split,
    splitId: raw.split,
    kind: points.kind,
    xy: numbers(points.xy),
    predicted: points.predicted && integers(points.predicted),
    confidence: points.confidence && numbers(points.confidence),
    curvature,
    agreement,
    outlier: numbers(points.outlier),
    rho: mean(agreement),
    neighbors,
    k: neighbors.length / split.count,
    distances: numbers(points.distances),
    cosines: numbers(points.cosines),
  };
}

/** @param {ArrayLike<number>} values */
function mean(values) {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i];
  return sum / values.length;
}

/** Mean 0 and population deviation 1. @param {Float32Array} values @returns {Float32Array} */
function standardised(values) {
  const middle = mean(values);
  const deviation = Math.sqrt(mean(values.map((value) => (value - middle) ** 2))) || 1;
  return values.map((value) => (value - middle) / deviation);
}

/** The quantiles `low` and `high` (0…1) of all values. @param {ArrayLike<number>[]} parts
 *  @param {number} low @param {number} high @returns {[number, number]} */
function quantiles(parts, low, high) {
  const sorted = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let start = 0;
  for (const part of parts) {
    sorted.set(part, start);
    start += part.length;
  }
  sorted.sort();
  const at = (/** @type {number} */ share) => sorted[Math.round(share * (sorted.length - 1))];
  return [at(low), at(high)];
}

/** The rows with the largest values, largest first. @param {ArrayLike<number>} values @param {number} count
 *  @param {(row: number) => boolean} [wanted] @returns {number[]} */
function largest(values, count, wanted) {
  let rows = Array.from(values, (_, row) => row);
  if (wanted) rows = rows.filter(wanted);
  return rows.sort((a, b) => values[b] - values[a]).slice(0, count);
}

// ---- colours: ten for classes that colour-blind readers can distinguish, and viridis for values

const CLASS_COLOURS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581",
  "#92dadd"];
const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

/** @param {number} id @returns {string} */
function classColour(id) {
  if (id < CLASS_COLOURS.length) return CLASS_COLOURS[id];
  return hslHex((id * 137.508) % 360, 55, [48, 66, 34][id % 3]); // multiples of the golden angle give distinct hues
}

/** @param {number} hue @param {number} saturation @param {number} lightness @returns {string} */
function hslHex(hue, saturation, lightness) {
  const reach = (saturation / 100) * Math.min(lightness / 100, 1 - lightness / 100);
  return "#" + [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    const value = lightness / 100 - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(255 * value).toString(16).padStart(2, "0");
  }).join("");
}

/** A hex colour as one little-endian RGBA pixel. @param {string} hex @returns {number} */
function pixel(hex) {
  const value = parseInt(hex.trim().slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** 256 pixels from dark to bright. */
const VIRIDIS_PIXELS = Uint32Array.from({ length: 256 }, (_, i) => {
  const place = (i / 255) * (VIRIDIS.length - 1);
  const from = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const [a, b] = [pixel(VIRIDIS[from]), pixel(VIRIDIS[from + 1])];
  let mixed = 0xff000000;
  for (const shift of [0, 8, 16]) {
    const [x, y] = [(a >> shift) & 255, (b >> shift) & 255];
    mixed |= Math.round(x + (y - x) * (place - from)) << shift;
  }
  return mixed >>> 0;
});

/** @type {Record<string, {label: string, term: string, ids?: (run: Mapped) => Integers | null, values?: (run: Mapped) => Float32Array}>} */
const COLOURINGS = {
  class: { label: "class", term: "", ids: (run) => run.split.label },
  predicted: { label: "predicted class", term: "read_as", ids: (run) => run.predicted },
  curvature0: { label: "curvature, first view", term: "curvature", values: (run) => run.curvature[0] },
  curvature1: { label: "curvature, second view", term: "curvature", values: (run) => run.curvature[1] },
  agreement: { label: "agreement of the views", term: "agreement", values: (run) => run.agreement },
  outlier: { label: "outlier score", term: "outlier", values: (run) => run.outlier },
};

/** The colour of each point as one pixel. @param {Mapped} run @param {string} colouring @param {[number, number]} range
 *  @returns {Uint32Array} */
function pointPixels(run, colouring, range) {
  const { ids, values } = COLOURINGS[colouring];
  if (ids) {
    const found = ids(run);
    const palette = [...run.split.classes.map((_, id) => pixel(classColour(id))), pixel("#b8bcc4")]; // the last: unjudged
    return Uint32Array.from({ length: run.split.count }, (_, row) => (found ? palette[found[row]] : pixel("#3f90da")));
  }
  const scale = 255 / (range[1] - range[0] || 1);
  const of = /** @type {(run: Mapped) => Float32Array} */ (values)(run);
  return Uint32Array.from(of, (value) => VIRIDIS_PIXELS[Math.max(0, Math.min(255, Math.round((value - range[0]) * scale)))]);
}

// ---- elements: text is never parsed as HTML

/** @param {string} tag @param {Record<string, any>} attributes `on…` are listeners @param {(Node | string)[]} children
 *  @returns {HTMLElement} */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  apply(made, attributes);
  made.append(...children);
  return made;
}

/** @param {string} tag @param {Record<string, any>} attributes @param {(Node | string)[]} children @returns {SVGElement} */
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  apply(made, attributes);
  made.append(...children);
  return made;
}

/** @param {Element} made @param {Record<string, any>} attributes */
function apply(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, String(value));
  }
}

/** @template {HTMLElement} T @param {string} id @returns {T} */
function byId(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/** @param {unknown} value @returns {string} */
function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) ? size < 1e6 : size >= 1000 && size < 1e5) return Math.round(value).toLocaleString("en").replace("-", "−");
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  return fixed(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/** With a minus sign, which a hyphen is not. @param {number} value @param {number} digits @returns {string} */
function fixed(value, digits) {
  return value.toFixed(digits).replace("-", "−");
}

/** @param {number} seconds @returns {string} */
function duration(seconds) {
  if (seconds < 90) return `${short(Math.round(seconds * 10) / 10)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
