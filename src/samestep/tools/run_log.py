"""Content of a run directory: recipe, starts and events.

`top`, `report` and `diff` read it. A line can be cut by a kill, and is skipped. Text has no control
characters.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.distributed.disk_operations import read_small, regular_file
from samestep.errors import InputError
from samestep.loggers.logger import parse_json_line, to_json
from samestep.recipes.recipe_files import read_yaml
from samestep.report_text import printable
from samestep.runs import LOOP, not_a_run

_CURVES = ("loss", "lr", "grad_norm", "samples_per_second")
_NOT_METRICS = (
    *("time", "event", "step", "epoch", "epochs", "is_best"),
    *("samples", "samples_per_second", "skipped_steps"),
)
_NOTES = ("note", "skipped", "stop")
_COUNTS = ("epoch", "step_in_epoch", "steps_in_epoch")  # of steps
_MAX_LOGGED = 100  # curves of a run: the report draws a chart of each
_LINE_BYTES = 1 << 22  # a longer line is no event
_LOG_BYTES = 1 << 31


# --- values and lines ---------------------------------------------------------------------------


def parse_number(value: object) -> float | None:
    """Return a number, in which strings represent NaN and infinities; None for another value."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON has integers of any size
        return None


def parse_finite(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    number = parse_number(value)
    if number is not None and abs(number) < float("inf"):
        return number
    return None


def parse_count(value: object) -> int | None:
    """Return a non-negative integer below 2^53; None for any other value."""
    # Charts have steps as float64, which represents each integer below 2^53.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    return None


def parse_text(value: object) -> str:
    """Return a string; empty for any other value."""
    return value if isinstance(value, str) else ""


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        # `printable` keeps line breaks, which would divide a row of the screen.
        return printable(value.replace("\n", " "))
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, in which `time` is a Unix timestamp; None without one."""
    value = parse_json_line(line)
    if value is None or parse_finite(value.get("time")) is None:
        return None
    cleaned: dict[str, Any] = _cleaned(value)
    return cleaned


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, which may not exist; other lines are skipped."""
    with suppress(FileNotFoundError), open(path, "rb", opener=regular_file) as file:
        # A sparse file, or one of another program, would fill the memory.
        if file.seek(0, os.SEEK_END) > _LOG_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_LOG_BYTES:,} bytes", str(path))
        file.seek(0)
        lines = iter(lambda: file.readline(_LINE_BYTES), b"")
        return [value for value in map(parse_line, lines) if value is not None]
    return []


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON file with a list of objects.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be read.
    """
    content = json.loads(read_small(path))
    if not isinstance(content, list):
        raise ValueError(f"{path} has no list")
    return [_cleaned(entry) for entry in content if isinstance(entry, dict)]


@contextmanager
def run_errors(folder: Path) -> Iterator[None]:
    """Report an `OSError` of the block, which reads the directory of a run, as an `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            expected="a run directory with readable files",
            fix="correct the path or the permissions",
            code="E_UNREADABLE",
        ) from error


# --- events -------------------------------------------------------------------------------------


class EventLog:
    """Events of one run.

    Attributes:
        curves: values by step, of steps and those of `World.log`, by name; of a step that occurs
            twice, the later value.
        checksums: checksums of the state by step, in hexadecimal digits.
        evaluations: events of evaluations by step.
        config: settings of a custom loop by the keys of a recipe; empty for a recipe.
        notes: time and text of each note, resume and end.
        resumed: step of each resume.
        step: last completed step.
        last: event of the last step; empty without one.
        end: event at the end of the run, which can be a failure; None if there is none.
    """

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.curves: dict[str, dict[int, float]] = {name: {} for name in _CURVES}
        self.checksums: dict[int, str] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.notes: list[tuple[float, str]] = []
        self.resumed: list[int] = []
        self.step = 0
        self.last: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        for event in events:
            self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        """Add an event, unless its values have other types."""
        kind = event.get("event")
        step = parse_count(event.get("step"))
        if not isinstance(kind, str) or (kind in ("step", "evaluation", "resume") and step is None):
            return
        counts = [event[name] for name in _COUNTS if name in event]
        if kind == "step" and any(parse_count(count) is None for count in counts):
            return
        # A resumed run appends to the file: an end counts only as the last event.
        self.end = event if kind in ("end", "failure") else None
        if step is not None:
            self._add_at(step, kind, event)
        if kind == "config" and isinstance(event.get("config"), dict):
            self.config = event["config"]
        elif kind in _NOTES:
            self.notes.append((event["time"], parse_text(event.get("text"))))
        elif kind in ("resume", "end", "failure"):
            word = "stopped" if event.get("stopped") is True else kind
            text = f"{word} at step {self.step}"
            if kind == "failure":
                text = f"{text}: {parse_text(event.get('text'))}"
            self.notes.append((event["time"], text))

    def _add_at(self, step: int, kind: str, event: dict[str, Any]) -> None:
        if kind == "step":
            self.step = step
            self.last = event
            numbers = {name: event.get(name) for name in _CURVES}
            # The last batch of an epoch can be short, with fewer samples per second.
            if event.get("step_in_epoch", 1) == event.get("steps_in_epoch", 0) > 1:
                del numbers["samples_per_second"]
            self._add_values(step, numbers)
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
            # The run computes later steps again.
            dropped: list[dict[int, Any]] = [self.evaluations, self.checksums]
            for values in (*dropped, *self.curves.values()):
                for later in [at for at in values if at > step]:
                    del values[later]

    def _add_values(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            number = parse_number(value)
            if number is not None and (name in self.curves or len(self.curves) < _MAX_LOGGED):
                self.curves.setdefault(name, {})[step] = number


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run."""

    folder: Path
    name: str  # unique name within a report
    recipe: dict[str, Any]  # recipe as plain data; `recipe_text` is the YAML
    recipe_text: str
    starts: list[dict[str, Any]]  # entries of `environment.json`, one for each start and resume
    events: EventLog

    @property
    def state(self) -> str:
        """`finished`, `stopped`, `failed`, or `not ended` of a run that trains or was killed."""
        if self.events.end is None:
            return "not ended"
        if self.events.end.get("event") == "failure":
            return "failed"
        if self.events.end.get("stopped") is True:
            return "stopped"
        return "finished"

    def evaluation_values(
        self, event: Mapping[str, Any] | None, *, of_training: bool = False
    ) -> dict[str, float]:
        """Return the loss and the metrics of an evaluation, without values that are no numbers.

        With `of_training`, return those of the training steps of the same epoch.
        """
        values = {name: parse_number(value) for name, value in (event or {}).items()}
        return {
            name.removeprefix("train_"): value
            for name, value in values.items()
            if value is not None
            and name not in _NOT_METRICS
            and name.startswith("train_") == of_training
        }


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in directories, named after them, or by their paths if names are equal.

    Raises:
        InputError: a directory is not a run, cannot be read, or is listed twice.
    """
    # Resolved: a link and its target are one run.
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise InputError(
                f"{folders[number]} is listed twice",
                expected="each run once",
                fix="remove one of them",
            )
    names = [folder.name for folder in resolved]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Return one run.

    Raises:
        InputError: the directory is not a run, or cannot be read.
    """
    path = folder / "recipe.yaml"
    with run_errors(folder):
        is_loop = (folder / LOOP).is_file()
        if not path.is_file() and not is_loop:
            raise not_a_run(folder)
        events = EventLog(read_json_lines(folder / "events.jsonl"))
        starts: list[dict[str, Any]] = []
        with suppress(FileNotFoundError, ValueError):  # missing, or damaged
            starts = read_objects(folder / "environment.json")
        recipe = events.config
        text = to_json(recipe)
        if not is_loop:
            recipe = dict(read_yaml(path))
            text = read_small(path).decode()
    return Run(folder, name, recipe, text, starts, events)
