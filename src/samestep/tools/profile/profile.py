"""Profile of a recipe: measured training steps on all ranks, advice, traces; as JSON, text and picture."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions
from samestep.errors import InputError
from samestep.loggers.trackers import tensorboard_command
from samestep.recipes.recipe_files import recipe_data
from samestep.runs import LOOP
from samestep.tools.profile.causes import Advice, advise, straggler_of
from samestep.tools.profile.measurements import PHASES, Measurements, Phase, Step
from samestep.tools.timing import run_trial
from samestep.units import format_milliseconds as ms
from samestep.units import plural

CLOCK_MARK = "samestep.clock"  # event with a known time on the clock of the machine
_TRACE_NAME = re.compile(r"rank-(\d+)\.\d+\.pt\.trace\.json\.gz")
_THREAD_NAMES = {1: "phases of the step", 2: "communication in the background", 3: "in collectives"}
_PHASES, _BACKGROUND, _COLLECTIVES = _THREAD_NAMES  # no thread ids of the kernel
_FIRST_OTHER_PROCESS = 1000  # number of the first process of a trace that is not the rank, such as a GPU
_MICRO = 1e6

Event = dict[str, Any]
CHECKPOINTS, TENSORBOARD, TRACE = "checkpoints", "tensorboard", "trace.json.gz"
RUN = "run.txt"  # path of the run directory of a script
_TRIALS = "samestep.tools.profile.trial"
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # silences torch's profiler
_MAX_WIDTH = 200
_NAMES: dict[Phase, str] = {
    "data": "waiting for data",
    "communication": "communication, exposed",
    "computing": "forward and backward",
    "other": "host, other",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps and ranks of a profile."""

    wait: int  # unmeasured steps at the start
    warmup: int  # unmeasured steps after these, and again under torch's profiler
    active: int  # measured steps, without torch's profiler
    traced: int  # following steps with torch's profiler; 0 for none
    ranks: tuple[int, ...] | None  # ranks with torch's profiler; None for all
    folder: Path  # folder of traces and checkpoints
    scratch: Path | None = None  # folder of the checkpoints of a script
    options: RunOptions

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.wait + self.warmup + self.active + (self.warmup + self.traced if self.traced else 0)

    def traces(self, rank: int) -> bool:
        """Return whether torch's profiler runs on a rank."""
        return bool(self.traced) and (self.ranks is None or rank in self.ranks)


@dataclass(frozen=True)
class Script:
    """Script to profile."""

    path: Path
    arguments: tuple[str, ...]


