// A pool as a map: an image with one pixel for each block, drawn enlarged, and a canvas above it with marks on chosen
// blocks. A block that changes lights up or turns pale for a moment, in the colour of its state: the hue always shows
// the state. Between two changes nothing is computed or drawn.

import { forEachChange, holders, state } from "./codec.js";
import { Grid } from "./grid.js";
import { drawMarks, showTip } from "./marks.js";
import { color, mix, onRatioChange, onThemeChange, pixel, reducedMotion } from "./theme.js";

const FADE_MS = 900;
// At the beginning of a fade, in 256ths: the share of the flash colour in a block that was just allocated or hit, and
// the share of the card's colour in a block that was just freed.
const TAKEN_SHARE = 125;
const GIVEN_SHARE = 165;
const REVEAL_MS = 1100;
// Blocks of a growing map at its beginning.
const FEWEST = 256;
// Possible numbers of rows between two ids at the left.
const STEPS = [1, 2, 4, 5, 10, 20, 40, 50, 100, 200];

export class BlockMap {
  // `palette`: names of colours by state. `describe(index)`: text for a block. `onFocus(index, kept)`: a block has the
  // focus, -1 for none; `kept`: it keeps the focus until the user ends it. `onTap()`: a block was chosen by touch.
  // `onLeave(what)`: the user leaves the map by keyboard, for the lit block table if `what` is "table", else for the
  // block's details. `grows`: only as many blocks as were ever used are drawn, rounded up.
  constructor(root, { palette, describe, onFocus, onTap, onLeave, grows }) {
    Object.assign(this, { root, palette, describe, onFocus, onTap, onLeave, grows });
    this.cells = root.querySelector(".cells");
    this.marks = root.querySelector(".marks");
    this.tip = root.querySelector(".tip");
    this.image = document.createElement("canvas");
    this.focused = -1;
    this.kept = false;
    this.only = -1;
    this.table = null;
    this.chain = [];
    this.frames = [];
    this.revealed = Infinity;
    this.reset(0);
    new ResizeObserver(() => this.layout()).observe(root);
    onThemeChange(() => this.layout());
    onRatioChange(() => this.layout());
    this.listen();
  }

  // A snapshot of a pool of `size` blocks follows. Another epoch means another pool, of which no block has the focus.
  begin(size, epoch) {
    if (size === this.size && epoch === this.epoch) {
      this.bytes.fill(0);
    } else {
      this.focus(-1);
      Object.assign(this, { size, epoch });
      this.reset(this.grows ? Math.min(size, FEWEST) : size);
    }
  }

  // Makes room for a block that was not drawn so far.
  grow(index) {
    const focus = [this.focused, this.kept];
    this.reset(Math.min(this.size, 2 ** Math.ceil(Math.log2(index + 1))), this.bytes);
    [this.focused, this.kept] = focus;
  }

  // Starts with `count` blocks, all free but for those in `bytes`.
  reset(count, bytes = []) {
    this.count = count;
    this.bytes = new Uint8Array(count);
    this.bytes.set(bytes);
    this.from = new Uint32Array(count);
    // The first `numFading` entries are blocks whose colour is fading.
    this.fading = new Int32Array(count);
    this.numFading = 0;
    this.isFading = new Uint8Array(count);
    this.began = new Float64Array(count);
    this.lit = null;
    this.table = null;
    this.focused = -1;
    this.kept = false;
    this.grid = null;
    this.layout();
  }

