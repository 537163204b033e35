"""`samestep report`: one HTML page without other files, with charts as SVG; and plain data."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

from samestep.distributed.disk_operations import read_small
from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import differences
from samestep.tools.run_log import Run, parse_count, parse_text, read_objects
from samestep.tools.templates import render

# Start of every report. Only a file with this start is overwritten.
MARK = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    '<meta name="generator" content="samestep report">'
)
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
_SPEEDS = 30  # windows of the curve of samples per second
_MAX_NOTES = 100
_MAX_SAMPLES = 16
_MAX_PICTURE = 1 << 23  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_EVALUATION = "evaluation"  # folder of a run for `samestep eval --report`
Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class Series:
    """One curve of a chart; of its values, those that are not finite are only counted."""

    run: int  # number of the run, which selects the color
    name: str
    steps: Floats  # ascending
    values: Floats
    is_dashed: bool = False  # of training, in a chart of validation

    @classmethod
    def of(
        cls, run: int, name: str, values: Mapping[int, float], *, is_dashed: bool = False
    ) -> Series:
        """Return the curve of values by step."""
        steps, heights = numpy.array(sorted(values.items())).reshape(-1, 2).T
        return cls(run, name, steps, heights, is_dashed)


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
        samples=[(run.name, drawn) for run in runs if (drawn := predictions(run))],
        differences=[differences(runs[0].recipe, run.recipe) for run in runs],
        max_notes=_MAX_NOTES,
        format_number=format_number,
    )


def summary(run: Run) -> dict[str, Any]:
    """Return the main numbers of a run as plain data."""
    evaluations = list(run.events.evaluations.values())
    best = [event for event in evaluations if event.get("is_best") is True]
    speeds = list(run.events.curves["samples_per_second"].values())
    losses = sorted(run.events.curves["loss"].items())
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "steps": run.events.step,
        "resumed": len(run.events.resumed),
        "train_loss": losses[-1][1] if losses else None,
        # The median: a few slow steps, such as the first one, do not count.
        "samples_per_second": float(numpy.median(speeds)) if speeds else None,
        "best": _last_evaluation(run, best),
        "last": _last_evaluation(run, evaluations),
    }


def _last_evaluation(run: Run, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not events:
        return None
    return {"step": events[-1]["step"], **run.evaluation_values(events[-1])}


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts with points: losses, metrics of evaluations, then other values."""
    by_metric: dict[str, list[Series]] = {}
    parts = {False: "", True: ", training"}
    # In the order of `_TITLES`: the first chart is that of the loss.
    by_curve: dict[str, list[Series]] = {name: [] for name in _TITLES}
    for number, run in enumerate(runs):
        curves = {**run.events.curves}
        curves["samples_per_second"] = speeds(curves["samples_per_second"])
        for name, curve in curves.items():
            by_curve.setdefault(name, []).append(Series.of(number, run.name, curve))
        for of_training, part in parts.items():
            metrics: dict[str, dict[int, float]] = {}
            for step, event in run.events.evaluations.items():
                values = run.evaluation_values(event, of_training=of_training)
                for name, value in values.items():
                    metrics.setdefault(name, {})[step] = value
            for name, metric in metrics.items():
                series = Series.of(number, run.name + part, metric, is_dashed=of_training)
                by_metric.setdefault(name, []).append(series)
    titles = {name: _TITLES.get(name, f"Logged: {name}") for name in by_curve}
    first, *others = (Chart(titles[name], name, curves) for name, curves in by_curve.items())
    evaluated = [
        Chart(f"Validation {name}", name, curves, is_evaluation=True)
        for name, curves in by_metric.items()
    ]
    drawn = [first, *evaluated, *others]
    return [chart for chart in drawn if any(len(curve.steps) for curve in chart.curves)]


