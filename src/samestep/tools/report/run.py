"""Content of a run's directory, including the activity of each rank from `ranks/rank-N.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointError, InputError
from samestep.loggers.logger import to_json
from samestep.metrics.metrics import BestRule
from samestep.recipes.recipe_files import read_yaml
from samestep.runs import LOOP
from samestep.tools.report.curves import RunClock
from samestep.tools.report.events import EventLog, JsonLines
from samestep.tools.run_lines import parse_count, parse_finite, parse_number, parse_text, read_objects, run_errors
from samestep.units import plural

_MAX_DIGITS = 6  # of the number of a rank


@dataclass(frozen=True)
class Span:
    """Activity of a rank between two lines of its file; the first line of a process has a duration of 0.

    Attributes:
        begin: Unix timestamp, as is `end`.
        data: share of the time in which the rank waited for data.
        wait: share in which the rank waited for other ranks; None if unknown.
        step: completed steps at the end, as is `doing`.
        memory: largest resident memory of the process in bytes, as is `gpu_memory`, which is None without a GPU.
        cpu: percent of one core.
        speed: samples per second of this rank.
    """

    begin: float
    end: float
    data: float
    wait: float | None
    step: int
    doing: str
    memory: float | None
    gpu_memory: float | None
    cpu: float | None
    speed: float | None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class RankLog:
    """Spans of one rank, ordered by time. In a long run, each span covers several lines of the file."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    gpu: str | None = None
    unreadable: int = 0

    @property
    def has_unknown_wait(self) -> bool:
        return any(span.wait is None for span in self.spans)

    def mean(self, name: str) -> float | None:
        """Return the mean of `data`, `wait`, `cpu` or `speed` over the time in which the value is known."""
        known = [(span.seconds, value) for span in self.spans if (value := getattr(span, name)) is not None]
        total = sum(seconds for seconds, _ in known)
        return sum(seconds * value for seconds, value in known) / total if total else None

    def largest(self, name: str) -> float | None:
        """Return the maximum of `memory` or `gpu_memory`."""
        return max((value for span in self.spans if (value := getattr(span, name)) is not None), default=None)


