// Lines over the last minutes, as SVG.

import { create, createSvg, DIGITS } from "./dom.js";

const NUM_POINTS = 150;
const WIDTH = 300;
const HEIGHT = 80;

export class Plot {
  // names: one line each.

  constructor(container, title, names, unit) {
    this.title = title;
    this.names = names;
    this.unit = unit;
    this.points = []; // [value of each line, or null]
    this.svg = createSvg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${title}: nothing measured yet`,
    });
    this.values = names.map(() => create("span", { textContent: "-" }));
    this.limit = create("span", { className: "limit" });
    const legend = names.map((name, index) =>
      create("li", { className: `line-${index}` }, name, " ", this.values[index]),
    );
    container.append(
      create(
        "figure",
        {},
        create("figcaption", {}, create("strong", { textContent: title }), this.limit),
        this.svg,
        create("ul", { className: "legend" }, ...legend),
      ),
    );
  }

  format(value) {
    return value === null ? "-" : `${DIGITS.format(value)} ${this.unit}`.trim();
  }

  add(values) {
    this.points.push(values);
    this.points = this.points.slice(-NUM_POINTS);
    const highest = Math.max(...this.points.flat().map((value) => value ?? 0));
    const scale = highest || 1;
    this.svg.replaceChildren(...this.names.map((_, index) => this.buildLine(index, scale)));
    const texts = values.map((value) => this.format(value));
    texts.forEach((text, index) => {
      this.values[index].textContent = text;
    });
    this.limit.textContent = `0 to ${this.format(highest)}`;
    const now = this.names.map((name, index) => `${name} ${texts[index]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${now}, highest ${this.format(highest)}`);
  }

  buildLine(index, scale) {
    // Gaps where there was nothing to measure.
    const parts = [];
    let isDrawing = false;
    this.points.forEach((point, number) => {
      if (point[index] === null) {
        isDrawing = false;
        return;
      }
      const x = WIDTH - (this.points.length - 1 - number) * (WIDTH / (NUM_POINTS - 1));
      const y = HEIGHT - 2 - ((HEIGHT - 4) * point[index]) / scale;
      parts.push(`${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${isDrawing ? "" : "h0.1"}`);
      isDrawing = true;
    });
    return createSvg("path", { d: parts.join(""), class: `line-${index}` });
  }
}
