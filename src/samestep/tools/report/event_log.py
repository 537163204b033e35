"""What `events.jsonl` tells of a run."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy

from samestep.tools.report.json_lines import JsonLines, finite, number, text, whole
from samestep.tools.report.series import Floats, Points

_STEP_CURVES = ("loss", "lr", "grad_norm", "samples_per_second")
DATA_SHARE = "data_share"
_NOT_METRICS = ("time", "event", "step", "epoch", "epochs", "is_best", "samples", "samples_per_second")
_TOLD = ("note", "skipped", "stop")


class EventLog:
    """The events of one run, read to the end of the file.

    Attributes:
        curves: of steps, by key; also the share of a step that was spent waiting for data.
        metrics: of evaluations, by key, in the order in which they are told.
        evaluations: events, by step.
        notes: what was told in words, each with its time.
        resumed: for each time the run was resumed: when it was heard before, when it told so, and its step.
        step: the last that was done.
        steps_in_epoch: as the last step said.
        end: the event that ended the run; None where none did.
        skipped_steps: that changed nothing, because something was not finite.
        unreadable: lines that could not be read.
    """

    def __init__(self, path: Path, batch_size: float | None) -> None:
        self.curves = {name: Points() for name in (*_STEP_CURVES, DATA_SHARE)}
        self.metrics: dict[str, Points] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.notes: list[tuple[float, str]] = []
        self.resumed: list[tuple[float, float, int]] = []
        self.step = 0
        self.steps_in_epoch: int | None = None
        self.end: dict[str, Any] | None = None
        self.skipped_steps: set[int] = set()
        self._times = array("d")
        self._batch_size = batch_size
        lines = JsonLines(path)
        for event in lines:
            self._hear(event)
        self.unreadable = lines.unreadable

    @property
    def times(self) -> Floats:
        """When each event was told."""
        return numpy.array(self._times)

    def _hear(self, event: dict[str, Any]) -> None:
        time, kind, step = finite(event.get("time")), event.get("event"), whole(event.get("step"))
        if time is None:
            return
        if kind == "step" and step is not None:
            self._hear_step(step, time, event)
        elif kind == "evaluation" and step is not None:
            self._hear_evaluation(step, time, event)
        elif kind == "resume" and step is not None:
            before = self._times[-1] if self._times else time
            self.resumed.append((before, time, step))
            self.step = step
        elif kind in _TOLD:
            self.notes.append((time, text(event.get("text"))))
        self.end = event if kind == "end" else None
        self._times.append(time)

    def _hear_step(self, step: int, time: float, event: dict[str, Any]) -> None:
        self.step, self.steps_in_epoch = step, whole(event.get("steps_in_epoch"))
        for name in _STEP_CURVES:
            value = number(event.get(name))
            if value is not None:
                self.curves[name].add(step, time, value)
        share = self._data_share(event)
        if share is not None:
            self.curves[DATA_SHARE].add(step, time, share)
        if event.get("skipped") is True:
            self.skipped_steps.add(step)
        else:
            self.skipped_steps.discard(step)

    def _data_share(self, event: dict[str, Any]) -> float | None:
        """Speed is told in samples, and how many the last batch of an epoch has is not; it has no share."""
        waited, speed = finite(event.get("data_seconds")), finite(event.get("samples_per_second"))
        place, places = event.get("step_in_epoch"), event.get("steps_in_epoch")
        if waited is None or speed is None or self._batch_size is None or (place == places and places != 1):
            return None
        return min(waited * speed / self._batch_size, 1.0)

    def _hear_evaluation(self, step: int, time: float, event: dict[str, Any]) -> None:
        self.evaluations[step] = event
        for name, value in event.items():
            found = number(value)
            if name not in _NOT_METRICS and found is not None:
                self.metrics.setdefault(name, Points()).add(step, time, found)
