"use strict";
// Curves of several runs on shared axes.

const HEIGHT = 230;
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2"];
const COLOURS = 8;
const DOTS = 40; // a curve of so few points shows them
const READ = 10; // curves in a read-out: those nearest to the pointer
const NAMED = 16; // curves in a legend; more than these are read by the pointer alone
const FROM_ZERO = ["samples_per_second", "data_share"];

/** The dashes of one of several runs: where colours begin anew, dashes are others. */
function dashes(run) {
  return DASHES[(run + Math.floor(run / COLOURS)) % DASHES.length];
}

/** Moving averages that forget the past at a rate of 1 - `amount`; the values themselves at 0. */
function smoothed(values, amount) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

/** The place of the value in a rising list that is nearest to another. */
function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

class Chart {
  /** `view` is what all charts share: `axis`, `smooth`, and the names that are `hidden`. */
  constructor(figure, chart, runs, view) {
    Object.assign(this, { figure, chart, runs, view, isLog: false });
    this.plot = figure.querySelector(".plot");
    this.tip = element("div", "tip");
    this.tip.setAttribute("role", "status");
    this.curves = chart.curves.map((curve) => {
      const number = curve.rank ?? curve.run;
      const run = runs[curve.run].name;
      const name = curve.rank === null ? run : `${run}, ${curve.label}`;
      const label = curve.rank === null ? [run, curve.label].filter(Boolean).join(": ") : curve.label;
      const dash = curve.rank === null ? dashes(number) : DASHES[Math.floor(number / COLOURS) % DASHES.length];
      return { ...curve, name, text: label, colour: `c${number % COLOURS}`, dash, isBeside: curve.rank === null && curve.label !== "" };
    });
    const log = figure.querySelector(".log");
    const values = this.curves.flatMap((curve) => curve.drawn.points.y);
    log.hidden = !values.length || ["percent", "bytes"].includes(chart.kind) || values.some((value) => value <= 0);
    log.addEventListener("click", () => {
      this.isLog = !this.isLog;
      log.setAttribute("aria-pressed", this.isLog);
      this.draw();
    });
    if (this.curves.some((curve) => curve.rank !== null) && this.curves.length <= NAMED) this.plot.after(legend(this.curves, view));
  }

  shown() {
    return this.curves.filter((curve) => !this.view.hidden.has(curve.name));
  }

  /** What is drawn strong and read: means of a long curve whose values jump, else the points themselves. */
  strong(curve) {
    return this.chart.jumps && curve.drawn.means.y.length ? curve.drawn.means : curve.drawn.points;
  }

  along(points) {
    return this.view.axis === "step" ? points.x : points.t;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.leave();
    this.axes(width);
    const picture = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img" });
    picture.setAttribute("aria-label", `${this.chart.title}. Left and right arrow keys read values.`);
    this.drawAxes(picture);
    this.runs.forEach((run, number) => this.drawMarks(picture, run, number));
    for (const curve of this.shown()) this.drawCurve(picture, curve);
    this.reading = picture.appendChild(shape("g", {}));
    this.plot.replaceChildren(picture, this.tip);
    picture.addEventListener("pointermove", (event) => {
      const { left, top } = picture.getBoundingClientRect();
      this.read(event.clientX - left, event.clientY - top);
    });
    picture.addEventListener("pointerleave", () => this.leave());
    picture.addEventListener("blur", () => this.leave());
    picture.addEventListener("keydown", (event) => this.step(event));
  }

  /** Sets the ranges of both axes, and the functions from values to pixels. */
  axes(width) {
    const curves = this.shown();
    const xs = curves.flatMap((curve) => {
      const holes = this.along(curve.drawn.holes);
      const all = this.along(curve.drawn.points);
      return [all[0], all.at(-1), holes[0], holes.at(-1)].filter((value) => value !== undefined);
    });
    const ys = curves.flatMap((curve) => curve.extremes ? [curve.extremes.least, curve.extremes.largest] : []);
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
    const labels = this.yTicks.map((tick) => written(this.chart.kind, tick, 4));
    this.box = { left: 12 + 7 * Math.max(...labels.map((label) => label.length), 2), right: width - 14, top: 10, bottom: HEIGHT - 26 };
    const { box } = this;
    const bend = this.isLog ? Math.log : (value) => value;
    this.px = (x) => box.left + (box.right - box.left) * (x - left) / (right - left);
    this.py = (y) => box.bottom - (box.bottom - box.top) * (bend(y) - bend(least)) / (bend(most) - bend(least));
    this.xTicks = ticksAlong(this.view.axis, left, right, Math.max(3, Math.floor((box.right - box.left) / 75)));
  }

