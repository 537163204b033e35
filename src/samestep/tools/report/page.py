"""The page: what runs tell, as one file of HTML that needs no other file and no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from math import nan
from typing import Any

from samestep.record.values import shown
from samestep.tools.report import quantities
from samestep.tools.report.certificates import Certificate
from samestep.tools.report.charts import charts, timelines
from samestep.tools.report.pictures import ClassReport
from samestep.tools.report.recipe_keys import differing
from samestep.tools.report.run import Run

# What a file begins with that a report may take the place of.
MARK = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="samestep report">'
_NOTES = 40


@dataclass(frozen=True)
class Report:
    """What is on a page.

    Attributes:
        evaluations: class reports, each with the number of its run; None where it is of none.
        certificates: likewise.
        remarks: what could not be read, in sentences.
    """

    runs: list[Run]
    evaluations: list[tuple[int | None, ClassReport]]
    certificates: list[tuple[int | None, Certificate]]
    remarks: list[str]


def render(report: Report) -> str:
    """The page."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_file), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": quantities.in_bytes,
        "percent": quantities.in_percent,
        "count": quantities.count,
        "duration": quantities.in_time,
        "moment": quantities.moment,
        "value": quantities.of_kind,
    }
    drawn, times = charts(report.runs), timelines(report.runs)
    return environment.get_template("page.html.jinja").render(
        mark=MARK,
        style=_file("page.css"),
        scripts=[_file(name) for name in ("scales.js", "charts.js", "timelines.js", "page.js")],
        title=_listed([run.name for run in report.runs]),
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=version("samestep"),
        report=report,
        runs=report.runs,
        cards=[card(run) for run in report.runs],
        charts=drawn,
        timelines=times,
        data={"runs": [_drawn(run) for run in report.runs], "charts": [asdict(c) for c in drawn], "timelines": times},
        starts=start_table(report.runs),
        differences=differing([run.recipe for run in report.runs]),
        notes=[(run, run.events.notes[-_NOTES:]) for run in report.runs if run.events.notes],
    )


def card(run: Run) -> list[tuple[str, str, str]]:
    """The facts that come first: what it is, its value, and what to know besides."""
    events, start = run.events, run.starts[-1] if run.starts else {}
    epochs = run.recipe.get("epochs")
    per_epoch = events.steps_in_epoch
    done = f"{events.step / per_epoch:.3g} of {epochs} epochs" if per_epoch and epochs else ""
    facts = []
    best, last = run.evaluated(run.best), run.evaluated(run.last)
    if run.deciding in best and run.best:
        value, at_last = (shown(run.deciding, found.get(run.deciding, nan)) for found in (best, last))
        more = "" if at_last == value else f"; last {at_last}"
        facts.append((f"best {run.deciding.replace('_', ' ')}", value, f"at step {run.best['step']:,}{more}"))
    if "loss" in last and run.deciding != "loss":
        facts.append(("evaluation loss", shown("loss", last["loss"]), "last"))
    facts.append(("steps", f"{events.step:,}", done))
    facts.append(("time", quantities.in_time(run.clock.total), _resumed(len(events.resumed))))
    speed, waited = run.typical("samples_per_second"), run.data_share()
    if speed is not None:
        facts.append(("samples/s", quantities.count(speed), "median of steps"))
    if waited is not None:
        facts.append(("waiting for data", quantities.in_percent(waited), "mean of steps"))
    if start.get("processes") is not None:
        where = ", ".join(str(start[key]) for key in ("strategy", "device") if start.get(key))
        facts.append(("processes", str(start["processes"]), where))
    if run.checkpoints:
        size, number = sum(saved.size for saved in run.checkpoints), len(run.checkpoints)
        facts.append(("checkpoints", quantities.in_bytes(size), f"{number} on the disk"))
    if events.skipped_steps:
        facts.append(("skipped steps", f"{len(events.skipped_steps):,}", "a value was not finite"))
    return facts


def start_table(runs: Sequence[Run]) -> dict[str, Any]:
    """`columns` and `rows` of every start of every run; columns in which nothing stands are left out."""
    starts = [(run.name, start) for run in runs for start in run.starts]
    keys = dict.fromkeys(key for _, start in starts for key in start)
    columns = [key for key in keys if any(start.get(key) not in (None, "") for _, start in starts)]
    rows = [[name, *("–" if start.get(key) is None else str(start[key]) for key in columns)] for name, start in starts]
    return {"columns": ["run", *(key.replace("_", " ") for key in columns)], "rows": rows}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _resumed(times: int) -> str:
    return {0: "", 1: "resumed once"}.get(times, f"resumed {times} times")


def _drawn(run: Run) -> dict[str, Any]:
    """What the page's program has to know of a run: its name, and the steps and times at which it was resumed."""
    marks = [[step, round(run.clock.at(goes_on), 3)] for _, goes_on, step in run.events.resumed]
    return {"name": run.name, "marks": marks}


def _file(name: str) -> str:
    return files("samestep.tools.report").joinpath("parts", name).read_text(encoding="utf-8")
