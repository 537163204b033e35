"use strict";
// Charts: curves of several runs on shared axes.

const HEIGHT = 230;
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2"];
const COLORS = 8;
const MAX_DOTS = 40; // curves of up to this many points show dots
const MAX_TOOLTIP = 10; // curves in a tooltip, nearest to the pointer
const MAX_LEGEND = 16; // curves in a legend; with more, only tooltips show names
const FROM_ZERO = ["samples_per_second", "data_share"];

/** Dash pattern of a run; runs of the same color have different patterns. */
function dashOf(run) {
  return DASHES[(run + Math.floor(run / COLORS)) % DASHES.length];
}

/** Exponential moving averages with decay `amount`; the values if `amount` is 0. */
function movingAverages(values, amount) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

/** Index of the value in an ascending list that is nearest to `target`. */
function nearest(values, target) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1; else high = middle;
  }
  return low > 0 && target - values[low - 1] < values[low] - target ? low - 1 : low;
}

class Chart {
  /** All charts share `view`: `axis`, `smooth`, and the names in `hidden`. */
  constructor(figure, chart, runs, view) {
    Object.assign(this, { figure, chart, runs, view, isLog: false });
    this.plot = figure.querySelector(".plot");
    this.tip = htmlElement("div", "tip");
    this.tip.setAttribute("role", "status");
    this.curves = chart.curves.map((curve) => {
      const number = curve.rank ?? curve.run;
      const run = runs[curve.run].name;
      const name = curve.rank === null ? run : `${run}, ${curve.label}`;
      const label = curve.rank === null ? [run, curve.label].filter(Boolean).join(": ") : curve.label;
      const dash = curve.rank === null ? dashOf(number) : DASHES[Math.floor(number / COLORS) % DASHES.length];
      return { ...curve, name, text: label, color: `c${number % COLORS}`, dash, isSecondary: curve.rank === null && curve.label !== "" };
    });
    const log = figure.querySelector(".log");
    const values = this.curves.flatMap((curve) => curve.data.points.y);
    log.hidden = !values.length || ["percent", "bytes"].includes(chart.kind) || values.some((value) => value <= 0);
    log.addEventListener("click", () => {
      this.isLog = !this.isLog;
      log.setAttribute("aria-pressed", this.isLog);
      this.draw();
    });
    if (this.curves.some((curve) => curve.rank !== null) && this.curves.length <= MAX_LEGEND) this.plot.after(legend(this.curves, view));
  }

  visibleCurves() {
    return this.curves.filter((curve) => !this.view.hidden.has(curve.name));
  }

  /** Points of the strong line and the tooltip: means of a long noisy curve, otherwise all points. */
  mainPoints(curve) {
    return this.chart.is_noisy && curve.data.means.y.length ? curve.data.means : curve.data.points;
  }