  drawAxes(picture) {
    const { left, right, top, bottom } = this.box;
    for (const tick of this.yTicks) {
      const y = this.py(tick);
      picture.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      picture.append(shape("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, written(this.chart.kind, tick, 4)));
    }
    picture.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    for (const [tick, text] of this.xTicks) {
      const x = this.px(tick);
      picture.append(shape("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const anchor = x > right - 20 ? "end" : x < left + 10 ? "start" : "middle";
      picture.append(shape("text", { x: anchor === "end" ? right + 6 : x, y: bottom + 18, "text-anchor": anchor }, text));
    }
    picture.append(shape("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }));
  }

  drawMarks(picture, run, number) {
    if (this.view.hidden.has(run.name) || !this.chart.curves.some((curve) => curve.run === number)) return;
    for (const [step, seconds] of run.marks) {
      const x = this.px(this.view.axis === "step" ? step : seconds);
      if (x < this.box.left || x > this.box.right) continue;
      const line = shape("line", { class: `mark c${number % COLOURS}`, x1: x, x2: x, y1: this.box.top, y2: this.box.bottom });
      line.append(shape("title", {}, `${run.name} resumed at step ${step}`));
      picture.append(line);
    }
  }

  drawCurve(picture, curve) {
    const { points, means } = curve.drawn;
    const amount = this.chart.jumps ? this.view.smooth : 0;
    const line = (xs, values, extra) => {
      if (!values.length) return;
      const path = values.map((y, number) => `${number ? "L" : "M"}${this.px(xs[number]).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
      const attributes = { class: `line ${curve.colour} ${extra}`, d: path, "data-name": curve.name, "data-points": values.length };
      if (curve.dash && !extra) attributes["stroke-dasharray"] = curve.dash;
      picture.append(shape("path", attributes));
    };
    const strong = this.strong(curve);
    const xs = this.along(points), ys = points.y;
    if (strong === means || amount) line(xs, ys, "behind");
    line(this.along(strong), smoothed(strong.y, amount), curve.isBeside ? "beside" : "");
    if (ys.length <= DOTS) {
      ys.forEach((y, number) => picture.append(shape("circle", {
        class: `dot ${curve.colour} ${curve.isBeside ? "beside" : ""}`, cx: this.px(xs[number]), cy: this.py(y), r: ys.length > 20 ? 2 : 3,
      })));
    }
    for (const hole of this.along(curve.drawn.holes)) {
      const x = this.px(hole), y = this.box.bottom - 6;
      const cross = shape("path", { class: "hole", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
      cross.append(shape("title", {}, `${curve.text}: not finite`));
      picture.append(cross);
    }
  }

  /** Shows what every curve is at the point nearest to a place in pixels; of very many, those nearest to its height. */
  read(place, height = 0) {
    const shown = this.shown().filter((curve) => curve.drawn.points.y.length);
    if (!shown.length) return;
    const found = shown.map((curve) => {
      const xs = this.along(this.strong(curve));
      // From pixels to steps or seconds, by two points whose pixels are known.
      const [a, b] = [this.px(0), this.px(1)];
      const number = nearest(xs, (place - a) / (b - a));
      return { curve, number, far: Math.abs(this.px(xs[number]) - place) };
    });
    const first = found.reduce((best, one) => (one.far < best.far ? one : best));
    this.at = first;
    const at = ({ curve, number }) => this.px(this.along(this.strong(curve))[number]);
    const x = at(first);
    const above = ({ curve, number }) => Math.abs(this.py(this.strong(curve).y[number]) - height);
    const close = found.filter((one) => Math.abs(at(one) - x) < 24);
    const near = close.length > READ ? close.sort((one, two) => above(one) - above(two)).slice(0, READ) : close;
    const read = this.strong(first.curve);
    const around = read === first.curve.drawn.points ? "step" : "mean around step";
    const words = `${around} ${read.x[first.number].toLocaleString("en")}, after ${inTime(read.t[first.number])}`;
    const head = element("p", "head", words);
    const rows = near.map(({ curve, number }) => {
      const row = element("p");
      row.append(element("span", `swatch ${curve.colour}`), element("span", "", curve.text));
      row.append(element("span", "", written(this.chart.kind, this.strong(curve).y[number], 5)));
      return row;
    });
    this.tip.replaceChildren(head, ...rows);
    this.reading.replaceChildren(shape("line", { class: "cursor", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }));
    for (const one of near) {
      const y = this.py(this.strong(one.curve).y[one.number]);
      this.reading.append(shape("circle", { class: `dot ${one.curve.colour}`, cx: at(one), cy: y, r: 4 }));
    }
    placeTip(this.tip, x, this.plot.clientWidth);
  }

  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const curve = (this.at && this.shown().includes(this.at.curve) ? this.at.curve : this.shown().find((one) => one.drawn.points.y.length));
    if (!curve) return;
    const xs = this.along(this.strong(curve));
    const number = this.at ? Math.min(Math.max(this.at.number + move, 0), xs.length - 1) : move > 0 ? 0 : xs.length - 1;
    this.read(this.px(xs[number]));
    this.at = { curve, number };
  }

  leave() {
    this.at = null;
    this.tip.replaceChildren();
    this.reading?.replaceChildren();
  }
}

/** Beside a place in pixels, on the side that has room. */
function placeTip(tip, x, width) {
  const size = tip.offsetWidth;
  const left = x + 14 + size > width ? x - 14 - size : x + 14;
  tip.style.left = `${Math.max(0, Math.min(left, width - size))}px`;
}

/** Buttons that show and hide curves of a name, in every chart. */
function legend(curves, view) {
  const list = element("ul", "legend");
  for (const { name, text, colour, dash } of curves) {
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-pressed", !view.hidden.has(name));
    const sample = shape("svg", { width: 26, height: 8, "aria-hidden": true });
    sample.append(shape("path", { class: `line ${colour}`, d: "M1 4H25", "stroke-dasharray": dash }));
    button.append(sample, text);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      button.setAttribute("aria-pressed", !view.hidden.has(name));
      view.changed();
    });
    const item = element("li");
    item.append(button);
    list.append(item);
  }
  return list;
}
