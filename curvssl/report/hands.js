"use strict";
// Pointer, wheel and keyboard input on a map.

/** @param {Cloud} view */
function listen(view) {
  const { over, listeners } = view;
  /** @type {Map<number, [number, number]>} */
  const held = new Map();
  let travelled = 0;
  /** @param {PointerEvent | WheelEvent} event @returns {[number, number]} */
  const place = (event) => {
    const box = over.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  over.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held.set(event.pointerId, place(event));
    if (event.isTrusted) over.setPointerCapture(event.pointerId);
    travelled = 0;
    view.loop = listeners.tool() === "lasso" ? [place(event)] : [];
  });

  over.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = held.get(event.pointerId);
    if (!before) {
      if (event.pointerType !== "touch") listeners.hovered(view.run, view.pick(...now), event);
      return;
    }
    travelled += Math.hypot(now[0] - before[0], now[1] - before[1]);
    held.set(event.pointerId, now);
    if (view.loop.length) {
      view.loop.push(now);
      view.drawOver();
    } else if (held.size === 1) {
      view.pan(now[0] - before[0], now[1] - before[1]);
    } else {
      const other = [...held].find(([id]) => id !== event.pointerId)?.[1] ?? now;
      const apart = (/** @type {number[]} */ at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
      view.zoom(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    }
  });

  over.addEventListener("pointerup", (event) => {
    if (!held.delete(event.pointerId)) return;
    const loop = view.loop;
    view.loop = [];
    const finger = event.pointerType === "touch"; // it has no hover, so what it taps is shown beside it; and it is wide
    if (travelled < (finger ? 10 : 5)) listeners.pinned(view.run, view.pick(...place(event), finger ? 24 : 14), finger ? event : undefined);
    else if (loop.length > 2) listeners.selected(view.run, view.inside(loop), "in the lasso", event.shiftKey);
    view.drawOver();
  });

  over.addEventListener("pointercancel", (event) => {
    held.delete(event.pointerId);
    view.loop = [];
    view.drawOver();
  });

  over.addEventListener("pointerleave", (event) => {
    if (!held.size && event.pointerType !== "touch") listeners.hovered(view.run, -1);
  });

  // The wheel scrolls the page until a map is clicked; otherwise nobody could scroll past the maps.
  over.addEventListener("wheel", (event) => {
    if (document.activeElement !== over && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    view.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015) * (event.ctrlKey ? 4 : 1)), ...place(event));
  }, { passive: false });

  over.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { // in the middle of a lasso it lets go of that, too
      held.clear();
      view.loop = [];
    }
    if (event.ctrlKey || event.metaKey || event.altKey || !press(view, event.key, event.shiftKey)) return;
    event.preventDefault();
  });
}

/** @type {Record<string, [number, number]>} */
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** @param {Cloud} view @param {string} key @param {boolean} shift @returns {boolean} whether the key meant something */
function press(view, key, shift) {
  const { listeners, run } = view;
  const choice = listeners.choice(run);
  const active = choice.hover >= 0 ? choice.hover : choice.pinned;
  const arrow = ARROWS[key];
  if (arrow && shift) {
    view.pan(-60 * arrow[0], -60 * arrow[1]);
  } else if (arrow) {
    const row = step(view, active, arrow);
    if (row >= 0) view.show(row);
    if (row >= 0) listeners.hovered(run, row);
  } else if (key === "+" || key === "=") view.zoom(1.4, view.width / 2, view.height / 2);
  else if (key === "-" || key === "_") view.zoom(1 / 1.4, view.width / 2, view.height / 2);
  else if (key === "0") view.reset();
  else if (key === "Enter" || key === " ") listeners.pinned(run, active);
  else if (key === "l" || key === "L") listeners.wantTool(listeners.tool() === "lasso" ? "pan" : "lasso");
  else if (key === "Escape") listeners.released();
  else return false;
  return true;
}

/** The nearest point in the direction of the arrow, seen from the active point; without one, the nearest to the middle.
 *  @param {Cloud} view @param {number} active @param {[number, number]} arrow @returns {number} */
function step(view, active, [ax, ay]) {
  const [x, y] = active >= 0 ? view.screen(active) : [view.width / 2, view.height / 2];
  let [best, cost] = [-1, Infinity];
  for (let row = 0; row < view.run.split.count; row++) {
    if (row === active || view.hidden(row)) continue;
    const [px, py] = view.screen(row);
    const along = (px - x) * ax + (py - y) * ay;
    const across = Math.abs((px - x) * ay) + Math.abs((py - y) * ax);
    const distance = active < 0 ? Math.hypot(px - x, py - y) : along + 2 * across;
    if ((active < 0 || along > across) && distance < cost) [best, cost] = [row, distance];
  }
  return best;
}
