// Marks on the chosen blocks of a map, drawn above its cells.

import { color } from "./theme.js";

const TIP_MARGIN = 10;

// Marks the chosen block table, the block with the focus, and the chain of blocks before it.
export function drawMarks({ grid, marks, table, shown, chain, focused }) {
  const context = marks.getContext("2d");
  const { cell, gap, ratio } = grid;
  context.clearRect(0, 0, grid.width, grid.height);
  const size = cell - gap;
  context.strokeStyle = context.fillStyle = color("ink");
  if (table) markTable(context, grid, size, table.slice(0, shown));
  context.lineWidth = Math.max(1, ratio);
  context.globalAlpha = 0.75;
  for (const block of chain) ring(context, grid, block, size, 0.5);
  context.globalAlpha = 1;
  if (focused >= 0) {
    const out = Math.max(1.5 * ratio, cell < 8 * ratio ? 3 * ratio : 0);
    context.lineWidth = 2 * ratio;
    ring(context, grid, focused, size, out, grid.radius + out);
  }
}

// Draws a ring around a cell at the distance `out`, or less at the edges of the canvas, so that it stays visible.
function ring(context, grid, block, size, out, radius = 0) {
  const half = context.lineWidth / 2;
  const left = Math.max(half, grid.x(block) - out);
  const top = Math.max(half, grid.y(block) - out);
  const right = Math.min(grid.width - half, grid.x(block) + size + out);
  const bottom = Math.min(grid.height - half, grid.y(block) + size + out);
  context.beginPath();
  context.roundRect(left, top, right - left, bottom - top, radius);
  context.stroke();
}

// Joins a request's blocks with a line in their order, and numbers them if there is room.
function markTable(context, grid, size, shown) {
  const { cell, ratio } = grid;
  context.globalAlpha = shown.length > 400 ? 0.25 : 0.55;
  context.lineWidth = Math.max(1, 1.25 * ratio);
  context.beginPath();
  shown.forEach((block, at) => {
    const x = grid.x(block) + size / 2;
    const y = grid.y(block) + size / 2;
    if (at) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
  context.globalAlpha = 1;
  if (cell < 20 * ratio) return;
  context.font = `600 ${10 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  shown.forEach((block, at) => {
    const x = grid.x(block);
    const y = grid.y(block);
    context.fillStyle = color("card");
    context.beginPath();
    context.roundRect(x + size / 2 - 8 * ratio, y + size / 2 - 6.5 * ratio, 16 * ratio, 13 * ratio, 3 * ratio);
    context.fill();
    context.fillStyle = color("ink");
    context.fillText(at, x + size / 2, y + size / 2 + 0.5 * ratio);
  });
}

// Shows the text of the block with the focus beside it.
export function showTip(map) {
  const { grid, tip, focused } = map;
  tip.hidden = focused < 0;
  if (tip.hidden) return;
  tip.textContent = map.describe(focused);
  const { ratio, cell } = grid;
  const x = grid.x(focused) / ratio;
  const y = grid.y(focused) / ratio;
  const { offsetWidth, offsetHeight } = tip;
  tip.style.left = `${Math.max(0, Math.min(x, map.root.clientWidth - offsetWidth))}px`;
  const above = y - offsetHeight - TIP_MARGIN;
  tip.style.top = `${above > -offsetHeight ? above : y + cell / ratio + TIP_MARGIN}px`;
}
