"""Measured training steps on one rank of `samestep profile`: of a recipe, or of a script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, astuple, replace
from functools import partial
from math import ceil
from statistics import mean, median
from timeit import repeat
from typing import Any

import torch
from torch.profiler import record_function

from samestep.checkpoint.async_writer import AsyncCheckpointWriter
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import snapshot
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DEFAULT_KEEP, Recipe, Reduction
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.data.loader import Loader
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.resources import read_processors
from samestep.distributed.world import World, all_gather
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.recipe_files import recipe_data
from samestep.runs.folder import run_directory
from samestep.strategies.reduction import MicrobatchTree, fast_all_reduce, tree_all_reduce
from samestep.tools.profile.measurements import Conditions, Costs, Measurements, ProfilerSummary, Step
from samestep.tools.profile.profile import CHECKPOINTS, CLOCK_MARK, RUN, TENSORBOARD, Plan, Script
from samestep.tools.profile.recorder import RankProfiler, SpanRecorder

# Size of a bucket of torch's DDP, and of its first bucket, which is small to be sent early.
_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
_LOADING_TRIALS, _REDUCTION_TRIALS = 2, 5


class _Trial:
    """Training steps of one rank, with checkpoints; `save_seconds` are the times until these were on disk."""

    def __init__(self, recipe: Recipe, plan: Plan, built: Built, world: World, recorder: SpanRecorder) -> None:
        self._plan, self._built, self._world, self._recorder = plan, built, world, recorder
        self._recipe = recipe_data(recipe)
        self._batches = built.train.endless()
        self._step = 0
        self.largest_batch: GlobalBatch | None = None
        self.save_seconds: list[float] = []
        self._writer = AsyncCheckpointWriter(
            CheckpointFolder(plan.folder / CHECKPOINTS, plan.options.keep or DEFAULT_KEEP),
            lambda saved: self.save_seconds.append(saved.seconds),
            world.context.status.heartbeat,
        )

    def run(self, profiler: RankProfiler | None) -> tuple[list[Step], list[Step], float] | None:
        """Return measured steps, traced steps and the time of the clock mark; None if a stop was requested."""
        plan, recorder = self._plan, self._recorder
        with self._writer, recorder.recording_collectives():
            if not self._train(plan.wait + plan.warmup):
                return None
            self._world.barrier()
            recorder.is_on = True
            if not self._train(plan.active):
                return None
            measured = recorder.take_steps()
            mark = 0.0
            with profiler or nullcontext():
                for number in range(plan.warmup + plan.traced if plan.traced else 0):
                    recorder.is_on = number >= plan.warmup
                    if number == plan.warmup:
                        with record_function(CLOCK_MARK):
                            mark = time.perf_counter()
                    if not self._train(1):
                        return None
                    if profiler is not None:
                        profiler.step()
            recorder.is_on = False
            return measured, recorder.take_steps(), mark

    def _train(self, steps: int) -> bool:
        """Train some steps; return False if a stop was requested."""
        recorder = self._recorder
        for _ in range(steps):
            self._step += 1
            with recorder.step(self._step):
                recorder.enter("data")
                batch = next(self._batches)
                if self.largest_batch is None or batch.size > self.largest_batch.size:
                    self.largest_batch = batch
                recorder.enter("other")
                if self._built.engine.step(batch).stop:
                    return False
                self._save(batch)
        return True

    def _save(self, batch: GlobalBatch) -> None:
        self._writer.poll()
        every, engine = self._plan.options.checkpoint_every, self._built.engine
        if not every or self._step % every:
            return
        self._recorder.enter("checkpoint")
        progress = Progress(step=self._step, cursor=batch.end, recipe=self._recipe)
        if self._world.is_main:
            self._writer.save(self._step, partial(snapshot, engine.training, progress))
        else:
            snapshot(engine.training, progress, None)
        self._recorder.enter("other")


def profile_rank(recipe: Recipe, plan: Plan) -> Measurements | None:
    """Train a recipe on this rank and gather the measurements of all ranks; return None if a stop was requested.

    Raises:
        InputError: the recipe cannot run on this number of ranks.
    """
    with start_world(recipe, plan.options) as world:
        recorder = SpanRecorder(world)
        process_state.callbacks.append(recorder)  # never removed: the process ends with the trial
        built = build(recipe, plan.options, world)
        trial = _Trial(recipe, plan, built, world, recorder)
        profiler = None
        if plan.traces(world.rank):
            folder = plan.folder / TENSORBOARD
            profiler = RankProfiler(world.rank, world.device, folder, warmup=plan.warmup, traced=plan.traced)
        result = trial.run(profiler)
        if result is None:
            return None
        assert trial.largest_batch is not None, "a plan has at least one active step"
        batch, seconds = trial.largest_batch, trial.save_seconds
        return gather(built.engine, built.train, batch, plan, recorder, profiler, result, seconds)


def gather(
    engine: Engine,
    loader: Loader,
    batch: GlobalBatch,
    plan: Plan,
    recorder: SpanRecorder,
    profiler: RankProfiler | None,
    steps: tuple[list[Step], list[Step], float],
    save_seconds: Sequence[float] = (),
) -> Measurements:
    """Gather the measurements of all ranks. Collective.

    Args:
        engine: the profiled engine.
        loader: loader of the training data.
        batch: the largest batch of the steps.
        plan: plan of the profile.
        recorder: recorder of this rank.
        profiler: torch's profiler of this rank, if the rank has traced steps.
        steps: measured steps, traced steps and the time of the clock mark.
        save_seconds: seconds until each checkpoint was on disk.
    """
    world = engine.world
    measured, traced, mark = steps
    own: dict[str, Any] = {
        "measured": [astuple(step) for step in measured],
        "traced": [astuple(step) for step in traced],
        "mark": mark,
        "summary": asdict(profiler.summary) if profiler is not None and profiler.summary is not None else None,
        "costs": asdict(_measure_costs(engine, loader, batch)),
    }
    rows = all_gather(own, world)
    all_steps, traced_steps = (
        [[Step.of(*step) for step in row[key]] for row in rows] for key in ("measured", "traced")
    )
    profiled = {rank: row for rank, row in enumerate(rows) if row["summary"] is not None}
    slowest = {key: max(row["costs"][key] for row in rows) for key in ("batch", "gradients")}
    return Measurements(
        all_steps,
        {rank: ProfilerSummary(**row["summary"]) for rank, row in profiled.items()},
        replace(Costs(**own["costs"]), **slowest),
        _conditions(engine, loader, batch, plan, recorder, save_seconds),
        traced_steps,
        {rank: row["mark"] for rank, row in profiled.items()},
    )


def _conditions(
    engine: Engine,
    loader: Loader,
    batch: GlobalBatch,
    plan: Plan,
    recorder: SpanRecorder,
    save_seconds: Sequence[float],
) -> Conditions:
    world, config = engine.world, engine.config
    return Conditions(
        workers=loader.num_workers,
        cores=read_processors().usable,
        checkpoint_every=plan.options.checkpoint_every,
        save_seconds=mean(save_seconds) if save_seconds else None,
        microbatches=batch.microbatches,
        batch_size=loader.batch_size,
        strategy=engine.strategy,
        device=world.device.type,
        bucket_mb=world.strategy.bucket_mb,
        hook=world.strategy.hook,
        threads=config.threads,
        is_compiled=config.compile,
        has_graphs=config.cuda_graphs != "off",
        is_apart=recorder.is_sequential,
        joins_norms=recorder.joins_norms,
        engine_waits=recorder.engine_waits,
        is_known_inside=not world.mesh_shape.splits_model,
    )


# --- costs ---


def _measure_costs(engine: Engine, loader: Loader, batch: GlobalBatch) -> Costs:
    """Time the loading of a batch and the all-reduce of all gradients. Collective."""
    world = engine.world
    world.barrier()
    loading = min(repeat(lambda: loader.reload(batch), number=1, repeat=_LOADING_TRIALS))
    size = sum(p.numel() * p.element_size() for p in engine.model.parameters() if p.requires_grad)
    buckets = bucket_count(size)
    seconds = 0.0
    if world.data.size > 1 and not world.mesh_shape.splits_model:
        world.barrier()
        seconds = _all_reduce_seconds(world.data, batch.microbatches, engine.config.reduction, size, buckets)
    return Costs(loading, seconds, buckets, size)


def bucket_count(size: int) -> int:
    """Return the number of buckets of torch's DDP for `size` bytes of gradients."""
    return 1 if size <= _FIRST_BUCKET_BYTES else 1 + ceil((size - _FIRST_BUCKET_BYTES) / _BUCKET_BYTES)


