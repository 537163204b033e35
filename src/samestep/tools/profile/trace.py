"""Traces of several ranks merged into one file, on one clock, with the phases and collectives of each rank.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open the file: one process per rank.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.tools.profile.measurements import Step

CLOCK_MARK = "samestep.clock"  # event with a known time on the clock of the machine
_TRACE_NAME = re.compile(r"rank-(\d+)\.\d+\.pt\.trace\.json\.gz")
_THREAD_NAMES = {1: "phases of the step", 2: "communication in the background", 3: "in collectives"}
_PHASES, _BACKGROUND, _COLLECTIVES = _THREAD_NAMES  # no thread ids of the kernel
_FIRST_OTHER_PROCESS = 1000  # number of the first process of a trace that is not the rank, such as a GPU
_MICRO = 1e6

Event = dict[str, Any]


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
