"""Charts and timelines of a report, as data for the template and the scripts of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from samestep.loggers.logger import format_metric
from samestep.tools.report.curves import RunClock, Series
from samestep.tools.report.events import DATA_SHARE
from samestep.tools.report.run import RankLog, Run

# Title and kind of value of each curve over steps.
_STEP_CHARTS = {
    "loss": ("Training loss", "number"),
    "lr": ("Learning rate", "number"),
    "samples_per_second": ("Samples per second", "count"),
    DATA_SHARE: ("Share of each step spent waiting for data", "percent"),
    "grad_norm": ("Gradient norm", "number"),
}
_LOSS_LABELS = {"loss": "", "train_loss": "training, mean of the epoch"}
_MEMORY_CHARTS = {"memory": "Memory of each rank", "gpu_memory": "GPU memory of each rank"}
_MAX_RANKS = 64


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts that have points, losses first, for the template and the scripts of the page.

    `kind` is the format of the values: `number`, `count`, `percent` or `bytes`. With `is_noisy`, the page draws means
    over the points of a long curve. A curve has the index of its run, which selects the color if `rank` is None, and a
    label, possibly empty, which is added to the name of the run.
    """
    metrics = dict.fromkeys(name for run in runs for name in run.events.metrics if name not in _LOSS_LABELS)
    logged = dict.fromkeys(name for run in runs for name in run.events.logged)
    loss, *others = (_step_chart(runs, name) for name in _STEP_CHARTS)
    candidates = [
        loss,
        _evaluation_chart(runs, "evaluation-loss", "Loss at evaluations", "number", _LOSS_LABELS),
        *(_metric_chart(runs, name) for name in metrics),
        *(_logged_chart(runs, number, name) for number, name in enumerate(logged)),
        *others,
        *(_memory_chart(runs, number, name) for name in _MEMORY_CHARTS for number in range(len(runs))),
    ]
    return [
        chart
        for chart in candidates
        if any(curve["data"]["points"]["x"] or curve["data"]["nonfinite_count"] for curve in chart["curves"])
    ]


def _step_chart(runs: Sequence[Run], name: str) -> dict[str, Any]:
    title, kind = _STEP_CHARTS[name]
    curves = [_curve(number, run.events.curves[name].series(run.clock)) for number, run in enumerate(runs)]
    return _chart(name, title, kind, curves, is_noisy=name != "lr")


def _metric_chart(runs: Sequence[Run], name: str) -> dict[str, Any]:
    kind = "percent" if format_metric(name, 1.0).endswith("%") else "number"
    return _evaluation_chart(runs, f"evaluation-{name}", f"Evaluation: {name.replace('_', ' ')}", kind, {name: ""})


def _logged_chart(runs: Sequence[Run], number: int, name: str) -> dict[str, Any]:
    """Return the chart of a value of `World.log`."""
    curves = [
        _curve(index, run.events.logged[name].series(run.clock))
        for index, run in enumerate(runs)
        if name in run.events.logged
    ]
    return _chart(f"logged-{number}", f"Logged: {name}", "number", curves, is_noisy=True)


def _evaluation_chart(
    runs: Sequence[Run], key: str, title: str, kind: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    curves = [
        _curve(number, run.events.metrics[name].series(run.clock), label)
        for number, run in enumerate(runs)
        for name, label in labels.items()
        if name in run.events.metrics
    ]
    return _chart(key, title, kind, curves)


def _memory_chart(runs: Sequence[Run], number: int, name: str) -> dict[str, Any]:
    run, curves = runs[number], []
    for log in run.ranks[:_MAX_RANKS]:
        points = [(span.step, span.end, value) for span in log.spans if (value := getattr(span, name)) is not None]
        steps, times, values = numpy.array(points, numpy.float64).reshape(-1, 3).T
        series = Series(steps.astype(numpy.int64), run.clock(times), values)
        curves.append(_curve(number, series, f"rank {log.rank}", log.rank))
    title = _MEMORY_CHARTS[name] + (f": {run.name}" if len(runs) > 1 else "")
    return _chart(f"{name}-{number}", title, "bytes", curves)


def _chart(key: str, title: str, kind: str, curves: list[dict[str, Any]], *, is_noisy: bool = False) -> dict[str, Any]:
    return {"key": key, "title": title, "kind": kind, "curves": curves, "is_noisy": is_noisy}


def _curve(run: int, series: Series, label: str = "", rank: int | None = None) -> dict[str, Any]:
    return {"run": run, "label": label, "data": series.data(), "statistics": series.statistics(), "rank": rank}


def timelines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the activity of each rank of each run.

    A span has its begin and end in seconds, shares of time spent waiting for data and for other ranks, step, activity.
    """
    return [
        {
            "run": number,
            "total": round(run.clock.total, 3),
            "omitted": max(len(run.ranks) - _MAX_RANKS, 0),
            "ranks": [_timeline(log, run.clock) for log in run.ranks[:_MAX_RANKS]],
        }
        for number, run in enumerate(runs)
        if any(log.spans for log in run.ranks)
    ]


def _timeline(log: RankLog, clock: RunClock) -> dict[str, Any]:
    begins, ends = (clock(numpy.array([getattr(span, name) for span in log.spans])) for name in ("begin", "end"))
    spans = []
    for begin, end, span in zip(begins.tolist(), ends.tolist(), log.spans, strict=True):
        wait = None if span.wait is None else round(span.wait, 3)
        spans.append([round(begin, 2), round(end, 2), round(span.data, 3), wait, span.step, span.doing])
    return {"rank": log.rank, "spans": spans}
