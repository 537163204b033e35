"""The traces of several ranks as one, by one clock, with what they spent their time on beside it.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open it: one process a rank, named by it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.tools.profile.steps import Step

# An event in a rank's trace whose time is known by the machine's own clock too.
CLOCK_MARK = "samestep.clock"
_PHASES, _BESIDE, _USERS = "phases of the step", "communication beside it", "in collectives"
# Numbers of these threads; the kernel gives no such.
_THREADS = {_PHASES: 1, _BESIDE: 2, _USERS: 3}
# Processes that a trace has besides its rank's own, such as those of GPUs, begin with.
_OTHERS = 1000
_MICRO = 1e6

Event = dict[str, Any]


def read_trace(path: Path) -> dict[str, Any]:
    """A trace that torch's profiler wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def merged(traces: Mapping[int, dict[str, Any]], marks: Mapping[int, float], steps: Sequence[Sequence[Step]]) -> Event:
    """One trace.

    Args:
        traces: by rank.
        marks: by rank, the seconds at which its trace has its mark, by the clock that steps are told by.
        steps: of all ranks, also those that have no trace.
    """
    zero = min((each.begin for own in steps for each in own), default=0.0)
    events: list[Event] = []
    for rank, own in enumerate(steps):
        events += _names(rank)
        events += _spans(rank, own, zero)
    for rank, trace in traces.items():
        events += _moved(rank, trace["traceEvents"], marks[rank], zero)
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(max(0.0, event["ts"] - first), 3)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_merged(
    path: Path, files: Mapping[int, Path], marks: Mapping[int, float], steps: Sequence[Sequence[Step]]
) -> None:
    """Write it, compressed."""
    whole = merged({rank: read_trace(file) for rank, file in files.items()}, marks, steps)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(whole, file)


def _names(rank: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for name, thread in _THREADS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread - 10}}


def _spans(rank: int, steps: Sequence[Step], zero: float) -> Iterator[Event]:
    for step in steps:
        for each in step.segments:
            yield _span(each.phase, rank, _PHASES, each.begin - zero, each.end - zero, {"step": step.number})
        for meeting in step.meetings:
            thread = _BESIDE if meeting.is_beside else _USERS
            about = {"step": step.number, "at": meeting.site or "the engine"}
            yield _span(meeting.what, rank, thread, meeting.begin - zero, meeting.end - zero, about)


def _span(name: str, rank: int, thread: str, begin: float, end: float, about: Event) -> Event:
    return {
        "ph": "X",
        "cat": "samestep",
        "name": name,
        "pid": rank,
        "tid": _THREADS[thread],
        "ts": round(begin * _MICRO, 3),
        "dur": round((end - begin) * _MICRO, 3),
        "args": about,
    }


def _moved(rank: int, events: Sequence[Event], mark: float, zero: float) -> Iterator[Event]:
    """The events of a rank by the common clock, its processes and flows under numbers that no other rank has."""
    marked = next(event for event in events if event.get("name") == CLOCK_MARK)
    late = (mark - zero) * _MICRO - marked["ts"]
    others: dict[Any, int] = {marked["pid"]: rank}
    for event in events:
        process = event.get("pid", marked["pid"])
        if isinstance(process, str):
            continue  # what the profiler says of itself
        number = others.setdefault(process, _OTHERS * (rank + 1) + len(others))
        changed = {**event, "pid": number}
        if event["ph"] == "M":
            if process == marked["pid"] and event["name"].startswith("process_"):
                continue  # it has the rank's name by now
            if event["name"] == "process_name":
                changed["args"] = {"name": f"rank {rank}: {event['args'].get('name')}"}
        if "ts" in event:
            changed["ts"] = event["ts"] + late
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"
        yield changed
