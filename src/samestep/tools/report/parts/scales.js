"use strict";
// Axes: where ticks stand, and how numbers are written.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** About `count` round numbers between two others; `base` is 10, 60 or 1024. */
function ticksBetween(least, most, count, base = 10) {
  const rough = (most - least) / count;
  if (!(rough > 0)) return [least];
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = { 10: [1, 2, 5, 10], 60: [1, 2, 5, 10, 15, 30, 60], 1024: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] }[base];
  const step = power * factors.find((factor) => power * factor >= rough * 0.999);
  const ticks = [];
  for (let number = Math.ceil(least / step - 1e-9); number * step <= most + step * 1e-9; number++) ticks.push(number * step || 0);
  return ticks;
}

/** Powers of ten between two numbers, with their doubles and fivefolds where there are few. */
function logTicks(least, most) {
  const ticks = [];
  const decades = Math.log10(most / least);
  const factors = decades > 3 ? [1] : decades > 1 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= least * 0.999 && tick <= most * 1.001) ticks.push(tick);
    }
  }
  const every = Math.ceil(ticks.length / 8);
  return ticks.filter((_, number) => number % every === 0);
}

function plain(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 10 });
}

function inBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

function inTime(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  const left = Math.round(seconds - 60 * minutes);
  if (minutes < 60) return left ? `${minutes} min ${left} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

/** A value of one of a chart's kinds, for an axis (`digits` 3 or so) or to be read (5). */
function written(kind, value, digits) {
  if (kind === "percent") return `${plain(100 * value, digits)} %`;
  if (kind === "bytes") return inBytes(value);
  if (kind === "count") return plain(value, Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))));
  return plain(value, digits);
}

/** Ticks of an axis of steps or of time, in its own numbers and as they are written. */
function ticksAlong(axis, least, most, count) {
  if (axis === "step") {
    return ticksBetween(least, most, count).filter(Number.isInteger).map((tick) => [tick, tick.toLocaleString("en")]);
  }
  const unit = most < 120 ? 1 : most < 7200 ? 60 : 3600;
  const name = { 1: "s", 60: "min", 3600: "h" }[unit];
  return ticksBetween(least / unit, most / unit, count).map((tick) => [tick * unit, `${plain(tick, 4)} ${name}`]);
}
