// A line over the last two minutes, drawn by the times of its points, with its value under the pointer.

import { color, onThemeChange } from "./theme.js";

const SECONDS = 120;

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
      this.at = this.nearest((1 - (event.clientX - box.left) / box.width) * SECONDS);
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
    this.values = this.values.filter((value, index) => this.age(index) <= SECONDS);
    this.draw();
  }

  // Seconds from a point to the last one.
  age(index) {
    return this.values.at(-1).point.at - this.values[index].point.at;
  }

  // The point so many seconds before the last one, -1 where there was none.
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

  // [begin, end) of neighbours that have a value, and between which somebody looked.
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
