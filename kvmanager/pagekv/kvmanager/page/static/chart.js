// A line over the last two minutes, with its value under the pointer.

import { color, onThemeChange } from "./theme.js";

const POINTS = 240;
const SECONDS_A_POINT = 0.5;

export class Chart {
  // `read(point)`: the value or null. `format(value)`. `top`: what the axis ends at, or 0 for the highest value.
  constructor(tile, { read, format, top = 0, beside = () => "" }) {
    Object.assign(this, { read, format, top, beside, values: [], at: -1 });
    this.canvas = tile.querySelector("canvas");
    this.output = tile.querySelector("output");
    this.small = tile.querySelector("small");
    this.title = tile.querySelector("figcaption").textContent;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onThemeChange(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const back = Math.round((1 - (event.clientX - box.left) / box.width) * (POINTS - 1));
      this.at = this.values.length - 1 - back;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.at = -1;
      this.draw();
    });
  }

  clear() {
    this.values = [];
    this.draw();
  }

  add(points) {
    for (const point of points) this.values.push({ value: this.read(point), point });
    this.values.splice(0, this.values.length - POINTS);
    this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = (this.canvas.width = Math.round(this.canvas.clientWidth * ratio));
    const height = (this.canvas.height = Math.round(this.canvas.clientHeight * ratio));
    const context = this.canvas.getContext("2d");
    const known = this.values.map(({ value }) => value ?? 0);
    const top = this.top || Math.max(...known, 1e-9) * 1.1;
    const step = width / (POINTS - 1);
    const x = (index) => width - (this.values.length - 1 - index) * step;
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

  // [begin, end) of neighbours that have a value.
  stretches() {
    const found = [];
    this.values.forEach(({ value }, index) => {
      if (value === null) return;
      const latest = found.at(-1);
      if (latest && latest[1] === index) latest[1]++;
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
      this.small.textContent = `${((this.values.length - 1 - this.at) * SECONDS_A_POINT).toFixed(0)} s ago`;
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
