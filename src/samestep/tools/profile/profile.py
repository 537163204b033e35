"""Profile of a recipe or a script: measured steps on all ranks, as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions
from samestep.loggers.trackers import tensorboard_command
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.profile.phases import PHASES, Measurements, Phase
from samestep.tools.timing import run_trial
from samestep.units import format_milliseconds

TRACES = "tensorboard"
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # silences torch's profiler
_NAMES: dict[Phase, str] = {
    "data": "waiting for data",
    "communication": "communication, exposed",
    "computing": "forward and backward",
    "other": "host, other",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps of a profile."""

    warmup: int  # unmeasured steps at the start
    active: int  # measured steps, without torch's profiler
    traced: int  # following steps with torch's profiler, after one that warms it up; 0 for none
    folder: Path  # folder of the results
    scratch: Path | None = None  # folder of the checkpoints of a script
    options: RunOptions

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.warmup + self.active + (1 + self.traced if self.traced else 0)


@dataclass(frozen=True)
class Script:
    """Script to profile."""

    path: Path
    arguments: tuple[str, ...]


def profile(
    subject: Recipe | Script,
    plan: Plan,
    processes: int,
    preload: tuple[str, ...],
    environment: Mapping[str, str],
) -> Measurements:
    """Train the steps of a plan on `processes` ranks, which write the traces of the traced steps.

    Raises:
        RankError: a rank failed.
        StoppedError: a stop was requested.
    """
    function = "profile_script" if isinstance(subject, Script) else "profile_recipe"
    with TemporaryDirectory(prefix=".checkpoints-", dir=plan.folder) as scratch:
        measured: Measurements = run_trial(
            "samestep.tools.profile.worker",
            function,
            subject,
            replace(plan, scratch=Path(scratch).resolve()),
            processes=processes,
            preload=preload,
            environment={**_ENVIRONMENT, **environment},
        )
    return measured


def profile_data(
    subject: Recipe | Script, plan: Plan, measured: Measurements, machine: dict[str, Any]
) -> dict[str, Any]:
    """Return the contents of `profile.json`; times per step, in seconds."""
    if isinstance(subject, Script):
        recipe: dict[str, Any] = {"script": str(subject.path), "arguments": list(subject.arguments)}
    else:
        recipe = recipe_data(subject)
    return {
        "recipe": recipe,
        "machine": machine,
        "processes": measured.size,
        "steps": {name: getattr(plan, name) for name in ("warmup", "active", "traced")},
        "step_seconds": measured.step_seconds,
        "ranks": [{"rank": rank, **phases} for rank, phases in enumerate(measured.phases)],
        "slowest": None if measured.slowest is None else asdict(measured.slowest),
        "tensorboard": str(plan.folder / TRACES) if plan.traced else None,
    }


def show(plan: Plan, measured: Measurements) -> None:
    """Print phases by rank, the slowest rank and output files."""
    Console().print(_table(measured))
    print()
    if measured.size > 1:
        print(f"{'slowest':<12}{_describe_slowest(measured)}")
    print(f"{'written':<12}{plan.folder / 'profile.json'}")
    if plan.traced:
        print(
            f"{'traces':<12}{plan.folder / TRACES}: open a file in https://ui.perfetto.dev, or start"
        )
        print(f"{'':<12}{tensorboard_command(plan.folder / TRACES)}")


def _table(measured: Measurements) -> Table:
    """Return a table with a row per phase and a column per rank."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step", no_wrap=True)
    for name in (*(f"rank {rank}" for rank in range(measured.size)), "share"):
        table.add_column(name, justify="right")

    def add_row(name: str, values: list[float]) -> None:
        share = sum(values) / measured.size / measured.step_seconds
        table.add_row(name, *map(format_milliseconds, values), f"{share:.0%}")

    for phase in PHASES:
        values = [phases[phase] for phases in measured.phases]
        if any(values):
            add_row(_NAMES.get(phase, phase), values)
    add_row("all", [sum(phases.values()) for phases in measured.phases])
    return table


def _describe_slowest(measured: Measurements) -> str:
    slowest = measured.slowest
    if not measured.is_known_inside:
        return "not known: forward and backward contain communication that is not measured"
    if slowest is None:
        return "no rank: all ranks are busy for about the same time"
    more = format_milliseconds(slowest.seconds)
    return f"rank {slowest.rank} is busy {more} longer per step than the others, mostly in {slowest.phase}"
