"use strict";
// What each rank did over time: a row a rank, its height shared by computing and waiting.

const LABEL = 62;

class Timeline {
  constructor(plot, timeline) {
    Object.assign(this, { plot, timeline });
    const count = timeline.ranks.length;
    this.row = count <= 8 ? 26 : count <= 32 ? 16 : 11;
    this.gap = count <= 32 ? 5 : 2;
    this.tip = element("div", "tip");
    this.tip.setAttribute("role", "status");
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const { ranks, total } = this.timeline;
    const bottom = ranks.length * (this.row + this.gap);
    this.px = (seconds) => LABEL + (width - LABEL - 14) * seconds / (total || 1);
    const picture = shape("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, role: "img" });
    picture.setAttribute("aria-label", "What each rank did over time; the table below has each rank's shares.");
    ranks.forEach((rank, number) => this.drawRank(picture, rank, number * (this.row + this.gap)));
    for (const [tick, text] of ticksAlong("time", 0, total, Math.max(3, Math.floor((width - LABEL) / 80)))) {
      const x = this.px(tick);
      picture.append(shape("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const anchor = x > width - 34 ? "end" : "middle";
      picture.append(shape("text", { x: anchor === "end" ? Math.min(x + 8, width) : x, y: bottom + 18, "text-anchor": anchor }, text));
    }
    this.reading = picture.appendChild(shape("g", {}));
    this.plot.replaceChildren(picture, this.tip);
    picture.addEventListener("pointermove", (event) => {
      const at = picture.getBoundingClientRect();
      this.read(event.clientX - at.left, event.clientY - at.top);
    });
    picture.addEventListener("pointerleave", () => this.leave());
  }

  drawRank(picture, { rank, spans }, top) {
    const ends = this.px(this.timeline.total);
    picture.append(shape("text", { x: LABEL - 8, y: top + this.row / 2 + 4, "text-anchor": "end" }, `rank ${rank}`));
    picture.append(shape("rect", { class: "ground", x: LABEL, y: top, width: ends - LABEL, height: this.row }));
    const paths = { computing: "", untold: "", data: "", others: "" };
    for (const [begin, end, data, others] of spans) {
      let height = top + this.row;
      const works = 1 - data - (others ?? 0);
      for (const [name, share] of [[others === null ? "untold" : "computing", works], ["data", data], ["others", others ?? 0]]) {
        const above = height - share * this.row;
        if (share > 0.004) paths[name] += `M${this.px(begin).toFixed(2)} ${height.toFixed(2)}H${this.px(end).toFixed(2)}V${above.toFixed(2)}H${this.px(begin).toFixed(2)}Z`;
        height = above;
      }
    }
    for (const [name, path] of Object.entries(paths)) {
      if (path) picture.append(shape("path", { class: `area ${name}`, d: path, "data-rank": rank, "shape-rendering": "crispEdges" }));
    }
  }

  read(x, y) {
    const number = Math.floor(y / (this.row + this.gap));
    const rank = this.timeline.ranks[number];
    const span = rank?.spans.find(([begin, end]) => this.px(begin) <= x && x < this.px(end));
    if (!span) return this.leave();
    const [begin, end, data, others, step, doing] = span;
    const share = (value) => `${(100 * value).toFixed(0)} %`;
    const rows = [["computing", others === null ? "computing, or waiting for others" : "computing", 1 - data - (others ?? 0)]];
    if (others === null) rows[0][0] = "untold";
    rows.push(["data", "waiting for data", data]);
    if (others !== null) rows.push(["others", "waiting for other ranks", others]);
    this.tip.replaceChildren(
      element("p", "head", `rank ${rank.rank}, ${inTime(begin)} to ${inTime(end)}`),
      ...rows.map(([name, text, value]) => {
        const row = element("p");
        row.append(element("span", `swatch ${name}`), element("span", "", text), element("span", "", share(value)));
        return row;
      }),
      element("p", "head", `step ${step.toLocaleString("en")}${doing ? `, ${doing}` : ""}`),
    );
    const top = number * (this.row + this.gap);
    const attributes = { class: "cursor", x: this.px(begin), y: top, width: Math.max(this.px(end) - this.px(begin), 1), height: this.row, fill: "none" };
    this.reading.replaceChildren(shape("rect", attributes));
    this.tip.style.top = `${top + this.row + 6}px`;
    placeTip(this.tip, x, this.plot.clientWidth);
  }

  leave() {
    this.tip.replaceChildren();
    this.reading.replaceChildren();
  }
}
