"""Report as an HTML page without external files, and as plain data."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from math import nan
from typing import Any

from samestep import units
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import flatten
from samestep.tools.report.charts import charts, timelines
from samestep.tools.report.events import DATA_SHARE
from samestep.tools.report.results import ClassReport
from samestep.tools.report.run import Run

# Start of every report. Only a file with this start is overwritten.
MARK = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="samestep report">'
_MAX_NOTES = 40


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
