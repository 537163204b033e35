"use strict";
// Ticks of axes, number formats, and creation of elements.

const SVG = "http://www.w3.org/2000/svg";

function svgElement(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function htmlElement(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** About `count` round numbers in a range; `base` is 10, 60 or 1024. */
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

/** Powers of ten in a range; if there are few, with multiples of them. */
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
  const stride = Math.ceil(ticks.length / 8);
  return ticks.filter((_, number) => number % stride === 0);
}

function formatNumber(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 10 });
}

function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

function formatDuration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = Math.round(seconds - 60 * minutes);
  if (minutes < 60) return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

/** Format a value of one kind of chart. */
function formatValue(kind, value, digits) {
  if (kind === "percent") return `${formatNumber(100 * value, digits)} %`;
  if (kind === "bytes") return formatBytes(value);
  if (kind === "count") return formatNumber(value, Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))));
  return formatNumber(value, digits);
}

/** Positions and labels of the ticks of an axis of steps or time. */
function ticksOf(axis, least, most, count) {
  if (axis === "step") {
    return ticksBetween(least, most, count).filter(Number.isInteger).map((tick) => [tick, tick.toLocaleString("en")]);
  }
  const unit = most < 120 ? 1 : most < 7200 ? 60 : 3600;
  const name = { 1: "s", 60: "min", 3600: "h" }[unit];
  return ticksBetween(least / unit, most / unit, count).map((tick) => [tick * unit, `${formatNumber(tick, 4)} ${name}`]);
}