def _all_reduce_seconds(world: World, microbatches: int, reduction: Reduction, size: int, buckets: int) -> float:
    tree = MicrobatchTree(microbatches, microbatches)
    elements = max(1, size // 4 // buckets)
    gradients = [torch.zeros(elements, device=world.device) for _ in tree.cover(world.rank, world.shares)]

    def run() -> None:
        for _ in range(buckets):
            if reduction == "exact":
                tree_all_reduce(world, tree, gradients, gradients[0])
            else:
                fast_all_reduce(world, gradients[0])
        if is_accelerator(world.device):
            accelerator_module().synchronize(world.device)

    return median(repeat(run, number=1, repeat=_REDUCTION_TRIALS))


class _ScriptSteps(Callback):
    """Steps of the first engine of a script; the last step of the plan ends the script.

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
        self._engine: Engine | None = None
        self._loaders: list[Loader] = []
        self._recorder: SpanRecorder | None = None
        self._profiler: RankProfiler | None = None
        self._context, self._step = ExitStack(), ExitStack()
        self._measured: list[Step] = []
        self._mark = 0.0
        self._largest: tuple[GlobalBatch, Loader] | None = None

    def loader_created(self, loader: Loader) -> None:
        self._loaders.append(loader)

    def engine_created(self, engine: Engine) -> None:
        if self._engine is not None:
            return
        self._engine, world, plan = engine, engine.world, self._plan
        self._recorder = SpanRecorder(world)
        self._recorder.engine_created(engine)
        if plan.traces(world.rank):
            folder = plan.folder / TENSORBOARD
            self._profiler = RankProfiler(world.rank, world.device, folder, warmup=plan.warmup, traced=plan.traced)
        self._context.enter_context(self._recorder.recording_collectives())
        self._change_phase(engine)
        self._begin_next()

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if engine is not self._engine:
            return
        recorder = self._of_engine()
        loader = batch.source if isinstance(batch.source, Loader) else self._loaders[-1]
        if self._largest is None or batch.size > self._largest[0].size:
            self._largest = batch, loader
        recorder.enter("other")
        recorder.begin_step(engine, batch)

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        self._of_engine().begin_microbatch(microbatch)

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        self._of_engine().end_microbatch(microbatch, outputs, loss)

    def end_gradients(self, engine: Engine) -> None:
        self._of_engine().end_gradients(engine)

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self._engine:
            return
        recorder = self._of_engine()
        recorder.end_step(engine, result)
        self._step.close()
        self.steps += 1
        if result.stop:
            self.is_stopped = True
            self._end(engine)
        if self._profiler is not None and self.steps > self._first_traced():
            self._profiler.step()
        if self.steps == self._plan.steps:
            self._finish(engine)
        self._change_phase(engine)
        self._begin_next()

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        # The time of an evaluation between two steps is not a wait for data.
        if engine is self._engine:
            self._begin_next()

    def _of_engine(self) -> SpanRecorder:
        assert self._recorder is not None, "the engine exists"
        return self._recorder

    def _first_traced(self) -> int:
        """Return the number of steps before those with torch's profiler."""
        return self._plan.wait + self._plan.warmup + self._plan.active

    def _change_phase(self, engine: Engine) -> None:
        """Begin the measured, profiled or traced steps, if the next step is the first one of them."""
        plan, recorder, first = self._plan, self._of_engine(), self._first_traced()
        if self.steps == plan.wait + plan.warmup:
            engine.world.barrier()
            recorder.is_on = True
        if self.steps == first and plan.traced:
            self._measured = recorder.take_steps()
            recorder.is_on = False
            if self._profiler is not None:
                self._context.enter_context(self._profiler)
        if self.steps == first + plan.warmup and plan.traced:
            recorder.is_on = True
            with record_function(CLOCK_MARK):
                self._mark = time.perf_counter()

    def _begin_next(self) -> None:
        recorder = self._of_engine()
        # An opened step that never trained is dropped with its marks.
        self._step.pop_all()
        self._step.enter_context(recorder.step(self.steps + 1))
        recorder.enter("data")

    def _finish(self, engine: Engine) -> None:
        recorder = self._of_engine()
        recorder.is_on = False
        self._context.close()
        last = recorder.take_steps()
        measured, traced = (self._measured, last) if self._plan.traced else (last, [])
        assert self._largest is not None, "a plan has at least one active step"
        batch, loader = self._largest
        steps = (measured, traced, self._mark)
        self.measurements = gather(engine, loader, batch, self._plan, recorder, self._profiler, steps)
        self._end(engine)

    def _end(self, engine: Engine) -> None:
        engine.world.barrier()  # no rank ends while another needs it
        raise EndOfScript


def profile_script(script: Script, plan: Plan) -> Measurements | None:
    """Run a script on this rank until the steps of the plan are done; return None if a stop was requested.

    Raises:
        InputError: the script makes fewer steps.
    """
    rank, _ = rank_and_size()
    steps = _ScriptSteps(plan)
    process_state.is_experiment = True
    process_state.checkpoint_root = plan.scratch
    process_state.callbacks.append(steps)  # never removed: the process ends with the trial
    with (plan.folder / f"output-{rank}.log").open("w", encoding="utf-8") as output, redirect_stdout(output):
        run_script(script.path, script.arguments)
    if rank == 0 and process_state.run is not None:
        (plan.folder / RUN).write_text(str(run_directory(process_state.run)), encoding="utf-8")
    if steps.measurements is None and not steps.is_stopped:
        raise InputError(
            f"{script.path.name} made {steps.steps} of {plan.steps} steps with samestep.Engine",
            expected="a script that trains with samestep.start, Engine and loader, for at least so many steps",
            fix="train for more epochs, or reduce --active; for other scripts, torch.profiler works under samestep run",
            code="E_SCRIPT",
        )
    return steps.measurements