  layout() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.floor(this.root.clientWidth * ratio);
    if (!width || !this.count) return;
    const height = Math.max(240, Math.min(560, window.innerHeight * 0.56)) * (this.grows ? 0.5 : 1) * ratio;
    this.grid = new Grid(this.count, width, height, ratio);
    for (const canvas of [this.cells, this.marks]) {
      canvas.width = this.grid.width;
      canvas.height = this.grid.height;
      canvas.style.height = `${this.grid.height / ratio}px`;
    }
    this.context = this.cells.getContext("2d");
    this.image.width = this.grid.columns;
    this.image.height = this.grid.rows;
    this.imageContext = this.image.getContext("2d", { willReadFrequently: true });
    this.data = this.imageContext.createImageData(this.grid.columns, this.grid.rows);
    this.pixels = new Uint32Array(this.data.data.buffer);
    this.readColors();
    this.repaint();
    this.mark();
  }

  readColors() {
    const paper = pixel("card");
    this.paper = paper;
    const flash = pixel("flash");
    this.colors = new Uint32Array(256);
    this.taken = new Uint32Array(256);
    this.given = new Uint32Array(256);
    const base = this.palette.map((name) => pixel(name));
    const many = pixel("shared-many");
    for (let byte = 0; byte < 256; byte++) {
      let shade = base[state(byte)] ?? base[0];
      // A block with more holders has a stronger colour.
      const doublings = Math.log2(Math.max(2, holders(byte)) / 2);
      if (this.palette[state(byte)] === "shared") shade = mix(shade, many, Math.min(256, Math.round(52 * doublings)));
      if (this.only >= 0 && state(byte) !== this.only) shade = mix(shade, paper, 218);
      this.colors[byte] = shade;
      this.taken[byte] = mix(shade, flash, TAKEN_SHARE);
      this.given[byte] = mix(shade, paper, GIVEN_SHARE);
    }
    this.gaps = this.gapPattern();
  }

  // A pattern of one cell's edge in the colour of the card, which is drawn over all cells at once.
  gapPattern() {
    const { cell, gap, radius } = this.grid;
    if (!gap) return null;
    const tile = new OffscreenCanvas(cell, cell);
    const context = tile.getContext("2d");
    context.fillStyle = color("card");
    context.fillRect(0, 0, cell, cell);
    context.globalCompositeOperation = "destination-out";
    context.beginPath();
    context.roundRect(0, 0, cell - gap, cell - gap, radius);
    context.fill();
    return this.context.createPattern(tile, "repeat");
  }

  // -- states of blocks

  // Applies a change from the manager; `quietly`: without fading.
  apply(change, quietly = false) {
    if (!change) return;
    const now = performance.now();
    const still = quietly || reducedMotion.matches || !this.grid;
    forEachChange(change, (index, byte) => {
      if (index >= this.count) {
        if (!byte) return;
        this.grow(index);
      }
      const old = this.bytes[index];
      if (byte === old) return;
      this.bytes[index] = byte;
      if (still) return this.paint(index);
      // A block that was allocated or hit lights up; one that was freed or evicted turns pale.
      this.fade(index, (holders(byte) > holders(old) ? this.taken : this.given)[byte], now);
    });
    this.draw();
    if (this.focused >= 0) this.mark();
  }

  fade(index, from, now) {
    this.from[index] = from;
    this.began[index] = now;
    if (!this.isFading[index]) {
      this.isFading[index] = 1;
      this.fading[this.numFading++] = index;
    }
  }

  shade(index) {
    const shade = this.colors[this.bytes[index]];
    return this.lit && !this.lit[index] ? mix(shade, this.paper, 205) : shade;
  }

  paint(index) {
    // A map in a hidden card has no cells.
    if (this.grid) this.pixels[index] = this.shade(index);
  }

  repaint() {
    if (!this.grid) return;
    for (let index = 0; index < this.count; index++) this.paint(index);
    this.draw();
  }

  draw() {
    if (!this.grid || this.drawing) return;
    this.drawing = requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    this.drawing = 0;
    const begun = performance.now();
    let left = 0;
    for (let at = 0; at < this.numFading; at++) {
      const index = this.fading[at];
      const share = (now - this.began[index]) / FADE_MS;
      if (share >= 1) {
        this.isFading[index] = 0;
        this.paint(index);
      } else {
        // The fade is fast first, then slow.
        const rest = 1 - Math.max(0, share);
        // While a request's blocks are lit, all others are dim, and so are their fades.
        const strength = this.lit && !this.lit[index] ? 50 : 256;
        this.pixels[index] = mix(this.shade(index), this.from[index], Math.round(strength * rest * rest));
        this.fading[left++] = index;
      }
    }
    this.numFading = left;
    const { columns, rows, cell, left: x } = this.grid;
    this.imageContext.putImageData(this.data, 0, 0);
    const context = this.context;
    context.imageSmoothingEnabled = false;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.grid.width, this.grid.height);
    context.translate(x, 0);
    context.drawImage(this.image, 0, 0, columns, rows, 0, 0, columns * cell, rows * cell);
    if (this.gaps) {
      context.fillStyle = this.gaps;
      context.fillRect(0, 0, columns * cell, rows * cell);
    }
    this.drawLabels(context);
    // Milliseconds that the latest frames took, for tests that measure them.
    this.frames.push(performance.now() - begun);
    if (this.frames.length > 600) this.frames.shift();
    if (left) this.draw();
  }

  drawLabels(context) {
    const { left, rows, cell, columns, ratio } = this.grid;
    if (!left) return;
    const every = STEPS.find((step) => step * cell >= 22 * ratio) ?? 500;
    context.fillStyle = color("soft");
    context.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "right";
    context.textBaseline = cell > 14 * ratio ? "middle" : "top";
    const middle = cell > 14 * ratio ? (cell - this.grid.gap) / 2 : 0;
    for (let row = 0; row < rows; row += every) {
      // The last id may not have room.
      if (cell > 14 * ratio || row * cell + 11 * ratio <= this.grid.height) {
        context.fillText(row * columns, -9 * ratio, row * cell + middle);
      }
    }
  }

  // -- choice

  // Shows only the blocks in one state; -1: all.
  isolate(wanted) {
    this.only = wanted;
    if (this.grid) this.readColors();
    this.repaint();
  }

  // Lights the blocks of a block table; null: none. `afresh`: one after the other. A refresh of the same table goes on
  // where its lighting was.
  choose(table, afresh = true) {
    this.table = table;
    if (afresh) {
      this.revealed = table && !reducedMotion.matches ? 0 : Infinity;
      this.revealBegan = performance.now();
    }
    this.light();
  }

  light() {
    const table = this.table;
    if (!table) {
      this.lit = null;
    } else {
      const share = this.revealed === Infinity ? 1 : Math.min(1, (performance.now() - this.revealBegan) / REVEAL_MS);
      const shown = Math.ceil(table.length * share);
      this.lit = new Uint8Array(this.count);
      for (let at = 0; at < shown; at++) this.lit[table[at]] = 1;
      this.shown = shown;
      if (share < 1) requestAnimationFrame(() => this.table === table && this.light());
      else this.revealed = Infinity;
    }
    this.repaint();
    this.mark();
  }

  // Shows the chain of blocks before the one with the focus.
  showChain(blocks) {
    this.chain = blocks;
    this.mark();
  }

  focus(index, kept = false) {
    if (index === this.focused && kept === this.kept) return;
    this.focused = index;
    this.kept = kept && index >= 0;
    this.chain = [];
    this.mark();
    this.onFocus(index, this.kept);
  }

  mark() {
    if (!this.grid) return;
    drawMarks(this);
    showTip(this);
  }

  // -- input

  listen() {
    const at = (event) => {
      const box = this.marks.getBoundingClientRect();
      return this.grid ? this.grid.at(event.clientX - box.left, event.clientY - box.top) : -1;
    };
    this.marks.addEventListener("pointermove", (event) => {
      if (!this.kept && event.pointerType !== "touch") this.focus(at(event));
    });
    this.marks.addEventListener("pointerleave", () => {
      if (!this.kept && document.activeElement !== this.marks) this.focus(-1);
    });
    this.marks.addEventListener("click", (event) => {
      const index = at(event);
      this.focus(index, !(this.kept && index === this.focused));
      if (event.pointerType === "touch" && this.kept) this.onTap();
    });
    this.marks.addEventListener("focus", () => {
      if (this.focused < 0 && this.count && this.marks.matches(":focus-visible")) this.focus(0);
    });
    this.marks.addEventListener("blur", () => {
      if (!this.kept) this.focus(-1);
    });
    this.marks.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns } = this.grid;
    const from = Math.max(0, this.focused);
    const last = this.count - 1;
    const to = {
      ArrowLeft: from - 1, ArrowRight: from + 1, ArrowUp: from - columns, ArrowDown: from + columns,
      PageUp: from - 8 * columns, PageDown: from + 8 * columns, Home: 0, End: last,
    }[event.key];
    if (to !== undefined) {
      const step = Math.abs(to - from) >= columns ? columns : 1;
      // Up and down stop in the same column, not at the first or last block.
      const within = Math.max(0, Math.min(last, to));
      this.focus(within === to || step === 1 ? within : to < 0 ? from % columns : from);
      this.scrollTo(this.focused);
    } else if (event.key === "Enter" || event.key === " ") {
      this.focus(from, true);
      this.onLeave();
    } else if (event.key === "Escape") {
      this.focus(this.focused, false);
      if (this.table) this.onLeave("table");
    } else {
      return;
    }
    event.preventDefault();
  }

  scrollTo(index) {
    const top = this.marks.getBoundingClientRect().top + this.grid.y(index) / this.grid.ratio;
    if (top < 40) window.scrollBy(0, top - 120);
    else if (top > window.innerHeight - 40) window.scrollBy(0, top - window.innerHeight + 120);
  }
}
