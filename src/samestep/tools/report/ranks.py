"""What one rank did over time, from `ranks/rank-N.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.tools.report.json_lines import JsonLines, finite, text, whole


@dataclass(frozen=True)
class Span:
    """What a rank did from `begin` to `end`, times of day; the first line of a process stands for no time.

    Attributes:
        data: share of the time spent waiting for data.
        others: share spent waiting for other ranks; None where it is not known.
        step: steps done at its end.
        doing: what it did then.
        memory: the most bytes of the process seen.
        gpu_memory: the most bytes of its GPU that the process used; None without one.
        cpu: percent of one core.
        speed: own samples a second.
    """

    begin: float
    end: float
    data: float
    others: float | None
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
    """The spans of one rank.

    Attributes:
        spans: in order of time; of a long run, each stands for several lines.
        hosts: where it ran, in order.
        gpu: the name of its GPU.
        unreadable: lines that could not be read.
    """

    rank: int
    spans: list[Span] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    gpu: str | None = None
    unreadable: int = 0

    @property
    def seconds(self) -> float:
        """The time that its spans cover."""
        return sum(span.seconds for span in self.spans)

    @property
    def is_untold(self) -> bool:
        """Whether it does not know, of some of its time, how long it waited for others."""
        return any(span.others is None for span in self.spans)

    def mean(self, name: str) -> float | None:
        """The mean of `data`, `others`, `cpu` or `speed` over the time in which it is known."""
        known = [(span.seconds, getattr(span, name)) for span in self.spans if getattr(span, name) is not None]
        total = sum(seconds for seconds, _ in known)
        return sum(seconds * value for seconds, value in known) / total if total else None

    def most(self, name: str) -> float | None:
        """The largest `memory` or `gpu_memory`."""
        return max((value for span in self.spans if (value := getattr(span, name)) is not None), default=None)


def read_ranks(folder: Path, spans: int = 12000) -> list[RankLog]:
    """Every rank that has a file in `folder`, in order; about so many spans in all, or twice as many."""
    found = {}
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isascii() and number.isdigit():
            found[int(number)] = path
    limit = min(max(spans // max(len(found), 1), 40), 400)
    return [_read(rank, path, limit) for rank, path in sorted(found.items())]


def _read(rank: int, path: Path, limit: int) -> RankLog:
    log, lines = RankLog(rank), JsonLines(path)
    process: object = None
    for line in lines:
        time = finite(line.get("time"))
        if time is None:
            continue
        last = log.spans[-1].end if log.spans else 0.0
        is_first = (line.get("host"), line.get("pid")) != process
        process = (line.get("host"), line.get("pid"))
        if time > last:
            log.spans.append(_span(time if is_first else last, time, line))
        host, gpu = text(line.get("host")), line.get("gpu")
        if host and host not in log.hosts:
            log.hosts.append(host)
        if isinstance(gpu, dict):
            log.gpu = text(gpu.get("name")) or log.gpu
        if len(log.spans) >= 2 * limit:
            log.spans = _merged_in_pairs(log.spans)
            limit = max(limit, len(log.spans))  # of very many short parts, none can be merged
    log.unreadable = lines.unreadable
    return log


def _span(begin: float, end: float, line: dict[str, Any]) -> Span:
    data, others = _share(line.get("data_share")) or 0.0, _share(line.get("wait_share"))
    told = line.get("gpu")
    gpu = told if isinstance(told, dict) else {}
    # The process's own peak where it is told, which other users of the GPU have no part in.
    used = (finite(gpu.get(name)) for name in ("peak_allocated_bytes", "memory_bytes"))
    return Span(
        begin,
        end,
        data=data,
        others=None if others is None else min(others, 1.0 - data),
        step=whole(line.get("step")) or 0,
        doing=text(line.get("doing")),
        memory=finite(line.get("memory_bytes")),
        gpu_memory=next((value for value in used if value is not None), None),
        cpu=finite(line.get("cpu_percent")),
        speed=finite(line.get("samples_per_second")),
    )


def _share(value: object) -> float | None:
    found = finite(value)
    return None if found is None else min(max(found, 0.0), 1.0)


def _merged_in_pairs(spans: list[Span]) -> list[Span]:
    """Neighbours as one; the first and the last of two parts of a run are none."""
    merged: list[Span] = []
    is_whole = True
    for span in spans:
        if not is_whole and merged[-1].end == span.begin:
            merged[-1] = _merged(merged[-1], span)
            is_whole = True
        else:
            merged.append(span)
            is_whole = False
    return merged


def _merged(one: Span, two: Span) -> Span:
    return replace(
        two,
        begin=one.begin,
        data=_mean(one, two, "data") or 0.0,
        others=None if one.others is None or two.others is None else _mean(one, two, "others"),
        memory=_largest(one.memory, two.memory),
        gpu_memory=_largest(one.gpu_memory, two.gpu_memory),
        cpu=_mean(one, two, "cpu"),
        speed=_mean(one, two, "speed"),
    )


def _mean(one: Span, two: Span, name: str) -> float | None:
    first: float | None = getattr(one, name)
    second: float | None = getattr(two, name)
    if first is None or second is None:
        return second if first is None else first
    both = one.seconds + two.seconds
    return (first * one.seconds + second * two.seconds) / both if both else second


def _largest(one: float | None, two: float | None) -> float | None:
    return max((value for value in (one, two) if value is not None), default=None)
