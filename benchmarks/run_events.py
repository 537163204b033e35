"""When the first step of a run was done, from the events that it writes."""

from __future__ import annotations

import json
import time
from pathlib import Path


def first_step_event(folder: Path, processes: int) -> float | None:
    """When the first event of a step appeared in some `events.jsonl` below `folder`; None if there is none yet.

    An event has its time (`time`, seconds since 1970); an event without one gets the time of its detection.
    """
    now = time.time()
    for file in folder.glob("runs/*/events.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") == "step":
                return float(event.get("time", now))
    return None


def step_event_after(folder: Path, moment: float) -> float | None:
    """The time of the first step that was done after `moment`, in seconds since 1970; None if there is none yet."""
    for file in folder.glob("runs/*/events.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") == "step" and event["time"] > moment:
                return float(event["time"])
    return None
