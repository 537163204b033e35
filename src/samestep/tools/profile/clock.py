"""What moments of a step are told by: the machine's clock, or that of a device which works by itself."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

# A moment as a clock gives it; only its own clock can read it.
Moment = Any


class Clock(Protocol):
    """Gives moments while steps run, and reads them when they are over."""

    def now(self) -> Moment:
        """This moment; it must cost next to nothing."""

    def seconds(self, moment: Moment) -> float:
        """A moment in seconds, by the machine's monotonic clock, which all of its processes share."""


class HostClock:
    """Where the host computes itself."""

    def now(self) -> Moment:
        return time.perf_counter()

    def seconds(self, moment: Moment) -> float:
        return float(moment)


class DeviceClock:
    """Where a GPU computes what the host has asked for some time before: when its stream came to a moment.

    Not run on hardware yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moment: Moment) -> float:
        moment.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(moment)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """What tells the time of what `device` does."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
