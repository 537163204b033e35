"""State of a run and its ranks, read repeatedly from its directory."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from samestep.checkpoint.lock import is_locked
from samestep.errors import InputError, RecipeError
from samestep.recipes.recipe_files import read_yaml
from samestep.report_limits import printable
from samestep.runs import LOOP
from samestep.tools.run_lines import (
    MAX_LINE_BYTES,
    parse_count,
    parse_line,
    parse_number,
    read_objects,
    run_errors,
)

SILENT_SECONDS = 10.0
_NAME = re.compile(r"rank-(\d{1,6})\.jsonl")
_BLOCK = 1 << 20
_MAX_PROCESSES = 100_000
_MAX_PID = 2**31
_EVENT_BYTES = 1 << 30  # of the events of very long runs, the last ones
_LAST_BYTES = 1 << 16  # some hundred lines, of which only the last is used
_START_SECONDS = 10.0  # error of the start time of a process
# A run creates its directory before the recipe is complete.
_RECIPE_SECONDS = 1.0
_RETRY_SECONDS = 0.05
_STEP = b'"event": "step"'
_HEAD = 80  # bytes at the start of a line that contain the kind of its event
_STRIDE = 64  # lines; of steps that are read together, one per stride is parsed
_SPEED_SECONDS = 600.0
_COUNTS = ("step", "epoch", "step_in_epoch", "steps_in_epoch")
_NOT_VALUES = ("event", "time", "step", "epochs", "train_loss", "is_best", "skipped_steps", "samples_per_second")

# silent: no line for some seconds. gone: the process was on this machine and has ended. missing: no line at all.
Sign = Literal["active", "silent", "gone", "missing"]
# starting: no rank has written. failed: rank 0 has logged a failure. dead: no process holds the lock, and the run has
# logged no end.
State = Literal["starting", "running", "stopped", "ended", "failed", "dead"]


@dataclass(frozen=True)
class RankRow:
    """State of one rank."""

    rank: int
    sign: Sign
    age_seconds: float | None  # since the last line; None without a line
    line: Mapping[str, Any]  # last line, as documented in docs/guides/runs.md


@dataclass(frozen=True)
class RunStatus:
    """State of a run at one time."""

    run: str
    state: State
    epoch: int  # epoch of the last step, from 1; 0 before the first step, or without epochs
    epochs: int | None  # None if unknown, as of a custom loop without `samestep.epochs`
    step: int  # completed optimizer steps
    steps: int | None
    progress: float  # share of all steps
    seconds_left: float | None  # estimate from the speed of the last minutes; None if unknown or if no step is left
    loss: float | str | None  # loss of the last step, as a string such as `nan` if it is not finite
    evaluation: Mapping[str, Any]  # `epoch`, `loss`, `samples` and metrics of the last evaluation
    ranks: Sequence[RankRow]
    failure: Mapping[str, Any] | None = None  # `code`, `exit_code` and `text` if the state is `failed`
    unreadable_lines: int = 0  # number of lines of ranks and events that cannot be read


class LineFollower:
    """Reader of the complete lines that other processes append to a file, which may not exist yet.

    A file that was truncated or replaced is read from its start. At first, at most `last_bytes` at the end are read.
    """

    def __init__(self, path: Path, last_bytes: int = _EVENT_BYTES) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._file: tuple[int, int] | None = None
        self._offset, self._rest = 0, b""

    def new_lines(self) -> Iterator[bytes]:
        """Yield the lines completed since the last call."""
        try:
            # A network file system checks for changes by other machines when a file is opened.
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if identity != self._file or status.st_size < self._offset:
                self._file, self._offset, self._rest = identity, 0, b""
                if status.st_size > self._last_bytes:
                    file.seek(status.st_size - self._last_bytes)
                    self._offset = file.tell() + len(file.readline(MAX_LINE_BYTES))  # skip the rest of a line
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *lines, rest = (self._rest + block).split(b"\n")
                # A line that is too long stays too long without its beginning.
                self._rest = rest if len(rest) <= MAX_LINE_BYTES else rest[-MAX_LINE_BYTES - 1 :]
                yield from lines


# --- ranks ---


class RankFile:
    """File of one rank."""

    def __init__(self, path: Path) -> None:
        self._follower = LineFollower(path, _LAST_BYTES)
        self._written = 0.0
        self.line: dict[str, Any] = {}  # last complete line
        self.unreadable = 0  # number of lines of another format

    def update(self) -> None:
        """Read new lines."""
        previous = self.line
        for text in self._follower.new_lines():
            line = parse_line(text)
            if line is not None:
                self.line = line
            else:
                self.unreadable += bool(text.strip(b"\0 \t\r"))
        if self.line is not previous:
            # The clock of another machine can be wrong; the age of its first line has no other source.
            is_timed = not previous or self._is_local
            self._written = time.monotonic() - (max(0.0, time.time() - self.line["time"]) if is_timed else 0.0)

    def row(self, rank: int, *, is_running: bool = True) -> RankRow:
        """Return the state of the rank, which is neither silent nor gone if the run has ended."""
        if not self.line:
            return RankRow(rank, "missing", None, {})
        age = time.monotonic() - self._written
        sign: Sign = "active"
        pid = parse_count(self.line.get("pid"))
        if is_running and self._is_local and not _is_alive(pid, float(self.line["time"])):
            sign = "gone"
        elif is_running and age >= SILENT_SECONDS:
            sign = "silent"
        return RankRow(rank, sign, round(age, 1), self.line)

    @property
    def _is_local(self) -> bool:
        return bool(self.line.get("host") == socket.gethostname())


def _is_alive(pid: int | None, written: float) -> bool:
    """Return whether the process that wrote a line still runs; a process started later has only reused its number."""
    if pid is None or pid >= _MAX_PID:
        return False
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() <= written + _START_SECONDS and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def update_rank_files(folder: Path, files: dict[int, RankFile]) -> None:
    """Read new lines, and add the files of new ranks to `files`."""
    for path in folder.glob("rank-*.jsonl"):
        if name := _NAME.fullmatch(path.name):
            files.setdefault(int(name[1]), RankFile(path)).update()


def rank_rows(files: Mapping[int, RankFile], processes: int | None, since: float, *, is_running: bool) -> list[RankRow]:
    """Return one row per rank of the last start of a run, at time `since`, with `processes` ranks or None if unknown.

    Higher ranks without a later line belong to an earlier start.
    """
    ranks = set(range(processes or 0))
    ranks |= {rank for rank, file in files.items() if file.line and (processes is None or file.line["time"] > since)}
    missing = RankFile(Path())
    return [files.get(rank, missing).row(rank, is_running=is_running) for rank in sorted(ranks)]


# --- run ---


def _number(value: object) -> Any:
    """Return a number, or the text of one that is not finite; None for any other value."""
    return value if parse_number(value) is not None else None


class LastEvents:
    """Last step, last evaluation and end of a run, and its speed."""

    def __init__(self) -> None:
        self.step: dict[str, Any] = {}  # event of the last step
        self.evaluation: dict[str, Any] = {}  # `epoch`, `loss`, `samples` and metrics; empty without an evaluation
        self.end: Literal["ended", "stopped", "failed"] | None = None  # if the last event is the end of the run
        self.failure: dict[str, Any] = {}  # last failure
        self.unreadable = 0  # number of parsed lines that are not events
        self._samples: deque[tuple[float, int]] = deque()  # times and steps

    def update(self, lines: Iterable[bytes]) -> None:
        """Add lines of `events.jsonl`; most steps between other events are skipped without parsing."""
        skipped = b""
        for number, line in enumerate(lines):
            is_step = _STEP in line[:_HEAD]
            if is_step and number % _STRIDE:
                skipped = line
                continue
            if not is_step:
                self._add(skipped)
            self._add(line)
            skipped = b""
        self._add(skipped)

    def _add(self, line: bytes) -> None:
        if not line.strip(b"\0 \t\r"):
            return
        event = parse_line(line) or {}
        kind, counts = event.get("event"), {name: parse_count(event.get(name)) for name in _COUNTS}
        damaged = [name for name, count in counts.items() if count is None and (name in event or name == "step")]
        if not isinstance(kind, str) or (kind == "step" and damaged):
            self.unreadable += 1
        elif kind == "step":
            known = {name: count for name, count in counts.items() if count is not None}
            self._add_step({**event, **known, "loss": _number(event.get("loss"))})
        elif kind == "evaluation":
            values = {name: _number(value) for name, value in event.items() if name not in _NOT_VALUES}
            self.evaluation = {name: value for name, value in values.items() if value is not None}
        elif kind == "resume":
            self.end = None
            self._samples.clear()
        elif kind == "end":
            self.end = "stopped" if event.get("stopped") else "ended"
        elif kind == "failure":
            self.end = "failed"
            self.failure = {name: event.get(name) for name in ("code", "exit_code", "text")}

    def seconds_per_step(self, until: float = 0.0) -> float | None:
        """Return the mean of the last minutes, with evaluations and pauses; None if unknown.

        There was no later step before `until`, by the clock of the events.
        """
        if len(self._samples) < 2:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return (max(end, until) - begin) / (last - first) if last > first else None

    def _add_step(self, event: dict[str, Any]) -> None:
        self.step, self.end = event, None
        samples, time, step = self._samples, float(event["time"]), int(event["step"])
        if samples and step < samples[-1][1]:
            samples.clear()  # restarted from an earlier step
        samples.append((time, step))
        while time - samples[0][0] > _SPEED_SECONDS and len(samples) > 2:
            samples.popleft()


class RunReader:
    """Reader of the state of a run in a directory, which can start later. Writes nothing."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._identity: tuple[int, int, int] | None = None  # of the file that marks the run
        self._epochs: int | None = None

    def read(self) -> RunStatus | None:
        """Return the current state; None if there is no run yet.

        Raises:
            InputError: the directory is not a run, or cannot be read.
        """
        with run_errors(self._run):
            return self._read()

    def _read(self) -> RunStatus | None:
        mark = self._read_mark()
        if mark is None:
            return None
        if mark[0] != self._identity:
            self._follower, self._events = LineFollower(self._run / "events.jsonl"), LastEvents()
            self._ranks: dict[int, RankFile] = {}
            self._start: dict[str, Any] = {}
        self._identity, self._epochs = mark
        lock = is_locked(self._run)  # before the events: a run logs its end while it holds the lock
        self._events.update(self._follower.new_lines())
        update_rank_files(self._run / "ranks", self._ranks)
        with suppress(FileNotFoundError, ValueError, IndexError):  # missing, or being written
            self._start = read_objects(self._run / "environment.json")[-1]
        return self._status(self._state(lock))

    def _read_mark(self) -> tuple[tuple[int, int, int], int | None] | None:
        """Return the identity of the file that marks the run, and the epochs of a recipe.

        The identity changes if the run is created again.
        """
        loop, deadline = self._run / LOOP, time.monotonic() + _RECIPE_SECONDS
        while self._run.exists():
            try:
                path = loop if loop.exists() else self._run / "recipe.yaml"
                status = os.stat(path)
                epochs = None if path == loop else parse_count(read_yaml(path).get("epochs"))
                if epochs is not None or path == loop:
                    return (status.st_dev, status.st_ino, status.st_ctime_ns), epochs
                raise ValueError("no epochs")
            except (OSError, RecipeError, ValueError) as error:
                cause = error.__cause__ or error
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError):
                    raise cause from None
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{self._run} is not a run",
                        expected=f"a run directory, which contains recipe.yaml with epochs, or {LOOP}",
                        fix="check the path",
                        code="E_NOT_A_RUN",
                    ) from error
                time.sleep(_RETRY_SECONDS)
        return None

    def _state(self, lock: bool | None) -> State:
        if lock:
            return "running"
        if self._events.end is not None:
            return self._events.end
        if any(file.row(rank).sign == "active" for rank, file in self._ranks.items()):
            return "running"  # before rank 0 locks the directory, or without support for locks
        has_started = self._start or self._events.step or any(file.line for file in self._ranks.values())
        return "dead" if has_started else "starting"

    def _status(self, state: State) -> RunStatus:
        last = self._events.step
        steps_in_epoch = int(last.get("steps_in_epoch", 0))
        epochs = parse_count(last.get("epochs")) if self._epochs is None else self._epochs
        completed = int(last.get("epoch", 0)) * steps_in_epoch + int(last.get("step_in_epoch", 0))
        steps = (epochs or 0) * steps_in_epoch
        last_time = float(self._ranks[0].line.get("time", 0.0)) if 0 in self._ranks else 0.0
        pace = self._events.seconds_per_step(until=last_time) if state == "running" and steps > completed else None
        since = 0.0
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # unknown, or damaged
            started = datetime.strptime(self._start["started"], "%Y-%m-%dT%H:%M:%S%z")
            since = started.timestamp() + 1  # lines of the same second can belong to an earlier start
        processes = parse_count(self._start.get("processes"))
        return RunStatus(
            run=printable(str(self._run)),
            state=state,
            epoch=int(last.get("epoch", -1)) + 1,
            epochs=epochs,
            step=int(last.get("step", 0)),
            steps=steps or None,
            progress=round(completed / steps, 4) if steps else 0.0,
            seconds_left=None if pace is None else round((steps - completed) * pace, 1),
            loss=last.get("loss"),
            evaluation=self._events.evaluation,
            ranks=rank_rows(
                self._ranks,
                processes if processes is not None and processes <= _MAX_PROCESSES else None,
                since,
                is_running=state in ("running", "dead"),
            ),
            failure=self._events.failure if state == "failed" else None,
            unreadable_lines=self._events.unreadable + sum(file.unreadable for file in self._ranks.values()),
        )
