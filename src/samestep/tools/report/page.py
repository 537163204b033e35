"""Report as an HTML page without external files, with charts and timelines, and as plain data."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from math import nan
from typing import Any

import numpy

from samestep import units
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import flatten
from samestep.tools.report.curves import RunClock, Series
from samestep.tools.report.events import DATA_SHARE
from samestep.tools.report.results import ClassReport
from samestep.tools.report.run import RankLog, Run

# Start of every report. Only a file with this start is overwritten.
MARK = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="samestep report">'
_MAX_NOTES = 40
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


@dataclass(frozen=True)
class Report:
    """Content of a page: runs, reports and certificates with the index of their run if any, and unreadable input."""

    runs: list[Run]
    evaluations: list[tuple[int | None, ClassReport]]
    certificates: list[tuple[int | None, dict[str, Any]]]
    remarks: list[str]


def render(report: Report) -> str:
    """Return the page."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_asset), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": units.format_bytes,
        "percent": units.format_percent,
        "count": units.format_count,
        "time": units.format_time,
        "value": units.format_value,
    }
    runs, chart_list, timeline_list = report.runs, charts(report.runs), timelines(report.runs)
    *first, last = [run.name for run in runs]
    return environment.get_template("page.html.jinja").render(
        mark=MARK,
        style=_asset("page.css"),
        scripts=[_asset(name) for name in ("scales.js", "charts.js", "timelines.js", "page.js")],
        title=f"{', '.join(first)} and {last}" if first else last,
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=version("samestep"),
        report=report,
        runs=runs,
        cards=[_facts(run) for run in runs],
        charts=chart_list,
        timelines=timeline_list,
        data={"runs": [_page_data(run) for run in runs], "charts": chart_list, "timelines": timeline_list},
        starts=_start_table(runs),
        differences=recipe_differences([run.recipe for run in runs]),
        notes=[(run, run.events.notes[-_MAX_NOTES:]) for run in runs if run.events.notes],
    )


def summary(report: Report) -> dict[str, Any]:
    """Return `runs`, `differences` of their recipes, `certificates` and `notes` as plain data."""
    return {
        "runs": [_run_summary(run) for run in report.runs],
        "differences": recipe_differences([run.recipe for run in report.runs]),
        "certificates": [
            {key: certificate[key] for key in ("path", "holds", "summary")} for _, certificate in report.certificates
        ],
        "notes": [*report.remarks, *(f"{run.name}: {remark}" for run in report.runs for remark in run.remarks)],
    }


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Return the values, one per recipe, of each dotted key that differs; None if a recipe does not have the key."""
    leaves = [
        {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in flatten(recipe)}
        for recipe in recipes
    ]
    keys = dict.fromkeys(key for recipe in leaves for key in recipe)
    values = {key: [recipe.get(key) for recipe in leaves] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def _run_summary(run: Run) -> dict[str, Any]:
    best, last = run.best, run.last
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "steps": run.events.step,
        "seconds": round(run.clock.total, 3),
        "resumed": len(run.events.resumed),
        "train_loss": run.statistic("loss", "last"),
        "deciding": run.deciding,
        "best": {"step": best["step"], **run.evaluation_values(best)} if best else None,
        "last": {"step": last["step"], **run.evaluation_values(last)} if last else None,
        "samples_per_second": run.statistic("samples_per_second", "median"),
        "data_share": run.statistic(DATA_SHARE, "mean"),
        "ranks": [
            {
                "rank": log.rank,
                "data_share": log.mean("data"),
                "wait_share": log.mean("wait"),
                "memory_bytes": log.largest("memory"),
            }
            for log in run.ranks
        ],
        "checkpoints": [
            {"step": saved.step, "bytes": saved.size, "names": list(saved.names)} for saved in run.checkpoints
        ],
    }


def _facts(run: Run) -> list[tuple[str, str, str]]:
    """Return label, value and detail of each fact on the card of a run."""
    events, start = run.events, run.starts[-1] if run.starts else {}
    epochs, steps_in_epoch = run.recipe.get("epochs"), events.steps_in_epoch
    progress = f"{events.step / steps_in_epoch:.3g} of {epochs} epochs" if steps_in_epoch and epochs else ""
    facts = []
    kind, shown = ("last", run.last) if run.best is None else ("best", run.best)
    values, last = run.evaluation_values(shown), run.evaluation_values(run.last)
    if run.deciding in values and shown:
        value, last_value = (format_metric(run.deciding, each.get(run.deciding, nan)) for each in (values, last))
        detail = "" if last_value == value else f"; last {last_value}"
        facts.append((f"{kind} {run.deciding.replace('_', ' ')}", value, f"at step {shown['step']:,}{detail}"))
    if "loss" in last and run.deciding != "loss":
        facts.append(("evaluation loss", format_metric("loss", last["loss"]), "last"))
    facts.append(("steps", f"{events.step:,}", progress))
    resumed = {0: "", 1: "resumed once"}.get(len(events.resumed), f"resumed {len(events.resumed)} times")
    facts.append(("time", units.format_duration(run.clock.total), resumed))
    speed, data_share = run.statistic("samples_per_second", "median"), run.statistic(DATA_SHARE, "mean")
    if speed is not None:
        facts.append(("samples/s", units.format_count(speed), "median of steps"))
    if data_share is not None:
        facts.append(("waiting for data", units.format_percent(data_share), "mean of steps"))
    if start.get("processes") is not None:
        detail = ", ".join(str(start[key]) for key in ("strategy", "device") if start.get(key))
        facts.append(("processes", str(start["processes"]), detail))
    if run.checkpoints:
        size = sum(saved.size for saved in run.checkpoints)
        facts.append(("checkpoints", units.format_bytes(size), f"{len(run.checkpoints)} on disk"))
    if events.skipped_steps:
        facts.append(("skipped steps", f"{len(events.skipped_steps):,}", "a value was not finite"))
    return facts


def _start_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return `columns` and `rows` of the starts of all runs, without empty columns."""
    starts = [(run.name, start) for run in runs for start in run.starts]
    keys = dict.fromkeys(key for _, start in starts for key in start)
    columns = [key for key in keys if any(start.get(key) not in (None, "") for _, start in starts)]
    rows = [[name, *("–" if start.get(key) is None else str(start[key]) for key in columns)] for name, start in starts]
    return {"columns": ["run", *(key.replace("_", " ") for key in columns)], "rows": rows}


def _page_data(run: Run) -> dict[str, Any]:
    """Return name, and step and time of each resume, for the scripts of the page."""
    resumed = [[step, round(run.clock.at(after), 3)] for _, after, step in run.events.resumed]
    return {"name": run.name, "resumed": resumed}


def _asset(name: str) -> str:
    return files("samestep.tools.report").joinpath("assets", name).read_text(encoding="utf-8")


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
