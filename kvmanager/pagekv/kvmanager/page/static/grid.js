// The places of the blocks' cells. All lengths are device pixels, so that cells are sharp.

const LARGEST = 26;
// The width of ids of up to five digits at the left, and of each further digit.
const LABELS = 46;
const DIGIT = 7;

export class Grid {
  // The largest cells with which `count` blocks fit into `width` and, if possible, into `height`.
  constructor(count, width, height, ratio) {
    this.count = count;
    this.ratio = ratio;
    // Ids at the left are shown only if there are many blocks and enough room.
    const labels = LABELS + DIGIT * Math.max(0, String(count - 1).length - 5);
    this.left = width > 560 * ratio && count > 60 ? Math.round(labels * ratio) : 0;
    const room = width - this.left;
    let cell = Math.round(LARGEST * ratio);
    while (cell > 1 && Math.ceil(count / this.columnsOf(cell, room)) * cell > height) cell--;
    // Cells below two CSS pixels cannot be seen, so the map becomes higher instead.
    cell = Math.max(cell, count > 500000 ? 1 : Math.round(2 * ratio));
    this.columns = this.columnsOf(cell, room);
    // Cells get the room that the round number of columns leaves.
    if (this.columns < count) cell = Math.max(cell, Math.floor(room / this.columns));
    this.cell = cell;
    this.rows = Math.max(1, Math.ceil(count / this.columns));
    this.gap = cell >= 18 * ratio ? Math.round(3 * ratio) : cell >= 9 ? Math.round(1.5 * ratio) : cell >= 4 ? 1 : 0;
    this.radius = cell >= 9 * ratio ? Math.round(cell / 7) : 0;
    this.width = width;
    this.height = this.rows * cell;
  }

  // A round number of columns, so that the ids at the left are round numbers.
  columnsOf(cell, room) {
    const fit = Math.max(1, Math.floor(room / cell));
    const step = fit >= 200 ? 50 : fit >= 100 ? 20 : fit >= 32 ? 8 : fit >= 8 ? 4 : 1;
    return Math.min(fit - (fit % step), Math.max(1, this.count));
  }

  x(index) { return this.left + (index % this.columns) * this.cell; }
  y(index) { return Math.floor(index / this.columns) * this.cell; }

  // The block at a point in CSS pixels, or -1.
  at(x, y) {
    const column = Math.floor((x * this.ratio - this.left) / this.cell);
    const row = Math.floor((y * this.ratio) / this.cell);
    const index = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && index < this.count ? index : -1;
  }
}
