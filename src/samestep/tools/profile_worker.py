"""Profiled steps of one rank, of a recipe or of a script: phases, collectives and traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from statistics import mean
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import (
    ProfilerActivity,
    profile,
    record_function,
    schedule,
    tensorboard_trace_handler,
)

from samestep.config import Recipe
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.launcher.process_state import process_state, rank_and_size
from samestep.launcher.worker import EndOfScript
from samestep.parallelize import any_rank
from samestep.recipes.builder import build, start_world
from samestep.tools.profile import (
    PHASES,
    TRACES,
    Interval,
    Measurements,
    Phase,
    PhaseSeconds,
    Plan,
    Script,
    phase_seconds,
)
from samestep.tools.ranks import begin_experiment, endless, run_logged


class Clock:
    """Clock of computation: of the host, or on a GPU, of the events that its stream reaches."""

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
    """Records the steps of a plan, of the first optimizer that steps in this process.

    A step ends with that of the optimizer. Its phases are the wait for data, up to the first
    forward with gradients; forward with the loss; backward; and the rest, up to the end of the
    step. A record costs one clock reading, without a wait for the device: some per step, and two
    per collective. torch's profiler would slow small operators down. The last step raises
    `EndOfScript`.

    Attributes:
        measurements: the measurements of all ranks, after the last step.
        is_stopped: a stop was requested.
        steps: completed steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.measurements: Measurements | None = None
        self.is_stopped = False
        self.steps = 0
        self._plan = plan
        self._world: World
        self._clock: Clock
        self._profiler: profile | None = None
        self._is_on = False  # otherwise nothing is recorded
        self._is_traced = False  # phases are annotations in the trace of torch's profiler
        self._marks: list[tuple[Phase, Any]] = []  # with times of the clock, as `_collectives`
        self._collectives: list[tuple[Any, Any]] = []
        self._finished: list[tuple[list[tuple[Phase, Any]], list[tuple[Any, Any]]]] = []
        self._annotation: record_function | None = None
        self._thread = threading.get_ident()
        self._phase: Phase = "data"
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks = ExitStack()

    def begin(self, world: World) -> None:
        """Record the steps and the collectives of the process, in a world."""
        self._world = world
        self._clock = Clock(world.device)
        world.session.status.on_wait = lambda name: self._begin_collective()
        self._hooks.callback(setattr, world.session.status, "on_wait", None)
        for hook in (
            register_module_forward_pre_hook(self._begin_forward),
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ):
            self._hooks.callback(hook.remove)
        backward = torch.autograd.backward

        def timed(*arguments: Any, **options: Any) -> Any:
            # A backward within another, as of checkpointing, belongs to the outer one.
            is_outer = threading.get_ident() == self._thread and self._phase != "backward"
            if is_outer:
                self._enter("backward")
            backward(*arguments, **options)
            if is_outer:
                self._enter("optimizer")

        # `Tensor.backward` calls this function, too.
        torch.autograd.backward = timed
        self._hooks.callback(setattr, torch.autograd, "backward", backward)
        self._begin_step()

    def close(self) -> None:
        """Stop recording."""
        self._is_on = False
        self._hooks.close()

    def phases(self) -> PhaseSeconds:
        """Return the mean seconds of each phase. On a GPU, this waits for the last step."""
        seconds = self._clock.seconds
        steps = []
        for marks, recorded in self._finished:
            collectives: list[Interval] = [
                (seconds(begin), seconds(end)) for begin, end in recorded
            ]
            begins = [(phase, seconds(moment)) for phase, moment in marks]
            steps.append(phase_seconds(begins, collectives))
        return {phase: mean(step[phase] for step in steps) for phase in PHASES}

    def _begin_step(self) -> None:
        """Begin a step with the wait for its data, and measure or trace from it on."""
        plan = self._plan
        measured = plan.warmup + plan.active
        if self.steps == plan.warmup:
            # A rank that begins late would look like slow communication of the others.
            self._world.barrier()
            self._is_on = True
        if self.steps == measured:
            self._is_on = False
            activities = [ProfilerActivity.CPU]
            if is_accelerator(self._world.device):
                activities.append(ProfilerActivity.CUDA)
            # One step warms torch's profiler up. TensorBoard's plugin reads the trace.
            self._profiler = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=1, active=plan.traced, repeat=1),
                on_trace_ready=tensorboard_trace_handler(
                    str(plan.folder / TRACES),
                    worker_name=f"rank-{self._world.rank}",
                    use_gzip=True,
                ),
            )
            self._profiler.start()
        self._is_traced = self.steps > measured
        self._marks = []
        self._collectives = []
        self._enter("data")

    def _begin_forward(self, module: Any, arguments: Any) -> None:
        if self._phase in ("forward", "backward") or not torch.is_grad_enabled():
            return
        if threading.get_ident() == self._thread:
            self._enter("forward")

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._enter("optimizer")

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._enter("other")
        if self._is_on:
            self._finished.append((self._marks, self._collectives))
        self.steps += 1
        if self._profiler is not None:
            self._profiler.step()
        # A message of each step, after its phases are stored: it counts in none of them.
        (self.is_stopped,) = any_rank(self._world, self._world.stop_requested)
        if self.is_stopped or self.steps == self._plan.steps:
            # Gather the measurements of all ranks after the last step, and end the script.
            world = self._world
            self.close()
            if self._profiler is not None:
                self._profiler.stop()
            if not self.is_stopped:
                is_known = not world.mesh_shape.splits_model
                self.measurements = Measurements(all_gather(self.phases(), world), is_known)
            world.barrier()  # no rank ends while another needs it
            raise EndOfScript
        self._begin_step()

    def _enter(self, phase: Phase) -> None:
        """Begin a phase of the training thread."""
        self._phase = phase
        if self._is_on:
            self._marks.append((phase, self._clock.now()))
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._is_traced:
            self._annotation = record_function(f"samestep: {phase}")
            self._annotation.__enter__()

    def _begin_collective(self) -> Callable[[], None]:
        begin = self._clock.now()
        # The training thread does not wait for messages of other threads.
        is_wait = threading.get_ident() == self._thread

        def end() -> None:
            if self._is_on and is_wait:
                self._collectives.append((begin, self._clock.now()))

        return end


def profile_recipe(recipe: Recipe, plan: Plan) -> Measurements | None:
    """Train the steps of the plan on this rank; return None if a stop was requested."""
    recorder = StepRecorder(plan)
    with start_world(recipe, plan.options) as world, suppress(EndOfScript):
        built = build(recipe, plan.options, world)
        recorder.begin(world)
        for batch in endless(built.train):
            built.driver.step(batch)
    return recorder.measurements


def profile_script(script: Script, plan: Plan) -> Measurements | None:
    """Run a script on this rank for the steps of the plan; return None if a stop was requested.

    Raises:
        InputError: the script makes fewer steps.
    """
    rank, _ = rank_and_size()
    recorder = StepRecorder(plan)
    assert plan.scratch is not None
    begin_experiment(plan.scratch)
    process_state.on_world.append(recorder.begin)
    run_logged(script.path, script.arguments, plan.folder / f"output-{rank}.log")
    if recorder.measurements is None and not recorder.is_stopped:
        raise InputError(
            f"{script.path.name} made {recorder.steps} of {plan.steps} steps of an optimizer",
            expected="a script that trains with samestep.parallel, for at least so many steps",
            fix="train for more epochs, or reduce --active; for other scripts, torch.profiler "
            "works under samestep run",
            code="E_SCRIPT",
        )
    return recorder.measurements
