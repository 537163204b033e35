"""Events of a run, and the points of its curves."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.tools.report.curves import Points
from samestep.tools.run_lines import (
    is_stored,
    parse_count,
    parse_finite,
    parse_line,
    parse_number,
    parse_text,
    read_lines,
)

DATA_SHARE = "data_share"
_STEP_CURVES = ("loss", "lr", "grad_norm", "samples_per_second")
_NOT_METRICS = ("time", "event", "step", "epoch", "epochs", "is_best", "samples", "samples_per_second", "skipped_steps")
_NOTES = ("cache", "note", "skipped", "stop")
_STEP_KINDS = ("step", "evaluation", "resume")
_COUNTS = ("epoch", "step_in_epoch", "steps_in_epoch")  # of steps
_MAX_METRICS = 100
# Start of every line. A run that was killed can leave half a line, to which the resumed run appends.
_LINE_START = b'{"time"'


class JsonLines:
    """Iterable of the objects in a JSON-lines file; empty if the file does not exist.

    Attributes:
        unreadable: number of lines so far that a kill cut, or that are damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.unreadable = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            if not is_stored(file):
                self.unreadable += 1
                return
            for line in read_lines(file):
                value = parse_line(line)
                if value is None and line.strip(b"\0 \t\r\n"):
                    self.unreadable += 1
                    start = line.rfind(_LINE_START)
                    value = parse_line(line[start:]) if start > 0 else None
                if value is not None:
                    yield value


class EventLog:
    """Events of one run.

    Attributes:
        curves: values of steps by key, including `DATA_SHARE`.
        checksums: checksums of the state by step, in hexadecimal digits.
        metrics: values of evaluations by key, in the order of the events.
        logged: values of `World.log` by key.
        evaluations: events of evaluations by step.
        config: settings of a custom loop by the keys of a recipe; empty for a recipe.
        notes: time and text of each note.
        resumed: time of the last event before a resume, time of the resume, and its step.
        step: last completed step.
        end: event at the end of the run, which can be a failure; None if there is none.
        skipped_steps: steps without an update, because a value was not finite.
        times: Unix timestamps of all events.
        unreadable: number of lines that cannot be read.
    """

    def __init__(self, path: Path, batch_size: float | None) -> None:
        self.curves = {name: Points() for name in (*_STEP_CURVES, DATA_SHARE)}
        self.checksums: dict[int, str] = {}
        self.metrics: dict[str, Points] = {}
        self.logged: dict[str, Points] = {}
        self.config: dict[str, Any] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.notes: list[tuple[float, str]] = []
        self.resumed: list[tuple[float, float, int]] = []
        self.step = 0
        self.steps_in_epoch: int | None = None
        self.end: dict[str, Any] | None = None
        self.skipped_steps: set[int] = set()
        self.times = array("d")
        self._batch_size = batch_size
        lines = JsonLines(path)
        self.unreadable = sum(not self._add(event) for event in lines) + lines.unreadable

    def _add(self, event: dict[str, Any]) -> bool:
        """Add an event; return whether the event is valid."""
        time, kind, step = float(event["time"]), event.get("event"), parse_count(event.get("step"))
        if not isinstance(kind, str) or (kind in _STEP_KINDS and step is None):
            return False
        if kind == "step" and step is not None:
            if any(name in event and parse_count(event[name]) is None for name in _COUNTS):
                return False
            self._add_step(step, time, event)
        elif kind == "evaluation" and step is not None:
            self._add_evaluation(step, time, event)
        elif kind == "checksum" and step is not None:
            self.checksums[step] = parse_text(event.get("checksum"))
        elif kind == "resume" and step is not None:
            self._add_resume(step, time)
        elif kind == "metrics" and isinstance(event.get("values"), dict):
            self._add_values(self.logged, step or 0, time, event["values"])
        elif kind == "checkpoint" and event.get("is_best") is True and step in self.evaluations:
            self.evaluations[step]["is_best"] = True
        elif kind == "config" and isinstance(event.get("config"), dict):
            self.config = event["config"]
            self._batch_size = parse_finite(self.config.get("batch_size"))
        elif kind in _NOTES:
            self.notes.append((time, parse_text(event.get("text"))))
        self.end = event if kind in ("end", "failure") else None
        self.times.append(time)
        return True

    def _add_evaluation(self, step: int, time: float, event: dict[str, Any]) -> None:
        # A custom loop logs an evaluation for each set of data, with other names.
        self.evaluations[step] = {**self.evaluations.pop(step, {}), **event}
        self._add_values(self.metrics, step, time, event)

    def _add_values(self, curves: dict[str, Points], step: int, time: float, values: dict[str, Any]) -> None:
        for name, value in values.items():
            number = parse_number(value)
            is_known = name in curves or len(curves) < _MAX_METRICS
            if name not in _NOT_METRICS and number is not None and is_known:
                curves.setdefault(name, Points()).add(step, time, number)

    def _add_resume(self, step: int, time: float) -> None:
        self.resumed.append((self.times[-1] if self.times else time, time, step))
        self.step = step
        for points in (*self.curves.values(), *self.metrics.values(), *self.logged.values()):
            points.drop_after(step)
        self.evaluations = {at: event for at, event in self.evaluations.items() if at <= step}
        self.skipped_steps = {at for at in self.skipped_steps if at <= step}
        self.checksums = {at: value for at, value in self.checksums.items() if at <= step}

    def _add_step(self, step: int, time: float, event: dict[str, Any]) -> None:
        self.step, self.steps_in_epoch = step, parse_count(event.get("steps_in_epoch"))
        values = {name: parse_number(event.get(name)) for name in _STEP_CURVES}
        for name, value in {**values, DATA_SHARE: self._data_share(event)}.items():
            if value is not None:
                self.curves[name].add(step, time, value)
        update = self.skipped_steps.add if event.get("skipped") is True else self.skipped_steps.discard
        update(step)

    def _data_share(self, event: dict[str, Any]) -> float | None:
        seconds, speed = parse_finite(event.get("data_seconds")), parse_finite(event.get("samples_per_second"))
        number, count = event.get("step_in_epoch"), event.get("steps_in_epoch")
        # The batch of an epoch's last step can be smaller by an unknown number of samples.
        is_smaller = number == count and count != 1
        if seconds is None or speed is None or self._batch_size is None or is_smaller:
            return None
        return min(seconds * speed / self._batch_size, 1.0)
