"""Profiled steps of one rank, of a recipe or of a script."""

from __future__ import annotations

from contextlib import redirect_stdout, suppress

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from samestep.config import Recipe
from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.global_view import any_rank
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.recipes.builder import build, start_world
from samestep.tools.profile.phases import Measurements
from samestep.tools.profile.profile import TRACES, Plan, Script
from samestep.tools.profile.recorder import StepRecorder


class ProfiledSteps(StepRecorder):
    """Steps of a plan; the last one raises `EndOfScript`.

    Attributes:
        measurements: the measurements of all ranks, after the last step.
        is_stopped: a stop was requested.
        steps: completed steps.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.measurements: Measurements | None = None
        self.is_stopped = False
        self.steps = 0
        self._plan = plan
        self._world: World
        self._profiler: profile | None = None

    def begin_world(self, world: World) -> None:
        """Begin to record the steps of a world."""
        self._world = world
        self.bind(world)
        self._begin_next(world)

    def end_step(self) -> None:
        world = self._world
        self.steps += 1
        if self._profiler is not None:
            self._profiler.step()
        (stop,) = any_rank(world, world.stop_requested)
        if stop or self.steps == self._plan.steps:
            self.is_stopped = stop
            self._finish(world)
        self._begin_next(world)

    def _begin_next(self, world: World) -> None:
        """Begin the next step, and the measured or traced steps if it is the first of them."""
        plan = self._plan
        measured = plan.warmup + plan.active
        if self.steps == plan.warmup:
            world.barrier()
            self.is_on = True
        if self.steps == measured:
            self.is_on = False
            self._profiler = _torch_profiler(world, plan)
            self._profiler.start()
        self.is_traced = self.steps > measured
        self.begin()

    def _finish(self, world: World) -> None:
        """Gather the measurements of all ranks unless a stop was requested, and end the script. Collective."""
        self.close()
        if self._profiler is not None:
            self._profiler.stop()
        if not self.is_stopped:
            phases = all_gather(self.phases(), world)
            self.measurements = Measurements(
                phases, is_known_inside=not world.mesh_shape.splits_model
            )
        world.barrier()  # no rank ends while another needs it
        raise EndOfScript


def _torch_profiler(world: World, plan: Plan) -> profile:
    """Return torch's profiler for one warm-up step and the traced steps; its trace is for TensorBoard's plugin."""
    write = tensorboard_trace_handler(
        str(plan.folder / TRACES), worker_name=f"rank-{world.rank}", use_gzip=True
    )
    return profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_accelerator(world.device),
        schedule=schedule(wait=0, warmup=1, active=plan.traced, repeat=1),
        on_trace_ready=write,
    )


def profile_recipe(recipe: Recipe, plan: Plan) -> Measurements | None:
    """Train the steps of the plan on this rank; return None if a stop was requested."""
    steps = ProfiledSteps(plan)
    with start_world(recipe, plan.options) as world, suppress(EndOfScript):
        built = build(recipe, plan.options, world)
        steps.begin_world(world)
        while True:
            for batch in built.train:
                built.driver.step(batch)
    return steps.measurements


def profile_script(script: Script, plan: Plan) -> Measurements | None:
    """Run a script on this rank until the steps of the plan are done; return None if a stop was requested.

    Raises:
        InputError: the script makes fewer steps.
    """
    rank, _ = rank_and_size()
    steps = ProfiledSteps(plan)
    process_state.is_experiment = True
    process_state.checkpoint_root = plan.scratch
    process_state.on_world.append(steps.begin_world)
    with (
        (plan.folder / f"output-{rank}.log").open("w", encoding="utf-8") as output,
        redirect_stdout(output),
    ):
        run_script(script.path, script.arguments)
    if steps.measurements is None and not steps.is_stopped:
        raise InputError(
            f"{script.path.name} made {steps.steps} of {plan.steps} steps of an optimizer",
            expected="a script that trains with samestep.parallel, for at least so many steps",
            fix="train for more epochs, or reduce --active; for other scripts, torch.profiler works under samestep run",
            code="E_SCRIPT",
        )
    return steps.measurements
