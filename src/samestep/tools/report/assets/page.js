"use strict";
// Page: creates charts and timelines, and redraws them after a change of the controls or of the width.

(() => {
  const { runs, charts, timelines } = JSON.parse(document.getElementById("data").textContent);
  const view = { axis: "step", smooth: 0, hidden: new Set(), changed: () => plots.forEach((plot) => plot.draw()) };
  const plots = [
    ...charts.map((chart) => new Chart(document.getElementById(`chart-${chart.key}`), chart, runs, view)),
    ...timelines.map((timeline) => new Timeline(document.getElementById(`timeline-${timeline.run}`), timeline)),
  ];

  const names = runs.map((run, number) => ({
    name: run.name, text: run.name, color: `c${number % COLORS}`, dash: dashOf(number),
  }));
  document.getElementById("runs-shown")?.replaceWith(legend(names, view));
  const controls = document.querySelector(".controls");
  controls?.addEventListener("input", (event) => {
    if (event.target.name === "axis") view.axis = event.target.value;
    else view.smooth = Number(event.target.value);
    view.changed();
  });
  if (controls) controls.hidden = false;

  const byElement = new Map(plots.map((plot) => [plot.plot, plot]));
  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (widths.get(target) === contentRect.width) continue;
      widths.set(target, contentRect.width);
      byElement.get(target).draw();
    }
  });
  for (const target of byElement.keys()) observer.observe(target);

  // Print with all details open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((details) => { details.open = false; }));
})();
