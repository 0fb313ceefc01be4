// Strip charts of the last two minutes.

import { h } from "./dom.js";

const SAMPLES = 240;

export class Chart {
  /** `ceiling` is the least that the top of the chart stands for. */
  constructor(title, ceiling) {
    this.title = title;
    this.ceiling = ceiling;
    this.values = [];
    this.caption = h("figcaption", {}, title);
    this.canvas = h("canvas", { role: "img", "aria-label": title, width: 340, height: 112 });
    this.element = h("figure", {}, this.caption, this.canvas);
  }

  /** Adds a sample; `null` where there is none. `limit` is drawn as a line. */
  add(value, text, limit) {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
    this.limit = limit;
    this.caption.textContent = `${this.title}: ${text}`;
    this.canvas.setAttribute("aria-label", this.caption.textContent);
    this.draw();
  }

  draw() {
    const { canvas, values } = this;
    const context = canvas.getContext("2d");
    const [width, height] = [canvas.width, canvas.height];
    const style = getComputedStyle(document.documentElement);
    const top = Math.max(this.ceiling, this.limit ?? 0, ...values) * 1.05;
    const y = (value) => height - 3 - ((height - 6) * value) / top;
    context.clearRect(0, 0, width, height);
    if (this.limit) {
      context.strokeStyle = style.getPropertyValue("--dim");
      context.setLineDash([6, 6]);
      context.beginPath();
      context.moveTo(0, y(this.limit));
      context.lineTo(width, y(this.limit));
      context.stroke();
      context.setLineDash([]);
    }
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 2.5;
    context.beginPath();
    let isOpen = false;
    values.forEach((value, i) => {
      if (value === null) {
        isOpen = false;
        return;
      }
      const x = width - ((values.length - 1 - i) * width) / (SAMPLES - 1);
      if (isOpen) context.lineTo(x, y(value));
      else context.moveTo(x, y(value));
      isOpen = true;
    });
    context.stroke();
  }
}
