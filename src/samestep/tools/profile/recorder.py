"""Records of one rank: phases and collectives of the steps of an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch.autograd import Variable
from torch.profiler import record_function

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.interception import intercept_collectives
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.tools.profile.phases import PHASES, Collective, Phase, PhaseSeconds, phase_seconds


class Clock:
    """Clock of computation: of the host on a CPU; on a GPU, the times at which its stream reaches an event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if is_accelerator(device) else None
        self._base = self.now()
        if self._device is not None:
            self._base.synchronize()

    def now(self) -> Any:
        """Return the current time, at the least cost, for `seconds`."""
        if self._device is None:
            return time.perf_counter()
        event = accelerator_module().Event(enable_timing=True)
        event.record(accelerator_module().current_stream(self._device))
        return event

    def seconds(self, moment: Any) -> float:
        """Return a time in seconds since an arbitrary begin."""
        if self._device is None:
            return float(moment)
        moment.synchronize()
        return float(self._base.elapsed_time(moment)) / 1e3


class StepRecorder(Callback):
    """Records the steps of the first engine of this process.

    A record costs one clock reading, without a wait for the device: some ten per step, and two per collective. torch's
    profiler would slow small operators down. Backward ends when autograd has computed all gradients, before DDP waits
    for the gradients that are still being reduced.
    """

    def __init__(self) -> None:
        self.is_on = False  # otherwise nothing is recorded
        self.is_traced = False  # phases are annotations in the trace of torch's profiler
        self.engine: Engine | None = None
        self._clock: Clock
        self._marks: list[tuple[Phase, Any]] = []  # with times of the clock, as `_collectives`
        self._collectives: list[Collective] = []
        self._finished: list[tuple[list[tuple[Phase, Any]], list[Collective]]] = []
        self._annotation: record_function | None = None
        self._thread = threading.get_ident()
        self._microbatches = 0  # microbatches of the step that have not begun
        self._is_sequential = self._is_ddp = False

    def bind(self, engine: Engine) -> None:
        """Record the steps of this engine, and the collectives of the process."""
        world = engine.world
        self.engine = engine
        self._clock = Clock(world.device)
        # In these cases microbatches are computed concurrently, or alternate on this rank.
        joins_norms = engine.config.batch_norm == "sync" and uses_batch_statistics(engine.model)
        alternates = joins_norms or engine.config.gather == "global" or world.mesh_shape.pipeline > 1
        self._is_sequential = not (alternates or world.strategy.name == "dp")
        self._is_ddp = engine.strategy == "ddp" and world.size > 1
        world.context.status.on_wait = lambda name: self._begin_collective()
        self._restore = intercept_collectives(lambda: self.is_on, self._begin_user_collective)

    def close(self) -> None:
        """Stop recording."""
        self.is_on = False
        if self.engine is not None:
            self.engine.world.context.status.on_wait = None
            self._restore()

    def begin(self) -> None:
        """Begin a step with the wait for its data."""
        self._marks = []
        self._collectives = []
        self._enter("data")

    def end(self) -> None:
        """End a step."""
        self._enter("other")
        if self.is_on:
            self._finished.append((self._marks, self._collectives))

    def phases(self) -> PhaseSeconds:
        """Return the mean seconds of each phase in the recorded steps. On a GPU, this waits for the last step."""
        seconds = self._clock.seconds
        steps = []
        for marks, recorded in self._finished:
            collectives = [c._replace(begin=seconds(c.begin), end=seconds(c.end)) for c in recorded]
            steps.append(phase_seconds([(phase, seconds(moment)) for phase, moment in marks], collectives))
        return {phase: mean(step[phase] for step in steps) for phase in PHASES}

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if engine is not self.engine:
            return
        self._microbatches = len(batch.local_microbatches)
        if not self._is_sequential:
            self._enter("computing")
        elif self._microbatches:
            self._enter("other")
        else:
            self._enter("communication")  # a rank without microbatches waits for the others

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        if self._is_sequential:
            self._microbatches -= 1
            self._enter("forward")

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        if self._is_sequential and loss.sum.requires_grad:
            self._enter("backward")
            if self._is_ddp and self._microbatches == 0:
                loss.sum.register_hook(self._begin_last_backward)

    def end_gradients(self, engine: Engine) -> None:
        if engine is self.engine:
            self._enter("optimizer")

    def _begin_last_backward(self, gradient: torch.Tensor) -> None:
        # Autograd runs these callbacks in the order of their registration: this one before that of DDP, which waits.
        Variable._execution_engine.queue_callback(lambda: self._enter("communication"))

    def _enter(self, phase: Phase) -> None:
        """Begin a phase of the training thread."""
        if self.is_on:
            self._marks.append((phase, self._clock.now()))
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self.is_traced:
            self._annotation = record_function(f"samestep: {phase}")
            self._annotation.__enter__()

    def _begin_user_collective(self, is_blocking: bool) -> Callable[[], None] | None:
        return self._begin_collective() if is_blocking else None

    def _begin_collective(self) -> Callable[[], None]:
        begin = self._clock.now()
        thread = threading.get_ident()

        def end() -> None:
            if self.is_on:
                self._collectives.append(Collective(thread != self._thread, begin, self._clock.now()))

        return end