def read_ranks(folder: Path, spans: int = 12000) -> list[RankLog]:
    """Return the ranks with a file in `folder`, in order, with `spans` to twice as many spans in total."""
    paths = {}
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS:
            paths[int(number)] = path
    limit = min(max(spans // max(len(paths), 1), 40), 400)
    return [_read(rank, path, limit) for rank, path in sorted(paths.items())]


def _read(rank: int, path: Path, limit: int) -> RankLog:
    log, lines = RankLog(rank), JsonLines(path)
    previous: object = None
    for line in lines:
        time = float(line["time"])
        last = log.spans[-1].end if log.spans else 0.0
        process = line.get("host"), line.get("pid")
        if time > last:
            log.spans.append(_span(last if process == previous else time, time, line))
        previous = process
        host, gpu = parse_text(line.get("host")), line.get("gpu")
        if host and host not in log.hosts:
            log.hosts.append(host)
        if isinstance(gpu, dict):
            log.gpu = parse_text(gpu.get("name")) or log.gpu
        if len(log.spans) >= 2 * limit:
            log.spans = _merge_pairs(log.spans)
            limit = max(limit, len(log.spans))  # very many short parts of a run cannot be merged
    log.unreadable = lines.unreadable
    return log


def _span(begin: float, end: float, line: dict[str, Any]) -> Span:
    data, wait = _share(line.get("data_share")) or 0.0, _share(line.get("wait_share"))
    gpu = line["gpu"] if isinstance(line.get("gpu"), dict) else {}
    # If known, the peak of the process, which excludes other processes on the GPU.
    memory = (parse_finite(gpu.get(name)) for name in ("peak_allocated_bytes", "memory_bytes"))
    return Span(
        begin,
        end,
        data=data,
        wait=None if wait is None else min(wait, 1.0 - data),
        step=parse_count(line.get("step")) or 0,
        doing=parse_text(line.get("doing")),
        memory=parse_finite(line.get("memory_bytes")),
        gpu_memory=next((value for value in memory if value is not None), None),
        cpu=parse_finite(line.get("cpu_percent")),
        speed=parse_finite(line.get("samples_per_second")),
    )


def _share(value: object) -> float | None:
    number = parse_finite(value)
    return None if number is None else min(max(number, 0.0), 1.0)


def _merge_pairs(spans: Sequence[Span]) -> list[Span]:
    """Return spans with neighbors merged, except over the pause between two parts of a run."""
    merged: list[Span] = []
    is_pair = True
    for span in spans:
        is_pair = not is_pair and merged[-1].end == span.begin
        if is_pair:
            merged[-1] = _merge(merged[-1], span)
        else:
            merged.append(span)
    return merged


def _merge(first: Span, second: Span) -> Span:
    pair = RankLog(0, [first, second])
    return replace(
        second,
        begin=first.begin,
        data=pair.mean("data") or 0.0,
        wait=None if pair.has_unknown_wait else pair.mean("wait"),
        memory=pair.largest("memory"),
        gpu_memory=pair.largest("gpu_memory"),
        cpu=pair.mean("cpu"),
        speed=pair.mean("speed"),
    )


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, which is not verified: Unix timestamp of the newest file, and bytes of each file by name."""

    step: int
    names: tuple[str, ...]
    written: float
    sizes: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Run:
    """One run of a report."""

    folder: Path
    name: str  # unique name within the report
    recipe: dict[str, Any]  # recipe as plain data; `recipe_text` is the YAML
    recipe_text: str
    starts: list[dict[str, Any]]  # entries of `environment.json`, one for each start and resume
    events: EventLog
    ranks: list[RankLog]
    checkpoints: list[SavedCheckpoint]
    remarks: list[str]  # parts of the directory that cannot be read

    @cached_property
    def clock(self) -> RunClock:
        """Converter of Unix timestamps into seconds of the run."""
        active = [time for log in self.ranks for span in log.spans for time in (span.begin, span.end)]
        times = numpy.concatenate([numpy.array(self.events.times), numpy.array(active)])
        return RunClock(times, [(before, after) for before, after, _ in self.events.resumed])

    @property
    def state(self) -> str:
        """`finished`, `stopped`, `failed`, or `not ended` if the run still trains or was killed."""
        if self.events.end is None:
            return "not ended"
        if self.events.end.get("event") == "failure":
            return "failed"
        return "stopped" if self.events.end.get("stopped") is True else "finished"

    @property
    def best(self) -> dict[str, Any] | None:
        """Last evaluation marked as best; without marks, that with the best value, or None if its direction is unknown.

        A custom loop marks evaluations only if it passes them to its checkpoints.
        """
        events = list(self.events.evaluations.values())
        marked = next((event for event in reversed(events) if event.get("is_best") is True), None)
        if marked is not None or self.deciding is None:
            return marked
        try:
            rule = BestRule.of(self.deciding, self.recipe.get("best_mode"))
        except InputError:  # the direction is unknown
            return None
        best, value = None, None
        for event in events:
            values = self.evaluation_values(event)
            if rule.by in values and rule.is_best(values, value):
                best, value = event, values[rule.by]
        return best

    @property
    def last(self) -> dict[str, Any] | None:
        """Evaluation of the highest step."""
        return self.events.evaluations[max(self.events.evaluations)] if self.events.evaluations else None

    @property
    def deciding(self) -> str | None:
        """Name of the value that selects the best evaluation: `best_by`, the first metric, or the loss."""
        chosen = self.recipe.get("best_by")
        if isinstance(chosen, str) and chosen in self.events.metrics:
            return chosen
        losses = ("train_loss", "loss", "loss_")  # terms of a loss are named loss_NAME
        names = [name for name in self.events.metrics if not name.startswith(losses)]
        return next((name for name in (*names, "loss") if name in self.events.metrics), None)

    def evaluation_values(self, event: dict[str, Any] | None) -> dict[str, float]:
        """Return the loss and the metrics of an evaluation, without values that are no numbers."""
        values = {name: parse_number((event or {}).get(name)) for name in self.events.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def statistic(self, curve: str, name: str) -> float | None:
        """Return `min`, `max`, `mean`, `median` or `last` of a curve over steps."""
        statistics = self.events.curves[curve].series(self.clock).statistics()
        return None if statistics is None else statistics[name]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in directories, named after them, or by their paths if two directories have the same name.

    Raises:
        InputError: a directory is not a run, cannot be read, or is listed twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise InputError(f"{folders[number]} is listed twice", expected="each run once", fix="remove one of them")
    names = [folder.name for folder in resolved]
    is_unique = len(set(names)) == len(names)
    return [read_run(folder, name if is_unique else str(folder)) for folder, name in zip(folders, names, strict=True)]


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
        events = EventLog(folder / "events.jsonl", parse_finite(recipe.get("batch_size")))
        ranks = read_ranks(folder / "ranks")
        starts, remarks = _read_starts(folder / "environment.json")
        logs = {"events.jsonl": events.unreadable, **{f"ranks/rank-{log.rank}.jsonl": log.unreadable for log in ranks}}
        for file, count in logs.items():
            if count:
                remarks.append(f"{file}: {plural(count, 'unreadable line')} skipped")
        recipe = events.config if is_loop else recipe
        text = to_json(recipe) if is_loop else path.read_text(encoding="utf-8")
        checkpoints = _read_checkpoints(folder / "checkpoints")
    return Run(folder, name, recipe, text, starts, events, ranks, checkpoints, remarks)


def _read_starts(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the entries of `environment.json`, and remarks."""
    if not path.is_file():
        return [], []
    try:
        return read_objects(path), []
    except ValueError as error:
        return [], [f"{path.name} cannot be read: {error}"]


def _read_checkpoints(path: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a folder, oldest first."""
    folder, targets = CheckpointFolder(path), {}
    for name in ("best", "last"):
        with suppress(CheckpointError):  # there is none of this name
            targets[name] = folder.find(name)
    checkpoints = []
    for checkpoint in folder.steps():
        with suppress(FileNotFoundError):  # the run has removed or replaced it since
            files = {file.name: file.stat() for file in sorted(checkpoint.iterdir()) if file.is_file()}
            checkpoints.append(
                SavedCheckpoint(
                    step=int(checkpoint.name.rpartition("-")[2]),
                    names=tuple(name for name, target in targets.items() if target == checkpoint),
                    written=max((status.st_mtime for status in files.values()), default=0.0),
                    sizes={name: status.st_size for name, status in files.items()},
                )
            )
    return checkpoints
