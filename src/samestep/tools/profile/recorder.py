"""Records of one rank: phases and collectives of an engine's steps, and the summary of torch's profiler."""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType, Variable
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.interception import call_site, intercept_collectives
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.step_stats import StepResult
from samestep.tools.profile.measurements import Collective, Interval, Phase, ProfilerSummary, Segment, Step, length

_OPERATORS_LISTED = 10
_COMMUNICATION = ("gloo:", "nccl:", "c10d::", "ncclKernel", "ncclDevKernel")
_SYNCHRONIZATION = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_MICROSECOND = 1e-6
_SMALL = 20 * _MICROSECOND  # computing such an operator takes less time than calling it


class Clock:
    """Clock of computation: of the host on a CPU; on a GPU, the times at which its stream reaches an event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if is_accelerator(device) else None
        self._base = self.now()
        if self._device is not None:
            self._base.synchronize()
            self._base_seconds = time.perf_counter()

    def now(self) -> Any:
        """Return the current time, at the least cost, for `seconds`."""
        if self._device is None:
            return time.perf_counter()
        event = accelerator_module().Event(enable_timing=True)
        event.record(accelerator_module().current_stream(self._device))
        return event

    def seconds(self, moment: Any) -> float:
        """Return a time in seconds of the monotonic clock that all processes of the machine share."""
        if self._device is None:
            return float(moment)
        moment.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(moment)) / 1e3


_Mark = tuple[Phase, Any, float]  # phase, time of the clock at its begin, and processor time of the thread


class SpanRecorder(Callback):
    """Records the steps of one engine, without torch's profiler, which slows small operators down.

    A record costs one clock reading, without a wait for the device: some ten per step, and two per collective. Backward
    ends when autograd has computed all gradients, before DDP waits for the gradients that are still being reduced.
    """

    def __init__(self, world: World) -> None:
        self.is_on = False  # otherwise nothing is recorded
        self._finished: list[tuple[int, tuple[_Mark, ...], tuple[Collective, ...], int]] = []  # with times of the clock
        self.is_sequential = True  # the training thread computes microbatches one after another
        self.joins_norms = False  # batch norm exchanges statistics between ranks
        self._waits = self.engine_waits = 1  # number of times per step that the engine waits for its device
        self._world, self._clock = world, Clock(world.device)
        self._thread = threading.get_ident()
        self._marks: list[_Mark] = []
        self._collectives: list[Collective] = []  # with times of the clock
        self._engine_threads: set[int] = set()  # threads inside a collective of the engine
        self._microbatches = self._started = 0
        self._is_ddp = True

    @contextmanager
    def recording_collectives(self) -> Iterator[None]:
        """Intercept the collectives of the engine and of user code inside the block."""
        rank_status = self._world.context.status
        restore = intercept_collectives(
            lambda: self.is_on and threading.get_ident() not in self._engine_threads, self._begin_other_collective
        )
        rank_status.on_wait = self._begin_engine_collective
        try:
            yield
        finally:
            rank_status.on_wait = None
            restore()

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the training thread."""
        if self.is_on:
            self._marks.append((phase, self._clock.now(), time.thread_time()))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record one step, from the wait for its data to its checkpoint."""
        self._marks, self._collectives, self._microbatches = [], [], 0
        yield
        if not self.is_on:
            return
        self.enter("other")  # the end of the last phase
        self._finished.append((number, tuple(self._marks), tuple(self._collectives), self._microbatches))

    def take_steps(self) -> list[Step]:
        """Return the recorded steps, and forget them. On a GPU, this waits for the end of the last step."""
        seconds, steps = self._clock.seconds, []
        for number, clock_marks, clock_collectives, microbatches in self._finished:
            marks = [(phase, seconds(moment), cpu) for phase, moment, cpu in clock_marks]
            segments = tuple(
                Segment(phase, begin, end, cpu_end - cpu_begin)
                for (phase, begin, cpu_begin), (_, end, cpu_end) in pairwise(marks)
            )
            collectives = tuple(c._replace(begin=seconds(c.begin), end=seconds(c.end)) for c in clock_collectives)
            steps.append(Step(number, segments, collectives, microbatches))
        self._finished = []
        return steps

    # --- callbacks of the engine ---

    def engine_created(self, engine: Engine) -> None:
        world = engine.world
        self.joins_norms = engine.config.batch_norm == "sync" and uses_batch_statistics(engine.model)
        # In these cases microbatches are computed concurrently, or alternate on this rank.
        alternates = self.joins_norms or engine.config.gather == "global" or world.mesh_shape.pipeline > 1
        self.is_sequential = not (alternates or world.strategy.name == "dp")
        self._waits = 1 + self.joins_norms + engine.scaler.is_enabled() + isinstance(engine.loss, MultiLoss)
        self.engine_waits = self._waits
        self._is_ddp = engine.strategy == "ddp" and world.size > 1

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        self._microbatches, self._started = len(batch.local_microbatches), 0
        if self.joins_norms and engine.world.size > 1 and batch.microbatches == engine.world.size:
            self.engine_waits = self._waits + 1  # ranks compare their layers between forward and backward
        if not self.is_sequential:
            self.enter("computing")
        else:
            # A rank without microbatches waits for the others.
            self.enter("other" if self._microbatches else "communication")

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        if self.is_sequential:
            self._started += 1
            self.enter("forward")

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        if self.is_on and self.is_sequential and loss.sum.requires_grad:
            self.enter("backward")
            if self._is_ddp and self._started == self._microbatches:
                loss.sum.register_hook(self._begin_last_backward)

    def end_gradients(self, engine: Engine) -> None:
        self.enter("optimizer")

    def end_step(self, engine: Engine, result: StepResult) -> None:
        self.enter("other")

    def _begin_last_backward(self, gradient: torch.Tensor) -> None:
        # Autograd runs these callbacks in the order of their registration: this one before that of DDP, which waits.
        Variable._execution_engine.queue_callback(lambda: self.enter("communication"))

    # --- collectives ---

    def _begin_engine_collective(self, name: str) -> Callable[[], None]:
        self._engine_threads.add(threading.get_ident())
        return self._begin_collective(name, None)

    def _begin_other_collective(self, description: str, is_blocking: bool) -> Callable[[], None] | None:
        if not is_blocking:
            return None
        site = call_site()
        # Collectives of torch itself (FSDP) are called from here or from code that torch has generated.
        return self._begin_collective(description, None if site.startswith(("samestep/", "<")) else site)

    def _begin_collective(self, name: str, site: str | None) -> Callable[[], None]:
        begin, thread = self._clock.now(), threading.get_ident()

        def end() -> None:
            self._engine_threads.discard(thread)
            if self.is_on:
                self._collectives.append(Collective(name, site, thread != self._thread, begin, self._clock.now()))

        return end


# --- torch's profiler ---


class RankProfiler(profile):
    """torch's profiler for some steps, as a context manager; call `step()` after each step.

    `folder` receives the trace, for TensorBoard's plugin; `summary` is set after the last step.
    """

    def __init__(self, rank: int, device: torch.device, folder: Path, *, warmup: int, traced: int) -> None:
        self.summary: ProfilerSummary | None = None
        write = tensorboard_trace_handler(str(folder), worker_name=f"rank-{rank}", use_gzip=True)

        def finish(profiler: profile) -> None:
            write(profiler)
            self.summary = summarize(list(profiler.events() or ()), traced)

        super().__init__(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_accelerator(device),
            schedule=schedule(wait=0, warmup=warmup, active=traced, repeat=1),
            on_trace_ready=finish,
        )


def summarize(events: Sequence[Any], steps: int) -> ProfilerSummary:
    """Return the summary of the `FunctionEvent`s of some steps."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    operators = [event for event in host if not event.is_user_annotation]
    # On a device, an annotation spans everything below it, and a kernel of NCCL also waits for other ranks.
    device = [
        event
        for event in events
        if event.device_type != DeviceType.CPU
        and not event.is_user_annotation
        and not event.name.startswith(_COMMUNICATION)
    ]
    synchronization = [event for event in host if event.name in _SYNCHRONIZATION]
    step_intervals = sorted(_interval(event) for event in host if event.name.startswith("ProfilerStep"))
    seconds = _fastest_seconds(operators, [begin for begin, _ in step_intervals])

    def seconds_per_step(some: Sequence[Any]) -> float:
        return length(map(_interval, some)) / steps

    return ProfilerSummary(
        operators=_slowest_operators(operators, steps),
        count=len(operators) / steps,
        small=sum(own < _SMALL for own in seconds),
        working_seconds=sum(own for own in seconds if own >= _SMALL),
        communication_seconds=seconds_per_step([event for event in events if event.name.startswith(_COMMUNICATION)]),
        synchronisations=len(synchronization) / steps,
        synchronising_seconds=seconds_per_step(synchronization),
        busy_seconds=seconds_per_step(device) if device else None,
        step_seconds=length(step_intervals) / steps,
    )