  xValues(points) {
    return this.view.axis === "step" ? points.x : points.t;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.hideTooltip();
    this.setAxes(width);
    const picture = svgElement("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img" });
    picture.setAttribute("aria-label", `${this.chart.title}. Left and right arrow keys show values.`);
    this.drawAxes(picture);
    this.runs.forEach((run, number) => this.drawResumes(picture, run, number));
    for (const curve of this.visibleCurves()) this.drawCurve(picture, curve);
    this.highlight = picture.appendChild(svgElement("g", {}));
    this.plot.replaceChildren(picture, this.tip);
    picture.addEventListener("pointermove", (event) => {
      const { left, top } = picture.getBoundingClientRect();
      this.showTooltip(event.clientX - left, event.clientY - top);
    });
    picture.addEventListener("pointerleave", () => this.hideTooltip());
    picture.addEventListener("blur", () => this.hideTooltip());
    picture.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Set the ranges of both axes, and the functions from values to pixels. */
  setAxes(width) {
    const curves = this.visibleCurves();
    const xs = curves.flatMap((curve) => {
      const nonfinite = this.xValues(curve.data.nonfinite);
      const finite = this.xValues(curve.data.points);
      return [finite[0], finite.at(-1), nonfinite[0], nonfinite.at(-1)].filter((value) => value !== undefined);
    });
    const ys = curves.flatMap((curve) => curve.statistics ? [curve.statistics.min, curve.statistics.max] : []);
    let [left, right] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    if (left === right) [left, right] = [left - 1, right + 1];
    let [least, most] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
    if (!this.isLog && (this.chart.kind === "bytes" || FROM_ZERO.includes(this.chart.key))) least = 0;
    const room = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
    if (this.isLog) [least, most] = [least / 1.1, most * 1.1];
    else [least, most] = [least === 0 ? 0 : least - (least >= 0 && least < room ? least : room), most + room];
    if (this.chart.kind === "percent" && !this.isLog) most = Math.min(most, Math.max(1, ...ys));
    const base = this.chart.kind === "bytes" ? 1024 : 10;
    this.yTicks = this.isLog ? logTicks(least, most) : ticksBetween(least, most, 5, base);
    const labels = this.yTicks.map((tick) => formatValue(this.chart.kind, tick, 4));
    this.box = { left: 12 + 7 * Math.max(...labels.map((label) => label.length), 2), right: width - 14, top: 10, bottom: HEIGHT - 26 };
    const { box } = this;
    const scale = this.isLog ? Math.log : (value) => value;
    this.px = (x) => box.left + (box.right - box.left) * (x - left) / (right - left);
    this.py = (y) => box.bottom - (box.bottom - box.top) * (scale(y) - scale(least)) / (scale(most) - scale(least));
    this.xTicks = ticksOf(this.view.axis, left, right, Math.max(3, Math.floor((box.right - box.left) / 75)));
  }

