// A line chart of the last two minutes. Shows the value under the pointer, or under a cursor that the arrow keys move.

import { color, onThemeChange } from "./theme.js";

const SECONDS = 120;
// Points that Page Up and Page Down move by: ten seconds.
const PAGE = 20;

export class Chart {
  // `read(point)`: the value, or null. `format(value)`: its text. `top`: upper end of the axis; 0: the highest value.
  // `announce(text)`: called with the value at which the cursor arrives.
  constructor(tile, { read, format, announce, top = 0, beside = () => "" }) {
    Object.assign(this, { read, format, announce, top, beside, values: [], at: -1, byKey: false });
    this.canvas = tile.querySelector("canvas");
    this.output = tile.querySelector("output");
    this.small = tile.querySelector("small");
    this.title = tile.querySelector("figcaption").textContent;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onThemeChange(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.point(this.nearest((1 - (event.clientX - box.left) / box.width) * SECONDS));
    });
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // Moves to a value, by its index; -1: to the latest value.
  point(at, byKey = false) {
    Object.assign(this, { at, byKey });
    this.draw();
  }

  key(event) {
    if (!this.values.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.values.length - 1;
    const from = this.at < 0 ? last : this.at;
    const to = {
      ArrowLeft: from - 1, ArrowRight: from + 1, PageUp: from - PAGE, PageDown: from + PAGE, Home: 0, End: last,
      Escape: -1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.point(event.key === "Escape" ? -1 : Math.max(0, Math.min(last, to)), true);
    this.announce([this.title, this.output.textContent, this.small.textContent].join(", "));
  }

  clear() {
    this.values = [];
    this.point(-1);
  }

  add(points) {
    for (const point of points) this.values.push({ value: this.read(point), point });
    const before = this.values.length;
    this.values = this.values.filter((value, index) => this.age(index) <= SECONDS);
    // The cursor stays at its point; the pointer's value changes, because the points move under it.
    if (this.byKey) this.at = Math.max(-1, this.at - (before - this.values.length));
    this.draw();
  }

  // Seconds between a point and the last one.
  age(index) {
    return this.values.at(-1).point.at - this.values[index].point.at;
  }

  // The point nearest to `age` seconds before the last one; -1 if there is none within a second.
  nearest(age) {
    let found = -1;
    this.values.forEach((value, index) => {
      const off = Math.abs(this.age(index) - age);
      if (off <= 1 && (found < 0 || off < Math.abs(this.age(found) - age))) found = index;
    });
    return found;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = (this.canvas.width = Math.round(this.canvas.clientWidth * ratio));
    const height = (this.canvas.height = Math.round(this.canvas.clientHeight * ratio));
    const context = this.canvas.getContext("2d");
    const known = this.values.map(({ value }) => value ?? 0);
    const top = this.top || Math.max(...known, 1e-9) * 1.1;
    const x = (index) => width * (1 - this.age(index) / SECONDS);
    const y = (value) => height - ratio - (value / top) * (height - 3 * ratio);
    context.strokeStyle = color("line");
    context.lineWidth = ratio;
    context.beginPath();
    context.moveTo(0, height - ratio / 2);
    context.lineTo(width, height - ratio / 2);
    context.stroke();
    context.strokeStyle = color("chart");
    context.lineWidth = 1.6 * ratio;
    context.lineJoin = "round";
    for (const [begin, end] of this.stretches()) {
      context.beginPath();
      for (let index = begin; index < end; index++) context.lineTo(x(index), y(this.values[index].value));
      context.stroke();
      context.lineTo(x(end - 1), height);
      context.lineTo(x(begin), height);
      context.fillStyle = color("chart-fill");
      context.fill();
    }
    this.tell(context, x, y, height, ratio);
  }

  // [begin, end) of each run of points that have a value and no pause between them.
  stretches() {
    const found = [];
    this.values.forEach(({ value, point }, index) => {
      if (value === null) return;
      const latest = found.at(-1);
      if (latest && latest[1] === index && !point.apart) latest[1]++;
      else found.push([index, index + 1]);
    });
    return found;
  }

  tell(context, x, y, height, ratio) {
    const pointed = this.values[this.at];
    const shown = pointed ?? this.values.at(-1);
    const text = shown && shown.value !== null ? this.format(shown.value) : "–";
    this.output.textContent = text;
    if (pointed) {
      this.small.textContent = `${this.age(this.at).toFixed(0)} s ago`;
      context.fillStyle = color("ink");
      context.fillRect(x(this.at), 0, ratio, height);
    } else {
      this.small.textContent = shown ? this.beside(shown.point) : "";
      this.canvas.setAttribute("aria-label", `${this.title}, the last two minutes; now ${text}`);
      if (shown && shown.value !== null) {
        context.fillStyle = color("chart");
        context.beginPath();
        context.arc(x(this.values.length - 1) - 2.5 * ratio, y(shown.value), 2.5 * ratio, 0, 7);
        context.fill();
      }
    }
  }
}
