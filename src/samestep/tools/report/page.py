"""Report as one HTML page without scripts and other files, with charts as SVG; and as plain data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import differences
from samestep.tools.report.run import Run
from samestep.tools.templates import render

# Start of every report. Only a file with this start is overwritten.
MARK = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="samestep report">'
_TITLES = {
    "loss": "Training loss",
    "samples_per_second": "Samples per second",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
}
# Plot within a chart of 640 x 215 pixels.
_LEFT = 66.0
_RIGHT = 630.0
_TOP = 10.0
_BOTTOM = 190.0
_BUCKETS = 400  # of a longer curve, minimum and maximum of each are drawn
_MAX_NOTES = 100
Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class Series:
    """One curve of a chart; of its values, those that are not finite are only counted."""

    run: int  # number of the run, which selects the color
    name: str
    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Chart:
    """Curves on common axes."""

    title: str
    name: str  # of the values
    curves: list[Series]
    is_evaluation: bool = False


def report_page(runs: Sequence[Run]) -> str:
    """Return the page."""
    return render(
        "report.html",
        mark=MARK,
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=version("samestep"),
        runs=runs,
        facts=[summary(run) for run in runs],
        charts=[draw(chart) for chart in charts(runs)],
        differences=[differences(runs[0].recipe, run.recipe) for run in runs],
        max_notes=_MAX_NOTES,
        format_number=format_number,
    )


def summary(run: Run) -> dict[str, Any]:
    """Return the main numbers of a run as plain data."""
    evaluations = list(run.events.evaluations.values())
    best = [event for event in evaluations if event.get("is_best") is True]
    steps, speed = run.events.curves["samples_per_second"].points()
    losses = run.events.curves["loss"].points()[1].tolist()
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "steps": run.events.step,
        "resumed": len(run.events.resumed),
        "train_loss": losses[-1] if losses else None,
        "samples_per_second": float(numpy.median(speed)) if len(steps) else None,
        "best": {"step": best[-1]["step"], **run.evaluation_values(best[-1])} if best else None,
        "last": {"step": evaluations[-1]["step"], **run.evaluation_values(evaluations[-1])}
        if evaluations
        else None,
        "ranks": [
            {
                "rank": log.rank,
                "data_share": log.mean("data_share"),
                "wait_share": log.mean("wait_share"),
            }
            for log in run.ranks
        ],
        "notes": run.remarks,
    }


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts that have points: losses, metrics of evaluations, values of `World.log`, other curves."""
    by_metric: dict[str, list[Series]] = {}
    by_curve: dict[str, list[Series]] = {name: [] for name in _TITLES}
    for number, run in enumerate(runs):
        for name, curve in run.events.curves.items():
            by_curve.setdefault(name, []).append(Series(number, run.name, *curve.points()))
        points = [
            (step, run.evaluation_values(event))
            for step, event in sorted(run.events.evaluations.items())
        ]
        for name in dict.fromkeys(name for _, values in points for name in values):
            present = numpy.array(
                [(step, values[name]) for step, values in points if name in values]
            )
            by_metric.setdefault(name, []).append(Series(number, run.name, *present.T))
    results = [
        Chart(_TITLES.get(name, f"Logged: {name}"), name, curves)
        for name, curves in by_curve.items()
    ]
    evaluated = [
        Chart(f"Evaluation: {name}", name, curves, is_evaluation=True)
        for name, curves in by_metric.items()
    ]
    return [
        chart
        for chart in (results[0], *evaluated, *results[1:])
        if any(len(c.steps) for c in chart.curves)
    ]


def format_number(name: str, value: float, *, is_metric: bool = True) -> str:
    """Return a value; accuracies and similar metrics as percentages."""
    if is_metric and not name.endswith("loss"):
        return format_metric(name, value)
    return f"{value:.5g}"


def draw(chart: Chart) -> dict[str, Any]:
    """Return the lines, ticks and numbers of a chart for the template."""
    finite = [numpy.isfinite(curve.values) for curve in chart.curves]
    xs = numpy.concatenate([curve.steps for curve in chart.curves])
    ys = numpy.concatenate(
        [curve.values[mask] for curve, mask in zip(chart.curves, finite, strict=True)]
    )
    left = xs.min()
    right = max(xs.max(), xs.min() + 1)
    low, high = (ys.min(), ys.max()) if len(ys) else (0.0, 1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low - margin
    high = high + margin

    def pixels(steps: Floats, values: Floats) -> str:
        across = _LEFT + (_RIGHT - _LEFT) * (steps - left) / (right - left)
        down = _BOTTOM - (_BOTTOM - _TOP) * (values - low) / (high - low)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))

    lines = []
    rows = []
    for curve, mask in zip(chart.curves, finite, strict=True):
        steps = curve.steps[mask]
        values = curve.values[mask]
        lines += [(curve.run, kind, pixels(*points)) for kind, points in reduced(steps, values)]
        statistics = (values[-1], values.min(), values.max()) if len(values) else ()
        texts = [
            format_number(chart.name, float(value), is_metric=chart.is_evaluation)
            for value in statistics
        ]
        rows.append((curve.run, curve.name, texts, int((~mask).sum())))
    x_ticks = [
        (pixels(numpy.array([x]), numpy.array([low])).split(",")[0], f"{x:,.0f}")
        for x in ticks(left, right)
    ]
    y_ticks = [
        (pixels(numpy.array([left]), numpy.array([y])).split(",")[1], f"{y:.6g}")
        for y in ticks(low, high)
    ]
    return {
        "title": chart.title,
        "lines": lines,
        "rows": rows,
        "x_ticks": x_ticks,
        "y_ticks": y_ticks,
    }


def reduced(steps: Floats, values: Floats) -> list[tuple[str, tuple[Floats, Floats]]]:
    """Return a short curve as it is; of a long one, minimum and maximum of each bucket, and a line of means."""
    if len(steps) <= 2 * _BUCKETS:
        return [("line", (steps, values))]
    bounds = numpy.linspace(0, len(steps), _BUCKETS + 1).astype(int)
    buckets = [slice(begin, end) for begin, end in pairwise(bounds.tolist())]
    extremes = {
        bucket.start + int(find(values[bucket]))
        for bucket in buckets
        for find in (numpy.argmin, numpy.argmax)
    }
    chosen = sorted(extremes)
    middles = numpy.array([steps[bucket].mean() for bucket in buckets])
    means = numpy.array([values[bucket].mean() for bucket in buckets])
    return [("range", (steps[chosen], values[chosen])), ("line", (middles, means))]


def ticks(least: float, most: float) -> list[float]:
    """Return some round numbers in a range."""
    rough = (most - least) / 5
    power = 10.0 ** numpy.floor(numpy.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [
        float(number * step)
        for number in range(int(numpy.ceil(least / step)), int(most / step + 1e-9) + 1)
    ]