  drawAxes(picture) {
    const { left, right, top, bottom } = this.box;
    for (const tick of this.yTicks) {
      const y = this.py(tick);
      picture.append(svgElement("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      picture.append(svgElement("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, formatValue(this.chart.kind, tick, 4)));
    }
    picture.append(svgElement("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    for (const [tick, text] of this.xTicks) {
      const x = this.px(tick);
      picture.append(svgElement("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const anchor = x > right - 20 ? "end" : x < left + 10 ? "start" : "middle";
      picture.append(svgElement("text", { x: anchor === "end" ? right + 6 : x, y: bottom + 18, "text-anchor": anchor }, text));
    }
    picture.append(svgElement("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }));
  }

  drawResumes(picture, run, number) {
    if (this.view.hidden.has(run.name) || !this.chart.curves.some((curve) => curve.run === number)) return;
    for (const [step, seconds] of run.resumed) {
      const x = this.px(this.view.axis === "step" ? step : seconds);
      if (x < this.box.left || x > this.box.right) continue;
      const line = svgElement("line", { class: `resumed c${number % COLORS}`, x1: x, x2: x, y1: this.box.top, y2: this.box.bottom });
      line.append(svgElement("title", {}, `${run.name} resumed at step ${step}`));
      picture.append(line);
    }
  }

  drawCurve(picture, curve) {
    const { points, means } = curve.data;
    const amount = this.chart.is_noisy ? this.view.smooth : 0;
    const line = (xs, values, extra) => {
      if (!values.length) return;
      const path = values.map((y, number) => `${number ? "L" : "M"}${this.px(xs[number]).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
      const attributes = { class: `line ${curve.color} ${extra}`, d: path, "data-name": curve.name, "data-points": values.length };
      if (curve.dash && !extra) attributes["stroke-dasharray"] = curve.dash;
      picture.append(svgElement("path", attributes));
    };
    const main = this.mainPoints(curve);
    const xs = this.xValues(points), ys = points.y;
    if (main === means || amount) line(xs, ys, "background");
    line(this.xValues(main), movingAverages(main.y, amount), curve.isSecondary ? "secondary" : "");
    if (ys.length <= MAX_DOTS) {
      ys.forEach((y, number) => picture.append(svgElement("circle", {
        class: `dot ${curve.color} ${curve.isSecondary ? "secondary" : ""}`, cx: this.px(xs[number]), cy: this.py(y), r: ys.length > 20 ? 2 : 3,
      })));
    }
    for (const position of this.xValues(curve.data.nonfinite)) {
      const x = this.px(position), y = this.box.bottom - 6;
      const cross = svgElement("path", { class: "nonfinite", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
      cross.append(svgElement("title", {}, `${curve.text}: not finite`));
      picture.append(cross);
    }
  }

  /** Show a tooltip with the values nearest to a position in pixels; with many curves, those nearest to `height`. */
  showTooltip(position, height = 0) {
    const curves = this.visibleCurves().filter((curve) => curve.data.points.y.length);
    if (!curves.length) return;
    const candidates = curves.map((curve) => {
      const xs = this.xValues(this.mainPoints(curve));
      // The scale is linear: two positions give the step or second of a pixel.
      const [a, b] = [this.px(0), this.px(1)];
      const number = nearest(xs, (position - a) / (b - a));
      return { curve, number, distance: Math.abs(this.px(xs[number]) - position) };
    });
    const first = candidates.reduce((best, other) => (other.distance < best.distance ? other : best));
    this.selected = first;
    const pixel = ({ curve, number }) => this.px(this.xValues(this.mainPoints(curve))[number]);
    const x = pixel(first);
    const offset = ({ curve, number }) => Math.abs(this.py(this.mainPoints(curve).y[number]) - height);
    const close = candidates.filter((point) => Math.abs(pixel(point) - x) < 24);
    const near = close.length > MAX_TOOLTIP ? close.sort((a, b) => offset(a) - offset(b)).slice(0, MAX_TOOLTIP) : close;
    const points = this.mainPoints(first.curve);
    const label = points === first.curve.data.points ? "step" : "mean around step";
    const title = `${label} ${points.x[first.number].toLocaleString("en")}, after ${formatDuration(points.t[first.number])}`;
    const head = htmlElement("p", "head", title);
    const rows = near.map(({ curve, number }) => {
      const row = htmlElement("p");
      row.append(htmlElement("span", `swatch ${curve.color}`), htmlElement("span", "", curve.text));
      row.append(htmlElement("span", "", formatValue(this.chart.kind, this.mainPoints(curve).y[number], 5)));
      return row;
    });
    this.tip.replaceChildren(head, ...rows);
    this.highlight.replaceChildren(svgElement("line", { class: "cursor", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }));
    for (const point of near) {
      const y = this.py(this.mainPoints(point.curve).y[point.number]);
      this.highlight.append(svgElement("circle", { class: `dot ${point.curve.color}`, cx: pixel(point), cy: y, r: 4 }));
    }
    positionTooltip(this.tip, x, this.plot.clientWidth);
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const selected = this.selected;
    const curves = this.visibleCurves();
    const curve = selected && curves.includes(selected.curve) ? selected.curve : curves.find((other) => other.data.points.y.length);
    if (!curve) return;
    const xs = this.xValues(this.mainPoints(curve));
    const number = selected ? Math.min(Math.max(selected.number + move, 0), xs.length - 1) : move > 0 ? 0 : xs.length - 1;
    this.showTooltip(this.px(xs[number]));
    this.selected = { curve, number };
  }

  hideTooltip() {
    this.selected = null;
    this.tip.replaceChildren();
    this.highlight?.replaceChildren();
  }
}

/** Place a tooltip to the right of a position, or to the left if there is more space. */
function positionTooltip(tip, x, width) {
  const size = tip.offsetWidth;
  const left = x + 14 + size > width ? x - 14 - size : x + 14;
  tip.style.left = `${Math.max(0, Math.min(left, width - size))}px`;
}

/** Buttons that show and hide the curves of a name in all charts. */
function legend(curves, view) {
  const list = htmlElement("ul", "legend");
  for (const { name, text, color, dash } of curves) {
    const button = htmlElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", !view.hidden.has(name));
    const sample = svgElement("svg", { width: 26, height: 8, "aria-hidden": true });
    sample.append(svgElement("path", { class: `line ${color}`, d: "M1 4H25", "stroke-dasharray": dash }));
    button.append(sample, text);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      button.setAttribute("aria-pressed", !view.hidden.has(name));
      view.changed();
    });
    const item = htmlElement("li");
    item.append(button);
    list.append(item);
  }
  return list;
}
