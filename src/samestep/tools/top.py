"""State of a run and its ranks for `samestep top`, read from the ends of the files in its directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from samestep.checkpoint.files import is_locked
from samestep.recipes.recipe_files import read_yaml
from samestep.runs import LOOP
from samestep.tools.run_lines import parse_count, parse_line, parse_number, read_objects, run_errors

SILENT_SECONDS = 10.0
_EVENT_BYTES = 1 << 18  # some hundred steps
_RANK_BYTES = 1 << 16  # some hundred lines, of which only the last is used
_MAX_RANKS = 100_000
_START_SECONDS = 10.0  # error of the start time of a process
_COUNTS = ("step", "epoch", "steps_in_epoch")
# starting: no rank has written. failed: rank 0 has logged a failure. dead: no process holds the
# lock, and the run has logged no end.
State = Literal["starting", "running", "stopped", "ended", "failed", "dead"]


@dataclass(frozen=True)
class RankRow:
    """State of one rank."""

    rank: int
    # silent: no line for some seconds. gone: the process was on this machine and has ended.
    # missing: no line at all.
    sign: Literal["active", "silent", "gone", "missing"] = "missing"
    age_seconds: float | None = None  # since the last line
    line: Mapping[str, Any] = field(
        default_factory=dict
    )  # last line, as documented in docs/guides/runs.md


@dataclass(frozen=True)
class RunStatus:
    """State of a run at one time."""

    state: State
    epoch: int  # epoch of the last step, from 1; 0 before the first step, or without epochs
    epochs: int | None  # None if unknown, as of a custom loop without `samestep.epochs`
    step: int  # completed optimizer steps
    steps: int | None
    loss: float | str | None  # loss of the last step, as a string such as `nan` if it is not finite
    ranks: Sequence[RankRow]
    failure: Mapping[str, Any]  # `code` and `text` of the failure; empty without


def read_status(run: Path) -> RunStatus | None:
    """Return the current state of a run; None if the directory is not a run yet.

    Raises:
        InputError: the files cannot be read.
    """
    with run_errors(run):
        is_loop = (run / LOOP).exists()
        if not is_loop and not (run / "recipe.yaml").exists():
            return None
        epochs = None if is_loop else parse_count(read_yaml(run / "recipe.yaml").get("epochs"))
        lock = is_locked(run)  # before the events: a run logs its end while it holds the lock
        log = _LastEvents(last_lines(run / "events.jsonl", _EVENT_BYTES))
        start: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError, IndexError):  # missing, or being written
            start = read_objects(run / "environment.json")[-1]
        rows = read_ranks(
            run / "ranks",
            parse_count(start.get("processes")),
            is_running=bool(lock) or log.end is None,
        )
    state: State = log.end or "dead"
    if lock or (log.end is None and any(row.sign == "active" for row in rows)):
        state = (
            "running"  # without a lock: before rank 0 locks the directory, or no support for locks
        )
    elif log.end is None and not start and not any(row.line for row in rows):
        state = "starting"
    step, epoch, steps_in_epoch = (parse_count(log.step.get(name)) or 0 for name in _COUNTS)
    epochs = epochs or parse_count(log.step.get("epochs"))
    steps = (epochs or 0) * steps_in_epoch
    return RunStatus(
        state=state,
        epoch=epoch + 1 if "epoch" in log.step else 0,
        epochs=epochs,
        step=step,
        steps=steps or None,
        loss=log.step["loss"] if parse_number(log.step.get("loss")) is not None else None,
        ranks=rows,
        failure=log.failure,
    )


def last_lines(path: Path, size: int) -> list[bytes]:
    """Return the complete lines among the last `size` bytes of a file, which may not exist yet."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        begin = max(0, file.seek(0, 2) - size)
        file.seek(begin)
        *lines, _ = file.read(size).split(b"\n")
        if begin:
            return lines[1:]
        return lines
    return []


class _LastEvents:
    """Last step, and end of a run."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.step: dict[str, Any] = {}
        self.end: Literal["ended", "stopped", "failed"] | None = (
            None  # if the last event is the end of the run
        )
        self.failure: dict[str, Any] = {}
        for line in lines:
            self._add(parse_line(line) or {})

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind in ("step", "resume"):
            self.end = None
            self.failure = {}
        if kind == "step" and parse_count(event.get("step")) is not None:
            self.step = event
        elif kind == "end":
            self.end = "stopped" if event.get("stopped") else "ended"
        elif kind == "failure":
            self.end = "failed"
            self.failure = {name: event.get(name) for name in ("code", "text")}


def read_ranks(folder: Path, processes: int | None, *, is_running: bool) -> list[RankRow]:
    """Return one row for each of the ranks of the last start, or for each file if their number is unknown."""
    if processes is not None and processes > _MAX_RANKS:  # damaged
        processes = None
    rows = {rank: RankRow(rank) for rank in range(processes or 0)}
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and len(number) < 7 and (processes is None or int(number) in rows):
            rows[int(number)] = _read_rank(int(number), path, is_running)
    return [rows[rank] for rank in sorted(rows)]


def _read_rank(rank: int, path: Path, is_running: bool) -> RankRow:
    line = next(
        (line for text in reversed(last_lines(path, _RANK_BYTES)) if (line := parse_line(text))),
        None,
    )
    if line is None:
        return RankRow(rank)
    age = round(
        max(0.0, time.time() - path.stat().st_mtime), 1
    )  # the clock of another machine can be wrong
    if is_running and line.get("host") == socket.gethostname() and not _is_alive(line):
        return RankRow(rank, "gone", age, line)
    return RankRow(rank, "silent" if is_running and age >= SILENT_SECONDS else "active", age, line)


def _is_alive(line: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a line still runs; a process started later has only reused its number."""
    pid = parse_count(line.get("pid"))
    try:
        process = psutil.Process(-1 if pid is None else min(pid, 2**31 - 1))
        is_same = process.create_time() <= line["time"] + _START_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, ValueError):  # ValueError: no number of a process
        return False
