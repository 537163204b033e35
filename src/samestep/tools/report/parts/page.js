"use strict";
// Puts the page together: one view for all charts, drawn again when it or their width changes.

(() => {
  const { runs, charts, timelines } = JSON.parse(document.getElementById("data").textContent);
  const view = { axis: "step", smooth: 0, hidden: new Set(), changed: () => drawn.forEach((one) => one.draw()) };
  const drawn = [
    ...charts.map((chart) => new Chart(document.getElementById(`chart-${chart.key}`), chart, runs, view)),
    ...timelines.map((timeline) => new Timeline(document.getElementById(`timeline-${timeline.run}`), timeline)),
  ];

  const names = runs.map((run, number) => ({
    name: run.name, text: run.name, colour: `c${number % COLOURS}`, dash: dashes(number),
  }));
  document.getElementById("runs-shown")?.replaceWith(legend(names, view));
  const controls = document.querySelector(".controls");
  controls?.addEventListener("input", (event) => {
    if (event.target.name === "axis") view.axis = event.target.value;
    else view.smooth = Number(event.target.value);
    view.changed();
  });
  if (controls) controls.hidden = false;

  const byPlot = new Map(drawn.map((one) => [one.plot, one]));
  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (widths.get(target) === contentRect.width) continue;
      widths.set(target, contentRect.width);
      byPlot.get(target).draw();
    }
  });
  for (const plot of byPlot.keys()) observer.observe(plot);

  // On paper nothing can be opened.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
})();
