"""The curves of several runs on shared axes, as data that a page draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from samestep.record.values import shown
from samestep.tools.report.clock import Clock
from samestep.tools.report.event_log import DATA_SHARE
from samestep.tools.report.ranks import RankLog, Span
from samestep.tools.report.run import Run
from samestep.tools.report.series import Points, Series

# Keys of steps, what a chart of them is called, and how its values are written.
_OF_STEPS = {
    "loss": ("Training loss", "number"),
    "lr": ("Learning rate", "number"),
    "samples_per_second": ("Samples a second", "count"),
    DATA_SHARE: ("Share of a step spent waiting for data", "percent"),
    "grad_norm": ("Gradient norm", "number"),
}
_LOSSES = {"loss": "", "train_loss": "training, mean of the epoch"}
_OF_MEMORY = {"memory": "Memory of each rank's process", "gpu_memory": "GPU memory of each rank"}
_MOST_RANKS = 64


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        run: the number of its run, which gives it its colour; where `rank` is there, that does.
        label: what it is besides; empty where the run's name says all.
        drawn: as `Series.data` gives it.
        extremes: `least`, `largest`, `mean`, `median` and `last`; None where nothing is finite.
    """

    run: int
    label: str
    drawn: dict[str, Any]
    extremes: dict[str, float] | None
    rank: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves on shared axes.

    Attributes:
        kind: how values are written: `number`, `count`, `percent` or `bytes`.
        jumps: its values jump from step to step, so that means say more.
    """

    key: str
    title: str
    kind: str
    jumps: bool = False
    curves: list[Curve] = field(default_factory=list)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """All that there is something to draw of: losses first."""
    by_step = {name: _of_steps(runs, name) for name in _OF_STEPS}
    metrics = list(dict.fromkeys(name for run in runs for name in run.events.metrics if name not in _LOSSES))
    found = [
        by_step.pop("loss"),
        _of_losses(runs),
        *(_of_metric(runs, name) for name in metrics),
        *by_step.values(),
        *(_of_memory(runs, number, name) for name in _OF_MEMORY for number in range(len(runs))),
    ]
    return [chart for chart in found if any(curve.drawn["points"]["x"] or curve.drawn["bad"] for curve in chart.curves)]


def _of_steps(runs: Sequence[Run], name: str) -> Chart:
    title, kind = _OF_STEPS[name]
    series = [(number, run.events.curves[name].series(run.clock)) for number, run in enumerate(runs)]
    return Chart(name, title, kind, name != "lr", [_curve(number, found) for number, found in series])


def _of_losses(runs: Sequence[Run]) -> Chart:
    chart = Chart("evaluation-loss", "Loss at evaluations", "number")
    for number, run in enumerate(runs):
        for name, label in _LOSSES.items():
            if name in run.events.metrics:
                chart.curves.append(_curve(number, run.events.metrics[name].series(run.clock), label))
    return chart


def _of_metric(runs: Sequence[Run], name: str) -> Chart:
    is_share = shown(name, 1.0).endswith("%")
    chart = Chart(f"evaluation-{name}", f"Evaluation: {name.replace('_', ' ')}", "percent" if is_share else "number")
    for number, run in enumerate(runs):
        if name in run.events.metrics:
            chart.curves.append(_curve(number, run.events.metrics[name].series(run.clock)))
    return chart


def _of_memory(runs: Sequence[Run], number: int, name: str) -> Chart:
    run = runs[number]
    title = _OF_MEMORY[name] + (f": {run.name}" if len(runs) > 1 else "")
    chart = Chart(f"{name}-{number}", title, "bytes")
    for log in run.ranks[:_MOST_RANKS]:
        points = Points()
        for place, span in enumerate(log.spans):
            value = getattr(span, name)
            if value is not None:
                # Spans take the place of steps here: of those, several lines may have the same.
                points.add(place, span.end, value)
        series = points.series(run.clock)
        chart.curves.append(_curve(number, _at_steps(series, log.spans), f"rank {log.rank}", log.rank))
    return chart


def _at_steps(series: Series, spans: Sequence[Span]) -> Series:
    steps = numpy.array([spans[place].step for place in series.steps.tolist()], numpy.int64)
    return Series(steps, series.seconds, series.values)


def _curve(run: int, series: Series, label: str = "", rank: int | None = None) -> Curve:
    return Curve(run, label, series.data(), series.extremes(), rank)


def timelines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What each rank of each run did: `begin`, `end`, shares of data and others, step and words of each span."""
    return [
        {
            "run": number,
            "total": round(run.clock.total, 3),
            "left_out": max(len(run.ranks) - _MOST_RANKS, 0),
            "ranks": [_timeline(log, run.clock) for log in run.ranks[:_MOST_RANKS]],
        }
        for number, run in enumerate(runs)
        if any(log.spans for log in run.ranks)
    ]


def _timeline(log: RankLog, clock: Clock) -> dict[str, Any]:
    begins, ends = (clock(numpy.array([getattr(span, name) for span in log.spans])) for name in ("begin", "end"))
    spans = [
        [
            round(begin, 2),
            round(end, 2),
            round(span.data, 3),
            None if span.others is None else round(span.others, 3),
            span.step,
            span.doing,
        ]
        for begin, end, span in zip(begins.tolist(), ends.tolist(), log.spans, strict=True)
    ]
    return {"rank": log.rank, "spans": spans}