def parse_ranks(text: str, size: int) -> tuple[int, ...] | None:
    """Return the ranks of `--ranks`, in order; None for `all`.

    Raises:
        InputError: `text` is neither `all` nor a list of ranks below `size`.
    """
    if text == "all":
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) < size for part in parts):
        raise InputError(
            f"--ranks {text} with {plural(size, 'process')}",
            expected=f"all, or numbers from 0 to {size - 1} separated by commas",
            fix="--ranks all, or more --processes",
            code="E_RANKS",
        )
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True)
class Profile:
    """Profile of a recipe on a machine, with the merged trace if any steps were traced."""

    name: str
    recipe: dict[str, Any]
    machine: dict[str, Any]
    plan: Plan
    measured: Measurements
    trace: Path | None

    @cached_property
    def advice(self) -> list[Advice]:
        """The remedies with the largest savings; empty if no cause stands out."""
        return advise(self.measured)

    @cached_property
    def notes(self) -> list[str]:
        """Restrictions of the measurements."""
        measured, conditions = self.measured, self.measured.conditions
        notes = []
        if conditions.device == "cpu" and measured.size * conditions.threads > conditions.cores:
            cores = plural(conditions.cores, "core")
            notes.append(f"{measured.size} ranks share {cores} and take turns: fewer --processes may be as fast")
        if not conditions.is_known_inside:
            seconds = max((summary.communication_seconds for summary in measured.traced.values()), default=0.0)
            total = f"; torch's profiler measured {ms(seconds)} per step" if seconds else ""
            notes.append(f"{conditions.strategy} communicates within forward and backward, only partly measured{total}")
        if any(phases["computing"] for phases in measured.phases):
            notes.append("microbatches are computed concurrently: forward and backward are one phase")
        if "script" in self.recipe:
            notes.append("waiting for data includes the script's own code between two steps")
            notes.append("--workers in an advice is samestep.loader(num_workers=...) in the script")
        if measured.size > 1 and not measured.lateness.steps:
            notes.append("late ranks are not known: ranks do not all call the same collectives")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `profile.json`; times per step, in seconds."""
        measured, plan, lateness = self.measured, self.plan, self.measured.lateness
        return {
            "recipe": self.recipe,
            "machine": self.machine,
            "processes": measured.size,
            "steps": {name: getattr(plan, name) for name in ("wait", "warmup", "active", "traced")},
            "step_seconds": measured.step_seconds,
            "ranks": [
                {
                    "rank": rank,
                    **phases,
                    "waiting_for_a_later_rank": lateness.waited[rank] if lateness.steps else None,
                    "hidden_communication": measured.hidden[rank] if measured.conditions.is_known_inside else None,
                }
                for rank, phases in enumerate(measured.phases)
            ],
            "straggler": asdict(late) if (late := straggler_of(measured)) is not None else None,
            "late": {"last_to": lateness.last, "of": lateness.apart, "waited_for": lateness.caused},
            "advice": [
                {**asdict(advice), "share": advice.share(measured), "number": number}
                for number, advice in enumerate(self.advice, start=1)
            ],
            "traced": {str(rank): asdict(summary) for rank, summary in measured.traced.items()},
            "costs": asdict(measured.costs),
            "circumstances": asdict(measured.conditions),
            "notes": self.notes,
            "trace": str(self.trace) if self.trace is not None else None,
            "tensorboard": str(plan.folder / TENSORBOARD) if measured.traced else None,
        }


def profile(
    name: str,
    subject: Recipe | Script,
    plan: Plan,
    processes: int,
    machine: dict[str, Any],
    preload: tuple[str, ...],
    environment: Mapping[str, str],
) -> Profile:
    """Train the steps of a plan with a recipe or a script, on `processes` ranks.

    Raises:
        RankError: a rank failed.
        StoppedError: a stop was requested.
    """
    variables = {**_ENVIRONMENT, **environment}
    function = "profile_script" if isinstance(subject, Script) else "profile_rank"
    with TemporaryDirectory(prefix=".checkpoints-", dir=plan.folder) as scratch:
        own = replace(plan, scratch=Path(scratch).resolve())
        measured: Measurements = run_trial(
            _TRIALS, function, subject, own, processes=processes, preload=preload, environment=variables
        )
    trace = None
    if measured.traced:
        trace = plan.folder / TRACE
        files = find_traces(plan.folder / TENSORBOARD)
        # The folder may contain traces of other ranks from an earlier profile.
        marks = measured.clock_marks
        write_merged(trace, {rank: files[rank] for rank in marks}, marks, measured.traced_steps)
    if isinstance(subject, Script):
        data: dict[str, Any] = {"script": str(subject.path), "arguments": list(subject.arguments)}
    else:
        data = recipe_data(subject)
    return Profile(name, data, machine, plan, measured, trace)


def move_to_run(result: Profile, *, is_chosen: bool) -> Profile:
    """Move the folder of a profile into the run directory of the profiled script, if there is one.

    Args:
        result: a profile whose files are written.
        is_chosen: the user has chosen the folder, which then stays.
    """
    folder = result.plan.folder
    mark = folder / RUN
    run = Path(mark.read_text(encoding="utf-8")) if mark.exists() else None
    mark.unlink(missing_ok=True)
    if run is None or is_chosen or not (run / LOOP).exists():
        return result
    place = run / folder.name
    shutil.move(folder, place)
    trace = None if result.trace is None else place / result.trace.name
    return replace(result, plan=replace(result.plan, folder=place), trace=trace)


def find_traces(folder: Path) -> dict[int, Path]:
    """Return the newest trace of each rank."""
    matches = ((_TRACE_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {int(match[1]): path for match, path in matches if match}


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace of torch's profiler."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def write_merged(
    path: Path, files: Mapping[int, Path], marks: Mapping[int, float], steps: Sequence[Sequence[Step]]
) -> None:
    """Write the merged trace of all ranks, compressed.

    Args:
        path: file to write.
        files: traces by rank.
        marks: time of the event `CLOCK_MARK` in each trace, in seconds of the clock of the steps.
        steps: steps of all ranks, including ranks without a trace.
    """
    zero = min((step.begin for own in steps for step in own), default=0.0)
    events = [event for rank, own in enumerate(steps) for event in _recorded_events(rank, own, zero)]
    for rank, file in files.items():
        events += _shifted_events(rank, read_trace(file), marks[rank] - zero)
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(max(0.0, event["ts"] - first), 3)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as output:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, output)


def _recorded_events(rank: int, steps: Sequence[Step], zero: float) -> Iterator[Event]:
    """Yield the names of a rank and its threads, and the rank's phases and collectives."""

    def metadata(kind: str, thread: int, **values: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": values}

    def event(name: str, thread: int, begin: float, end: float, **details: Any) -> Event:
        ts, dur = round((begin - zero) * _MICRO, 3), round((end - begin) * _MICRO, 3)
        common = {"ph": "X", "cat": "samestep", "name": name, "pid": rank, "tid": thread}
        return {**common, "ts": ts, "dur": dur, "args": details}

    yield metadata("process_name", 0, name=f"rank {rank}")
    yield metadata("process_sort_index", 0, sort_index=rank)
    for thread, name in _THREAD_NAMES.items():
        yield metadata("thread_name", thread, name=name)
        yield metadata("thread_sort_index", thread, sort_index=thread - 10)
    for step in steps:
        for phase, begin, end, _ in step.segments:
            yield event(phase, _PHASES, begin, end, step=step.number)
        for name, site, is_background, begin, end in step.collectives:
            thread = _BACKGROUND if is_background else _COLLECTIVES
            yield event(name, thread, begin, end, step=step.number, at=site or "the engine")


def _shifted_events(rank: int, events: Sequence[Event], mark: float) -> Iterator[Event]:
    """Yield the events of a rank on the common clock, with process and flow numbers that no other rank has."""
    marked = next(event for event in events if event.get("name") == CLOCK_MARK)
    shift = mark * _MICRO - marked["ts"]
    processes: dict[Any, int] = {marked["pid"]: rank}
    for event in events:
        process = event.get("pid", marked["pid"])
        if isinstance(process, str):
            continue  # events about the profiler
        number = processes.setdefault(process, _FIRST_OTHER_PROCESS * (rank + 1) + len(processes))
        changed = {**event, "pid": number}
        if event["ph"] == "M":
            if process == marked["pid"] and event["name"].startswith("process_"):
                continue  # _recorded_events has named the process
            if event["name"] == "process_name":
                changed["args"] = {"name": f"rank {rank}: {event['args'].get('name')}"}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"
        yield changed


# --- text and picture ---


def show(profile: Profile, *, is_drawn: bool) -> None:
    """Print a profile: phases by rank, the slowest rank, notes, advice and output files."""
    measured, folder, table = profile.measured, profile.plan.folder, _table(profile.measured)
    console = Console()
    width = console.measure(table, options=console.options.update(width=_MAX_WIDTH)).maximum
    Console(width=max(console.width, width)).print(table)
    lines = [f"{'straggler':<12}{_straggler(measured)}"] if measured.size > 1 else []
    lines += [f"{'note':<12}{note}" for note in profile.notes]
    if not profile.advice:
        lines.append(f"{'advice':<12}nothing stands out: no known change saves a tenth of a step")
    for number, advice in enumerate(profile.advice, start=1):
        lines += [
            "",
            f"{number}. {advice.cause}: up to {ms(advice.seconds)} per step, {advice.share(measured):.0%}",
            f"   {'measured':<9}{advice.evidence}",
            f"   {'do':<9}{advice.do}",
            f"   {'estimate':<9}{advice.estimate}",
        ]
    lines += ["", f"{'written':<12}{folder / 'profile.json'}{', profile.png' if is_drawn else ''}"]
    if profile.trace is not None:
        lines.append(f"{'trace':<12}{profile.trace}: open in https://ui.perfetto.dev")
        lines.append(f"{'tensorboard':<12}{tensorboard_command(folder / TENSORBOARD)}")
    print("", *lines, sep="\n")


def _table(measured: Measurements) -> Table:
    """Return a table with a row per phase and a column per rank."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step", no_wrap=True)
    for name in (*(f"rank {rank}" for rank in range(measured.size)), "share"):
        table.add_column(name, justify="right", no_wrap=True)

    def add_row(name: str, values: list[float], style: str | None = None) -> None:
        share = sum(values) / len(values) / measured.step_seconds
        table.add_row(name, *map(ms, values), f"{share:.0%}", style=style)

    for phase in PHASES:
        values = [phases[phase] for phases in measured.phases]
        if phase == "communication" and measured.size == 1:
            continue
        if any(values) or phase not in ("computing", "checkpoint", "forward", "backward"):
            add_row(_NAMES.get(phase, phase), values)
        if phase == "communication" and measured.lateness.steps:
            add_row("  of it, for a later rank", measured.lateness.waited)
    add_row("all", [sum(phases.values()) for phases in measured.phases], "bold")
    if measured.size > 1 and measured.conditions.is_known_inside:
        add_row("communication, hidden", measured.hidden, "dim")
    return table


def _straggler(measured: Measurements) -> str:
    late = straggler_of(measured)
    if late is None:
        return "none: no rank is late again and again" if measured.lateness.steps else "not known"
    return (
        f"rank {late.rank} is last at {late.last} of {late.apart} collectives with uneven arrivals; the others wait "
        f"{ms(late.seconds)} per step for it, which needs {ms(late.more)} more in {late.phase}"
    )


def draw(profile: Profile, path: Path) -> None:
    """Write a PNG with a bar per rank, divided into phases."""
    from matplotlib import style
    from matplotlib.figure import Figure

    measured = profile.measured
    ranks, left = range(measured.size), [0.0] * measured.size
    with style.context("tableau-colorblind10"):
        figure = Figure(figsize=(8, 1.6 + 0.4 * measured.size), dpi=150, layout="constrained")
        axes = figure.subplots()
        for number, phase in enumerate(PHASES):
            values = [1e3 * phases[phase] for phases in measured.phases]
            if any(values):
                axes.barh(ranks, values, left=left, color=f"C{number}", label=_NAMES.get(phase, phase))
                left = [before + value for before, value in zip(left, values, strict=True)]
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8)
        axes.set_ylim(measured.size - 0.4, -0.6)
        axes.set_xlabel("milliseconds per step")
        axes.set_title(f"{profile.name} on {profile.machine['device']}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
        figure.savefig(path)
