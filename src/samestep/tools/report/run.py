"""Content of a run directory: recipe, starts, events, and the files of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from samestep.errors import InputError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import read_yaml
from samestep.runs import LOOP
from samestep.tools.run_lines import (
    parse_count,
    parse_finite,
    parse_line,
    parse_number,
    parse_text,
    read_objects,
    run_errors,
)
from samestep.units import plural

_CURVES = ("loss", "lr", "grad_norm", "samples_per_second")
_NOT_METRICS = (
    *("time", "event", "step", "epoch", "epochs", "is_best", "train_loss"),
    *("samples", "samples_per_second", "skipped_steps"),
)
_NOTES = ("cache", "note", "skipped", "stop")
_COUNTS = ("epoch", "step_in_epoch", "steps_in_epoch")  # of steps
_MAX_LOGGED = 100


class Curve:
    """Values by step; of a step that occurs twice, the later value counts."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}

    def add(self, step: int, value: float) -> None:
        """Add one point."""
        self._values[step] = value

    def drop_after(self, step: int) -> None:
        """Drop the points of later steps, which a run that continues after `step` computes again."""
        self._values = {at: value for at, value in self._values.items() if at <= step}

    def points(self) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Return ascending steps and their values, which can be NaN and infinite."""
        steps, values = numpy.array(sorted(self._values.items())).reshape(-1, 2).T
        return steps, values


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects in a JSON-lines file, and the number of lines that a kill cut; nothing without a file."""
    content = path.read_bytes() if path.is_file() else b""
    values = [parse_line(line) for line in content.split(b"\n") if line.strip(b"\0 \t\r")]
    return [value for value in values if value is not None], values.count(None)


