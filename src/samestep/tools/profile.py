"""`samestep profile`: phases of measured steps, the slowest of all ranks, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from rich.table import Table

from samestep.config import Recipe, RunOptions
from samestep.distributed.logging import plain_console
from samestep.loggers.trackers import tensorboard_command
from samestep.number_text import format_milliseconds
from samestep.recipes.recipe_files import recipe_data
from samestep.report_text import printable
from samestep.tools.launch import run_on_ranks

TRACES = "tensorboard"
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # silences torch's profiler
Phase = Literal["data", "forward", "backward", "communication", "optimizer", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_NAMES: dict[Phase, str] = {
    "data": "waiting for data",
    "communication": "communication, exposed",
    "other": "host, other",
}
_LEAST_SHARE = 0.1  # of a step, by which the slowest rank is slower than the others

PhaseSeconds = dict[Phase, float]
Interval = tuple[float, float]


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
        return self.warmup + self.active + self.traced + (self.traced > 0)


@dataclass(frozen=True)
class Script:
    """Script to profile."""

    path: Path
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class SlowestRank:
    """Rank that the others wait for."""

    rank: int
    seconds: float  # by which the rank is busy for longer than the others, per step
    phase: Phase  # phase with the largest difference to the others


@dataclass(frozen=True)
class Measurements:
    """Measured steps of all ranks."""

    phases: list[PhaseSeconds]  # mean seconds of each phase in a step, by rank
    is_known_inside: bool  # communication within forward and backward is measured

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.phases)

    @cached_property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return mean(sum(phases.values()) for phases in self.phases)

    @cached_property
    def slowest(self) -> SlowestRank | None:
        """The rank that the others wait for; None if no rank stands out.

        All ranks end a step at the same time, so the slowest rank is the one that is busy for
        longest between the waits of communication. Ranks that are slow in turn are equally busy on
        average.
        """
        if self.size == 1 or not self.is_known_inside:
            return None
        busy = [sum(phases.values()) - phases["communication"] for phases in self.phases]
        rank = busy.index(max(busy))
        others = [phases for other, phases in enumerate(self.phases) if other != rank]
        more: PhaseSeconds = {
            phase: seconds - mean(phases[phase] for phases in others)
            for phase, seconds in self.phases[rank].items()
            if phase != "communication"
        }
        seconds = sum(more.values())
        if seconds < _LEAST_SHARE * self.step_seconds:
            return None
        return SlowestRank(rank, seconds, phase=max(more, key=lambda phase: more[phase]))


# --- phases of a step ---------------------------------------------------------------------------


def phase_seconds(
    marks: Sequence[tuple[Phase, float]], collectives: Sequence[Interval]
) -> PhaseSeconds:
    """Return the seconds of phases of a step; exposed communication is only communication.

    Args:
        marks: begins of the phases of the training thread; the last one is the end of the step.
        collectives: times in which this thread waits.
    """
    exposed = _union(collectives)
    result: PhaseSeconds = dict.fromkeys(PHASES, 0.0)
    for (phase, begin), (_, end) in pairwise(marks):
        waits = (min(end, stop) - max(begin, start) for start, stop in exposed)
        result[phase] += end - begin - sum(max(0.0, wait) for wait in waits)
    result["communication"] = sum(stop - start for start, stop in exposed)
    return result


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    result: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


# --- command ------------------------------------------------------------------------------------


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
        measured: Measurements = run_on_ranks(
            "samestep.tools.profile_worker",
            function,
            subject,
            # Absolute: the script can change its working directory.
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
        "steps": {"warmup": plan.warmup, "active": plan.active, "traced": plan.traced},
        "step_seconds": measured.step_seconds,
        "ranks": [{"rank": rank, **phases} for rank, phases in enumerate(measured.phases)],
        "slowest": None if measured.slowest is None else asdict(measured.slowest),
        "tensorboard": str(plan.folder / TRACES) if plan.traced else None,
    }


def show(plan: Plan, measured: Measurements) -> None:
    """Print phases by rank, the slowest rank and output files."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step", no_wrap=True)
    for name in (*(f"rank {rank}" for rank in range(measured.size)), "share"):
        table.add_column(name, justify="right")
    rows = {_NAMES.get(one, one): [phases[one] for phases in measured.phases] for one in PHASES}
    rows = {name: values for name, values in rows.items() if any(values)}
    rows["all"] = [sum(phases.values()) for phases in measured.phases]
    for name, values in rows.items():
        share = sum(values) / measured.size / measured.step_seconds
        table.add_row(name, *map(format_milliseconds, values), f"{share:.0%}")
    plain_console().print(table)
    print()
    if measured.size > 1:
        print(f"{'slowest':<12}{_describe_slowest(measured)}")
    print(printable(f"{'written':<12}{plan.folder / 'profile.json'}"))
    if plan.traced:
        folder = plan.folder / TRACES
        print(f"{'traces':<12}{folder}: open a file in https://ui.perfetto.dev, or start")
        print(f"{'':<12}{tensorboard_command(folder)}")


def _describe_slowest(measured: Measurements) -> str:
    slowest = measured.slowest
    if not measured.is_known_inside:
        return "not known: forward and backward contain communication that is not measured"
    if slowest is None:
        return "no rank: all ranks are busy for about the same time"
    more = f"busy {format_milliseconds(slowest.seconds)} longer per step than the others"
    return f"rank {slowest.rank} is {more}, mostly in {slowest.phase}"
