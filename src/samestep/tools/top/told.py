"""What the events of a run tell, up to the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from samestep.record.events import read_line

_STEP = b'"event": "step"'
_HEAD = 80  # bytes of a line, in which its kind stands
# Of many steps that are read at once, one in so many says how fast they were.
_EACH = 64
_WINDOW_SECONDS = 600.0
_SAMPLE_SECONDS = 1.0
_NOT_VALUES = ("event", "time", "step", "epochs", "train_loss", "is_best", "samples_per_second")


class Told:
    """Hears events.

    Attributes:
        last_step: the newest event of a step.
        evaluation: the newest evaluation.
        ended_as: `ended` or `stopped` where the run has told its end, and nothing since.
        unreadable: lines that are no events, among those that were not passed over.
    """

    def __init__(self) -> None:
        self.last_step: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.ended_as: Literal["ended", "stopped"] | None = None
        self.unreadable = 0
        self._speed: deque[tuple[float, int]] = deque()  # times, and steps done by then

    def hear(self, lines: Iterable[bytes]) -> None:
        """Take in lines of `events.jsonl`; of steps that follow one another, most are only passed over."""
        passed = b""
        for number, line in enumerate(lines):
            if _STEP in line[:_HEAD] and number % _EACH:
                passed = line
                continue
            if passed and _STEP not in line[:_HEAD]:
                self._take(passed)
            passed = b""
            self._take(line)
        if passed:
            self._take(passed)

    def seconds_a_step(self, until: float = 0.0) -> float | None:
        """Over the last minutes, evaluations and pauses in them; None where too little is known.

        Args:
            until: a time, by the same clock, by which there was no later step.
        """
        if len(self._speed) < 2:
            return None
        (began, first), (ended, last) = self._speed[0], self._speed[-1]
        return (max(ended, until) - began) / (last - first) if last > first else None

    @property
    def values(self) -> dict[str, Any]:
        """What was evaluated last: its `epoch`, `loss`, `samples` and metrics; empty if nothing was."""
        return {name: value for name, value in self.evaluation.items() if name not in _NOT_VALUES}

    def _take(self, line: bytes) -> None:
        event = read_line(line)
        if event is None:
            self.unreadable += bool(line)
            return
        kind = event.get("event")
        if kind == "step":
            self._take_step(event)
        elif kind == "evaluation":
            self.evaluation = event
        elif kind == "resume":
            self.ended_as = None
            self._speed.clear()
        elif kind == "end":
            self.ended_as = "stopped" if event.get("stopped") else "ended"

    def _take_step(self, event: dict[str, Any]) -> None:
        self.last_step, self.ended_as = event, None
        moment = float(event["time"]), int(event["step"])
        if self._speed and moment[1] < self._speed[-1][1]:
            self._speed.clear()  # begun anew from an earlier one
        if len(self._speed) > 1 and moment[0] - self._speed[-2][0] < _SAMPLE_SECONDS:
            self._speed.pop()
        self._speed.append(moment)
        while moment[0] - self._speed[0][0] > _WINDOW_SECONDS and len(self._speed) > 2:
            self._speed.popleft()