class EventLog:
    """Events of one run.

    Attributes:
        curves: values of steps, and those of `World.log`, by name.
        checksums: checksums of the state by step, in hexadecimal digits.
        evaluations: events of evaluations by step.
        config: settings of a custom loop by the keys of a recipe; empty for a recipe.
        notes: time and text of each note, resume and end.
        resumed: step of each resume.
        step: last completed step.
        end: event at the end of the run, which can be a failure; None if there is none.
        unreadable: number of lines that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.curves = {name: Curve() for name in _CURVES}
        self.checksums: dict[int, str] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.notes: list[tuple[float, str]] = []
        self.resumed: list[int] = []
        self.step = 0
        self.end: dict[str, Any] | None = None
        events, unreadable = read_json_lines(path)
        self.unreadable = sum(not self._add(event) for event in events) + unreadable

    def _add(self, event: dict[str, Any]) -> bool:
        """Add an event; return whether the event is valid."""
        kind = event.get("event")
        step = parse_count(event.get("step"))
        if not isinstance(kind, str) or (kind in ("step", "evaluation", "resume") and step is None):
            return False
        if kind == "step" and any(
            name in event and parse_count(event[name]) is None for name in _COUNTS
        ):
            return False
        self.end = event if kind in ("end", "failure") else None
        if step is not None:
            self._add_at(step, kind, event)
        if kind == "config" and isinstance(event.get("config"), dict):
            self.config = event["config"]
        elif kind in _NOTES:
            self.notes.append((event["time"], parse_text(event.get("text"))))
        elif kind in ("resume", "end", "failure"):
            text = f"{'stopped' if event.get('stopped') is True else kind} at step {self.step}"
            failure = f": {parse_text(event.get('text'))}" if kind == "failure" else ""
            self.notes.append((event["time"], text + failure))
        return True

    def _add_at(self, step: int, kind: str, event: dict[str, Any]) -> None:
        if kind == "step":
            self.step = step
            self._add_values(step, {name: event.get(name) for name in _CURVES})
        elif kind == "metrics" and isinstance(event.get("values"), dict):
            self._add_values(step, event["values"])
        elif kind == "evaluation":
            # A custom loop logs an evaluation for each set of data, with other names.
            self.evaluations[step] = {**self.evaluations.pop(step, {}), **event}
        elif kind == "checkpoint" and event.get("is_best") is True and step in self.evaluations:
            self.evaluations[step]["is_best"] = True
        elif kind == "checksum":
            self.checksums[step] = parse_text(event.get("checksum"))
        elif kind == "resume":
            self.step = step
            self.resumed.append(step)
            for curve in self.curves.values():
                curve.drop_after(step)
            self.evaluations = {at: values for at, values in self.evaluations.items() if at <= step}
            self.checksums = {at: value for at, value in self.checksums.items() if at <= step}

    def _add_values(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            number = parse_number(value)
            if number is not None and (name in self.curves or len(self.curves) < _MAX_LOGGED):
                self.curves.setdefault(name, Curve()).add(step, number)


@dataclass
class RankLog:
    """Totals of the file of one rank; shares of time are means weighted by the time between lines."""

    rank: int
    host: str = ""
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)  # shares and rates, times seconds
    memory: float = 0.0  # largest resident memory in bytes, as is `gpu_memory`
    gpu_memory: float = 0.0
    unreadable: int = 0

    def mean(self, name: str) -> float | None:
        """Return the mean of `data_share`, `wait_share`, `cpu_percent` or `samples_per_second`; None if unknown."""
        if name in self.sums and self.seconds:
            return self.sums[name] / self.seconds
        return None


def read_ranks(folder: Path) -> list[RankLog]:
    """Return the totals of `rank-N.jsonl` in a folder, by rank."""
    paths = {path.stem.removeprefix("rank-"): path for path in folder.glob("rank-*.jsonl")}
    numbers = sorted(int(text) for text in paths if text.isdecimal() and len(text) < 7)
    return [_read_rank(number, paths[str(number)]) for number in numbers]


def _read_rank(rank: int, path: Path) -> RankLog:
    lines, unreadable = read_json_lines(path)
    log = RankLog(rank, unreadable=unreadable)
    previous: dict[str, Any] = {}
    for line in lines:
        is_same_process = (line.get("pid"), line.get("host")) == (
            previous.get("pid"),
            previous.get("host"),
        )
        seconds = max(0.0, line["time"] - previous["time"]) if is_same_process and previous else 0.0
        log.seconds += seconds
        for name in ("data_share", "wait_share", "cpu_percent", "samples_per_second"):
            value = parse_finite(line.get(name))
            if value is not None:
                log.sums[name] = log.sums.get(name, 0.0) + value * seconds
        gpu = line["gpu"] if isinstance(line.get("gpu"), dict) else {}
        log.memory = max(log.memory, parse_finite(line.get("memory_bytes")) or 0.0)
        log.gpu_memory = max(log.gpu_memory, parse_finite(gpu.get("memory_bytes")) or 0.0)
        log.host = parse_text(line.get("host"))
        previous = line
    return log


@dataclass(frozen=True)
class Run:
    """One run."""

    folder: Path
    name: str  # unique name within a report
    recipe: dict[str, Any]  # recipe as plain data; `recipe_text` is the YAML
    recipe_text: str
    starts: list[dict[str, Any]]  # entries of `environment.json`, one for each start and resume
    events: EventLog
    ranks: list[RankLog]
    remarks: list[str]  # parts of the directory that cannot be read

    @property
    def state(self) -> str:
        """`finished`, `stopped`, `failed`, or `not ended` if the run still trains or was killed."""
        if self.events.end is None:
            return "not ended"
        if self.events.end.get("event") == "failure":
            return "failed"
        if self.events.end.get("stopped") is True:
            return "stopped"
        return "finished"

    def evaluation_values(self, event: Mapping[str, Any] | None) -> dict[str, float]:
        """Return the loss and the metrics of an evaluation, without values that are no numbers."""
        values = {
            name: parse_number(value)
            for name, value in (event or {}).items()
            if name not in _NOT_METRICS
        }
        return {name: value for name, value in values.items() if value is not None}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in directories, named after them, or by their paths if two directories have the same name.

    Raises:
        InputError: a directory is not a run, cannot be read, or is listed twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise InputError(
                f"{folders[number]} is listed twice",
                expected="each run once",
                fix="remove one of them",
            )
    names = [folder.name for folder in resolved]
    is_unique = len(set(names)) == len(names)
    return [
        read_run(folder, name if is_unique else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Return one run.

    Raises:
        InputError: the directory is not a run, or cannot be read.
    """
    path = folder / "recipe.yaml"
    with run_errors(folder):
        is_loop = (folder / LOOP).is_file()
        if not path.is_file() and not is_loop:
            raise InputError(
                f"{folder} is not a run",
                expected=f"a run directory, which contains recipe.yaml, or {LOOP}",
                fix="check the path",
                code="E_NOT_A_RUN",
            )
        recipe = {} if is_loop else dict(read_yaml(path))
        events = EventLog(folder / "events.jsonl")
        ranks = read_ranks(folder / "ranks")
        starts: list[dict[str, Any]] = []
        with suppress(FileNotFoundError, ValueError):  # missing, or damaged
            starts = read_objects(folder / "environment.json")
        logs = {
            "events.jsonl": events.unreadable,
            **{f"ranks/rank-{log.rank}.jsonl": log.unreadable for log in ranks},
        }
        remarks = [
            f"{file}: {plural(count, 'unreadable line')} skipped"
            for file, count in logs.items()
            if count
        ]
        recipe = events.config if is_loop else recipe
        text = to_json(recipe) if is_loop else path.read_text(encoding="utf-8")
    return Run(folder, name, recipe, text, starts, events, ranks, remarks)
