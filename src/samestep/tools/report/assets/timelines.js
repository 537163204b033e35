"use strict";
// Activity over time: one row per rank, with shares of computing and waiting as heights.

const LABEL = 62;

class Timeline {
  constructor(plot, timeline) {
    Object.assign(this, { plot, timeline });
    const count = timeline.ranks.length;
    this.row = count <= 8 ? 26 : count <= 32 ? 16 : 11;
    this.gap = count <= 32 ? 5 : 2;
    this.tip = htmlElement("div", "tip");
    this.tip.setAttribute("role", "status");
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const { ranks, total } = this.timeline;
    const bottom = ranks.length * (this.row + this.gap);
    this.px = (seconds) => LABEL + (width - LABEL - 14) * seconds / (total || 1);
    const picture = svgElement("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, role: "img" });
    picture.setAttribute("aria-label", "Activity of each rank over time; the table below contains the shares of each rank.");
    ranks.forEach((rank, number) => this.drawRank(picture, rank, number * (this.row + this.gap)));
    for (const [tick, text] of ticksOf("time", 0, total, Math.max(3, Math.floor((width - LABEL) / 80)))) {
      const x = this.px(tick);
      picture.append(svgElement("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const anchor = x > width - 34 ? "end" : "middle";
      picture.append(svgElement("text", { x: anchor === "end" ? Math.min(x + 8, width) : x, y: bottom + 18, "text-anchor": anchor }, text));
    }
    this.highlight = picture.appendChild(svgElement("g", {}));
    this.plot.replaceChildren(picture, this.tip);
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      this.showTooltip(event.clientX - box.left, event.clientY - box.top);
    });
    picture.addEventListener("pointerleave", () => this.hideTooltip());
  }

  drawRank(picture, { rank, spans }, top) {
    const right = this.px(this.timeline.total);
    picture.append(svgElement("text", { x: LABEL - 8, y: top + this.row / 2 + 4, "text-anchor": "end" }, `rank ${rank}`));
    picture.append(svgElement("rect", { class: "ground", x: LABEL, y: top, width: right - LABEL, height: this.row }));
    const paths = { computing: "", unknown: "", data: "", wait: "" };
    for (const [begin, end, data, wait] of spans) {
      let height = top + this.row;
      const computing = 1 - data - (wait ?? 0);
      for (const [name, share] of [[wait === null ? "unknown" : "computing", computing], ["data", data], ["wait", wait ?? 0]]) {
        const top = height - share * this.row;
        if (share > 0.004) paths[name] += `M${this.px(begin).toFixed(2)} ${height.toFixed(2)}H${this.px(end).toFixed(2)}V${top.toFixed(2)}H${this.px(begin).toFixed(2)}Z`;
        height = top;
      }
    }
    for (const [name, path] of Object.entries(paths)) {
      if (path) picture.append(svgElement("path", { class: `area ${name}`, d: path, "data-rank": rank, "shape-rendering": "crispEdges" }));
    }
  }

  showTooltip(x, y) {
    const number = Math.floor(y / (this.row + this.gap));
    const rank = this.timeline.ranks[number];
    const span = rank?.spans.find(([begin, end]) => this.px(begin) <= x && x < this.px(end));
    if (!span) return this.hideTooltip();
    const [begin, end, data, wait, step, doing] = span;
    const share = (value) => `${(100 * value).toFixed(0)} %`;
    const rows = [["data", "waiting for data", data]];
    if (wait === null) rows.unshift(["unknown", "computing or waiting for other ranks", 1 - data]);
    else rows.unshift(["computing", "computing", 1 - data - wait]);
    if (wait !== null) rows.push(["wait", "waiting for other ranks", wait]);
    this.tip.replaceChildren(
      htmlElement("p", "head", `rank ${rank.rank}, ${formatDuration(begin)} to ${formatDuration(end)}`),
      ...rows.map(([name, text, value]) => {
        const row = htmlElement("p");
        row.append(htmlElement("span", `swatch ${name}`), htmlElement("span", "", text), htmlElement("span", "", share(value)));
        return row;
      }),
      htmlElement("p", "head", `step ${step.toLocaleString("en")}${doing ? `, ${doing}` : ""}`),
    );
    const top = number * (this.row + this.gap);
    const attributes = { class: "cursor", x: this.px(begin), y: top, width: Math.max(this.px(end) - this.px(begin), 1), height: this.row, fill: "none" };
    this.highlight.replaceChildren(svgElement("rect", attributes));
    this.tip.style.top = `${top + this.row + 6}px`;
    positionTooltip(this.tip, x, this.plot.clientWidth);
  }

  hideTooltip() {
    this.tip.replaceChildren();
    this.highlight.replaceChildren();
  }
}
