"""`samestep top`: state of a run and its ranks, from the ends of its files, and its screen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samestep.checkpoint.folder_lock import is_locked
from samestep.distributed.disk_operations import regular_file
from samestep.loggers.logger import format_metric
from samestep.number_text import format_bytes
from samestep.recipes.recipe_files import read_yaml
from samestep.report_text import printable
from samestep.runs import LOOP
from samestep.tools.run_log import (
    EventLog,
    parse_count,
    parse_finite,
    parse_line,
    parse_number,
    read_objects,
    run_errors,
)

SILENT_SECONDS = 10.0
_EVENT_BYTES = 1 << 18  # some hundred steps
_RANK_BYTES = 1 << 16  # some hundred lines, of which only the last is used
_MAX_RANKS = 100_000
_STYLES = {"silent": "yellow", "missing": "yellow"}
# Title, format and keys in a rank's line of each column.
_COLUMNS = (
    ("step", "{:,.0f}".format, ("step",)),
    ("samples/s", "{:,.0f}".format, ("samples_per_second",)),
    ("data", "{:.0%}".format, ("data_share",)),
    ("wait", "{:.0%}".format, ("wait_share",)),
    ("CPU", "{:.0f}%".format, ("cpu_percent",)),
    ("memory", format_bytes, ("memory_bytes",)),
    ("GPU", "{:.0f}%".format, ("gpu", "use_percent")),
    ("GPU memory", format_bytes, ("gpu", "memory_bytes")),
)
# starting: no rank has written. failed: rank 0 has logged a failure. dead: no process holds the
# lock, and the run has logged no end.
State = Literal["starting", "running", "stopped", "ended", "failed", "dead"]


@dataclass(frozen=True)
class RankRow:
    """State of one rank."""

    rank: int
    # silent: no line for some seconds. missing: no line at all.
    sign: Literal["active", "silent", "missing"] = "missing"
    age_seconds: float | None = None  # since the last line
    line: Mapping[str, Any] = field(default_factory=dict)  # last line; see docs/guides/runs.md


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
        epochs = None
        if not is_loop:
            epochs = parse_count(read_yaml(run / "recipe.yaml").get("epochs"))
        lock = is_locked(run)  # before the events: a run logs its end while it holds the lock
        lines = _last_lines(run / "events.jsonl", _EVENT_BYTES)
        log = EventLog(filter(None, map(parse_line, lines)))
        end, failure = _end_of(log)
        start: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError, IndexError):  # missing, or being written
            start = read_objects(run / "environment.json")[-1]
        processes = parse_count(start.get("processes"))
        rows = _read_ranks(run / "ranks", processes, is_running=bool(lock) or end is None)
    state: State = end or "dead"
    # Without a lock: before rank 0 locks the directory, or no support for locks.
    if lock or (end is None and any(row.sign == "active" for row in rows)):
        state = "running"
    elif end is None and not start and not any(row.line for row in rows):
        state = "starting"
    last_step = log.last
    epochs = epochs or parse_count(last_step.get("epochs"))
    epoch = 0
    if "epoch" in last_step:
        epoch = 1 + (parse_count(last_step["epoch"]) or 0)
    loss = last_step.get("loss")
    if parse_number(loss) is None:
        loss = None
    steps = (epochs or 0) * (parse_count(last_step.get("steps_in_epoch")) or 0)
    return RunStatus(
        state=state,
        epoch=epoch,
        epochs=epochs,
        step=log.step,
        steps=steps or None,
        loss=loss,
        ranks=rows,
        failure=failure,
    )


def _last_lines(path: Path, size: int) -> list[bytes]:
    """Return the complete lines among the last `size` bytes of a file, which may not exist yet."""
    with suppress(FileNotFoundError), open(path, "rb", opener=regular_file) as file:
        begin = max(0, file.seek(0, 2) - size)
        file.seek(begin)
        # Not to the end: the file can grow meanwhile.
        *lines, _ = file.read(size).split(b"\n")
        return lines[begin > 0 :]  # the first line is not complete
    return []


def _end_of(log: EventLog) -> tuple[State | None, dict[str, Any]]:
    """Return the state of a run that has ended, and its failure."""
    if log.end is None:
        return None, {}
    if log.end["event"] == "failure":
        return "failed", {name: log.end.get(name) for name in ("code", "text")}
    if log.end.get("stopped"):
        return "stopped", {}
    return "ended", {}


def _rank_files(folder: Path) -> dict[int, Path]:
    """Return the files `rank-N.jsonl` in a folder, by rank."""
    paths = {path.stem.removeprefix("rank-"): path for path in folder.glob("rank-*.jsonl")}
    # The glob also matches names such as `rank-x` and `rank-00000000`.
    ranks = {int(text): path for text, path in paths.items() if text.isdecimal() and len(text) < 7}
    return dict(sorted(ranks.items()))


def _read_ranks(folder: Path, processes: int | None, *, is_running: bool) -> list[RankRow]:
    """Return a row for each rank of the last start, or for each file if their number is unknown."""
    files = _rank_files(folder)
    ranks = list(files)
    if processes is not None and processes <= _MAX_RANKS:  # otherwise damaged
        ranks = list(range(processes))
    return [
        _read_rank(rank, files[rank], is_running) if rank in files else RankRow(rank)
        for rank in ranks
    ]


def _read_rank(rank: int, path: Path, is_running: bool) -> RankRow:
    lines = map(parse_line, reversed(_last_lines(path, _RANK_BYTES)))
    line = next(filter(None, lines), None)
    if line is None:
        return RankRow(rank)
    # The clock of another machine can be wrong.
    age = round(max(0.0, time.time() - path.stat().st_mtime), 1)
    # After the end of the run, all ranks are silent.
    if is_running and age >= SILENT_SECONDS:
        return RankRow(rank, "silent", age, line)
    return RankRow(rank, "active", age, line)


def render(folder: Path, status: RunStatus) -> RenderableType:
    """Return the state, progress and values of a run, and one row per rank."""
    parts = [f"{printable(str(folder))}  {status.state}"]
    if status.epoch or status.epochs:
        parts.append(f"epoch {status.epoch}/{status.epochs or '?'}")
    parts.append(f"step {status.step:,}")
    if status.steps:
        parts[-1] += f"/{status.steps:,}"
    if isinstance(status.loss, str):
        parts.append(f"loss {status.loss}")
    elif status.loss is not None:
        parts.append(f"loss {format_metric('loss', status.loss)}")
    if status.failure:
        parts.append(f"{status.failure['text']} [{status.failure['code']}]")
    table = Table(box=None, pad_edge=False, header_style="dim")
    cells = [[_cell(row.line, keys, form) for _, form, keys in _COLUMNS] for row in status.ranks]
    used = [number for number in range(len(_COLUMNS)) if any(row[number] != "-" for row in cells)]
    for title in ("rank", *(_COLUMNS[number][0] for number in used), "age"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("activity")  # the only column that shrinks
    for row, values_of_rank in zip(status.ranks, cells, strict=True):
        age = "not yet"
        if row.age_seconds is not None:
            age = f"{row.age_seconds:.0f} s"
        if row.sign != "active":
            age = f"{row.sign} {age}"
        activity = Text(str(row.line.get("doing", "-")), no_wrap=True, overflow="ellipsis")
        texts = [str(row.rank), *(values_of_rank[number] for number in used), age]
        table.add_row(*texts, activity, style=_STYLES.get(row.sign, ""))
    return Group(Text("  ".join(parts)), table)


def _cell(line: Any, keys: tuple[str, ...], form: Any) -> str:
    for key in keys:
        line = line.get(key) if isinstance(line, dict) else None
    value = parse_finite(line)
    if value is None:
        return "-"
    return str(form(value))
