"""Records of one rank: phases and collectives of the steps of a loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import mean
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import record_function

from samestep.distributed.collective_check import intercept_collectives
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
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


class StepRecorder:
    """Records the steps of the first optimizer that steps in this process, without changes of the loop.

    A step ends with that of the optimizer. Its phases are the wait for data, up to the first
    forward with gradients; forward with the loss; backward; and the rest, up to the end of the
    step. A record costs one clock reading, without
    a wait for the device: some per step, and two per collective. torch's profiler would slow small
        operators down.
    """

    def __init__(self) -> None:
        self.is_on = False  # otherwise nothing is recorded
        self.is_traced = False  # phases are annotations in the trace of torch's profiler
        self._world: World | None = None
        self._clock: Clock
        self._marks: list[tuple[Phase, Any]] = []  # with times of the clock, as `_collectives`
        self._collectives: list[Collective] = []
        self._finished: list[tuple[list[tuple[Phase, Any]], list[Collective]]] = []
        self._annotation: record_function | None = None
        self._thread = threading.get_ident()
        self._phase: Phase = "data"
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks = ExitStack()

    def bind(self, world: World) -> None:
        """Record the steps and the collectives of the process."""
        self._world = world
        self._clock = Clock(world.device)
        world.session.status.on_wait = lambda name: self._begin_collective()
        self._hooks.callback(intercept_collectives(lambda: self.is_on, self._begin_user_collective))
        for hook in (
            register_module_forward_pre_hook(self._begin_forward),
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ):
            self._hooks.callback(hook.remove)
        backward = torch.autograd.backward

        def timed(*arguments: Any, **options: Any) -> Any:
            is_outer = threading.get_ident() == self._thread and self._phase != "backward"
            if is_outer:
                self._enter("backward")
            backward(*arguments, **options)
            if is_outer:
                self._enter("optimizer")

        torch.autograd.backward = timed
        self._hooks.callback(setattr, torch.autograd, "backward", backward)

    def close(self) -> None:
        """Stop recording."""
        self.is_on = False
        if self._world is not None:
            self._world.session.status.on_wait = None
            self._hooks.close()

    def end_step(self) -> None:
        """Called after each step; the next one begins afterwards."""

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
            steps.append(
                phase_seconds([(phase, seconds(moment)) for phase, moment in marks], collectives)
            )
        return {phase: mean(step[phase] for step in steps) for phase in PHASES}

    def _begin_forward(self, module: Any, arguments: Any) -> None:
        if self._phase in ("forward", "backward") or not torch.is_grad_enabled():
            return
        if threading.get_ident() == self._thread:
            self._enter("forward")

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self._enter("optimizer")

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizer:
            self.end()
            self.end_step()

    def _enter(self, phase: Phase) -> None:
        """Begin a phase of the training thread."""
        self._phase = phase
        if self.is_on:
            self._marks.append((phase, self._clock.now()))
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self.is_traced:
            self._annotation = record_function(f"samestep: {phase}")
            self._annotation.__enter__()

    def _begin_user_collective(self, is_blocking: bool) -> Callable[[], None] | None:
        if is_blocking:
            return self._begin_collective()
        return None

    def _begin_collective(self) -> Callable[[], None]:
        begin = self._clock.now()
        thread = threading.get_ident()

        def end() -> None:
            if self.is_on:
                self._collectives.append(
                    Collective(thread != self._thread, begin, self._clock.now())
                )

        return end