def speeds(values: Mapping[int, float]) -> dict[int, float]:
    """Return samples per second of windows of steps: their samples divided by their time.

    The steps have equally many samples, so this is the harmonic mean of their speeds.
    """
    steps = sorted(step for step, value in values.items() if 0 < value < float("inf"))
    size = max(1, -(-len(steps) // _SPEEDS))
    windows = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    return {
        window[-1]: len(window) / sum(1 / values[step] for step in window) for window in windows
    }


def predictions(run: Run) -> list[dict[str, str]]:
    """Return samples of `samestep eval --report` in the run: texts, or PNGs in base64."""
    folder = run.folder / _EVALUATION
    samples = []
    with suppress(OSError, ValueError):  # without such a folder, or damaged
        for entry in read_objects(folder / "samples.json")[:_MAX_SAMPLES]:
            texts = {key: parse_text(entry.get(key)) for key in ("class", "prediction", "text")}
            if texts["text"]:
                samples.append(texts)
                continue
            path = folder / "overlays" / f"sample-{parse_count(entry.get('sample')) or 0:06}.png"
            picture = read_small(path, _MAX_PICTURE)
            if picture.startswith(_PNG):
                samples.append({"picture": b64encode(picture).decode(), **texts})
    return samples


def format_number(name: str, value: float, *, is_metric: bool = True) -> str:
    """Return a value; accuracies and similar metrics as percentages."""
    if is_metric and not name.endswith("loss"):
        return format_metric(name, value)
    return f"{value:.5g}"


def draw(chart: Chart) -> dict[str, Any]:
    """Return the lines, ticks and numbers of a chart for the template."""
    xs = numpy.concatenate([curve.steps for curve in chart.curves])
    ys = numpy.concatenate([curve.values for curve in chart.curves])
    ys = ys[numpy.isfinite(ys)]
    left = xs.min()
    # A single step has no width.
    right = max(xs.max(), xs.min() + 1)
    low, high = (ys.min(), ys.max()) if len(ys) else (0.0, 1.0)
    # A constant curve has a height of zero, by which `down` would divide.
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low - margin
    high = high + margin

    def across(steps: Floats) -> Any:
        return _LEFT + (_RIGHT - _LEFT) * (steps - left) / (right - left)

    def down(values: Floats) -> Any:
        return _BOTTOM - (_BOTTOM - _TOP) * (values - low) / (high - low)

    lines = []
    rows = []
    for curve in chart.curves:
        mask = numpy.isfinite(curve.values)
        values = curve.values[mask]
        for kind, (steps, heights) in reduced(curve.steps[mask], values):
            points = zip(across(steps), down(heights), strict=True)
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            if len(steps) == 1:  # a dot
                text = f"{text} {text}"
            style = f"{kind} dashed" if curve.is_dashed else kind
            lines.append((curve.run, style, text))
        statistics = (values[-1], values.min(), values.max()) if len(values) else ()
        is_metric = chart.is_evaluation
        texts = [format_number(chart.name, float(one), is_metric=is_metric) for one in statistics]
        rows.append((curve.run, curve.name, texts, int((~mask).sum())))
    has_training = any(curve.is_dashed for curve in chart.curves)
    x_ticks = numpy.array(ticks(left, right))
    y_ticks = numpy.array(ticks(low, high))
    return {
        "title": f"{chart.title} (dashed: training)" if has_training else chart.title,
        "lines": lines,
        "rows": rows,
        "x_ticks": [
            (f"{at:.1f}", f"{x:,.0f}") for at, x in zip(across(x_ticks), x_ticks, strict=True)
        ],
        "y_ticks": [
            (f"{at:.1f}", f"{y:.6g}") for at, y in zip(down(y_ticks), y_ticks, strict=True)
        ],
    }


def reduced(steps: Floats, values: Floats) -> list[tuple[str, tuple[Floats, Floats]]]:
    """Return a short curve as it is; of a long one, extremes of each bucket, and its means."""
    if len(steps) <= 2 * _BUCKETS:
        return [("line", (steps, values))]
    bounds = numpy.linspace(0, len(steps), _BUCKETS + 1).astype(int)
    buckets = [slice(begin, end) for begin, end in pairwise(bounds.tolist())]
    extremes = set()
    for bucket in buckets:
        extremes.add(bucket.start + int(numpy.argmin(values[bucket])))
        extremes.add(bucket.start + int(numpy.argmax(values[bucket])))
    chosen = sorted(extremes)
    middles = numpy.array([steps[bucket].mean() for bucket in buckets])
    means = numpy.array([values[bucket].mean() for bucket in buckets])
    return [("range", (steps[chosen], values[chosen])), ("line", (middles, means))]


def ticks(least: float, most: float) -> list[float]:
    """Return some round numbers in a range."""
    rough = (most - least) / 5
    power = 10.0 ** numpy.floor(numpy.log10(rough))
    # 0.999: rounding must not select the next factor.
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = int(numpy.ceil(least / step))
    # 1e-9: rounding must not drop the last tick.
    last = int(numpy.floor(most / step + 1e-9))
    return [float(number * step) for number in range(first, last + 1)]