def _fastest_seconds(operators: Sequence[Any], step_begins: Sequence[float]) -> list[float]:
    """Return the own seconds of each operator of a step, in the step with the shortest time.

    Operators of two steps correspond if they have the same name and the same position among those of this name.
    """
    counts: list[Counter[str]] = [Counter() for _ in step_begins]
    seconds: list[dict[tuple[str, int], float]] = [{} for _ in step_begins]
    for event in sorted(operators, key=lambda event: event.time_range.start):
        step = bisect(step_begins, event.time_range.start * _MICROSECOND) - 1
        if step >= 0:
            counts[step][event.name] += 1
            seconds[step][event.name, counts[step][event.name]] = event.self_cpu_time_total * _MICROSECOND
    common = set.intersection(*map(set, seconds)) if seconds else set()
    return [min(of_step[key] for of_step in seconds) for key in common]


def _slowest_operators(operators: Sequence[Any], steps: int) -> list[dict[str, Any]]:
    calls = Counter(event.name for event in operators)
    seconds: dict[str, float] = defaultdict(float)
    for event in operators:
        seconds[event.name] += (event.self_device_time_total or event.self_cpu_time_total) * _MICROSECOND
    slowest = nlargest(_OPERATORS_LISTED, seconds, key=lambda name: seconds[name])
    return [{"name": name, "calls": calls[name] / steps, "seconds": seconds[name] / steps} for name in slowest]


def _interval(event: Any) -> Interval:
    return event.time_range.start * _MICROSECOND, event.time_range.end * _MICROSECOND
