"""torch's profiler on one rank: its trace, and what is read off it."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from samestep.tools.profile.intervals import Interval, length
from samestep.tools.profile.measured import Traced
from samestep.tools.profile.merge import CLOCK_MARK

FOLDER = "tensorboard"
_MOST_OPERATORS = 10
_COMMUNICATING = ("gloo:", "nccl:", "c10d::", "ncclKernel", "ncclDevKernel")
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_MICRO = 1e-6
# An operator that takes less is over sooner than it is called.
_SMALL = 20 * _MICRO


class Tracing:
    """Has torch's profiler look at some steps.

    Args:
        folder: the trace goes to `tensorboard` in it, under a name that TensorBoard's plugin reads.
    """

    def __init__(self, rank: int, device: torch.device, folder: Path, *, warmup: int, traced: int) -> None:
        self.found: Traced | None = None
        self._traced = traced
        self._write = tensorboard_trace_handler(str(folder / FOLDER), worker_name=f"rank-{rank}", use_gzip=True)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warmup, active=traced, repeat=1),
            on_trace_ready=self._take,
        )

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Look at what happens in the block, which calls what it is given after each step."""
        self._profile.start()
        try:
            yield self._profile.step
        finally:
            self._profile.stop()

    def _take(self, profiler: profile) -> None:
        self._write(profiler)
        self.found = read(list(profiler.events() or ()), self._traced)


def mark(now: Callable[[], float]) -> float:
    """Put a mark into the trace by which it can be laid beside others; the time at which it is."""
    with record_function(CLOCK_MARK):
        return now()


def read(events: Sequence[Any], steps: int) -> Traced:
    """What profiler events of some steps say, a step.

    Args:
        events: torch's `FunctionEvent`s.
    """
    host = [each for each in events if each.device_type == DeviceType.CPU]
    operators = [each for each in host if not each.is_user_annotation]
    device = [each for each in events if each.device_type != DeviceType.CPU]
    talking = [each for each in events if each.name.startswith(_COMMUNICATING)]
    synchronising = [each for each in host if each.name in _SYNCHRONISING]
    whole = sorted(_interval(each) for each in host if each.name.startswith("ProfilerStep"))
    least = _least(operators, whole)
    return Traced(
        operators=_longest(operators, steps),
        count=len(operators) / steps,
        small=sum(1 for seconds in least if seconds < _SMALL),
        working_seconds=sum(seconds for seconds in least if seconds >= _SMALL),
        communication_seconds=length(map(_interval, talking)) / steps,
        synchronisations=len(synchronising) / steps,
        synchronising_seconds=length(map(_interval, synchronising)) / steps,
        busy_seconds=length(map(_interval, device)) / steps if device else None,
        step_seconds=length(whole) / steps,
    )


def _least(operators: Sequence[Any], steps: Sequence[Interval]) -> list[float]:
    """What each operator of a step takes by itself, in the step in which it takes least.

    Operators of two steps are the same if they have one name and are the n-th of that name in their step.
    """
    begins = [begin for begin, _ in steps]
    counts: list[Counter[str]] = [Counter() for _ in steps]
    found: list[dict[tuple[str, int], float]] = [{} for _ in steps]
    for each in sorted(operators, key=lambda event: event.time_range.start):
        place = bisect(begins, each.time_range.start * _MICRO) - 1
        if place >= 0:
            counts[place][each.name] += 1
            found[place][each.name, counts[place][each.name]] = each.self_cpu_time_total * _MICRO
    same = set.intersection(*map(set, found)) if found else set()
    return [min(of_step[key] for of_step in found) for key in same]


def _longest(operators: Sequence[Any], steps: int) -> list[tuple[str, float, float]]:
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for each in operators:
        own = each.self_device_time_total or each.self_cpu_time_total
        calls[each.name] = calls.get(each.name, 0) + 1
        seconds[each.name] = seconds.get(each.name, 0.0) + own * _MICRO
    names = sorted(seconds, key=lambda name: -seconds[name])[:_MOST_OPERATORS]
    return [(name, calls[name] / steps, seconds[name] / steps) for name in names]


def _interval(event: Any) -> Interval:
    return event.time_range.start * _MICRO, event.time_range.end * _MICRO
