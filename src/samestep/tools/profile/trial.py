"""What every rank of a profile does: it trains some steps, as `samestep train` would, and notes where time goes."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from typing import Any

from samestep.checkpoint.background import Saved, Saver
from samestep.checkpoint.state import Progress, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe
from samestep.data.batch import GlobalBatch
from samestep.engine.observer import observe
from samestep.recipes.build import Built, build, world_of
from samestep.recipes.parse import recipe_data
from samestep.runtime.gather import all_gather
from samestep.runtime.processors import read_processors
from samestep.runtime.world import World
from samestep.tools.profile.clock import clock_of
from samestep.tools.profile.costs import costs
from samestep.tools.profile.measured import Circumstances, Costs, Measured, Ran, Traced
from samestep.tools.profile.plan import Plan
from samestep.tools.profile.spans import Spans
from samestep.tools.profile.steps import Step
from samestep.tools.profile.tracing import Tracing, mark

CHECKPOINTS = "checkpoints"


class Trial:
    """One rank's part."""

    def __init__(self, recipe: Recipe, plan: Plan, built: Built, world: World, spans: Spans) -> None:
        self._plan, self._built, self._world, self._spans = plan, built, world, spans
        self._recipe = recipe_data(recipe)
        self._batches = built.train.endless()
        self._save_seconds: list[float] = []
        folder = CheckpointFolder(plan.folder / CHECKPOINTS, plan.options.keep)
        self._saver = Saver(folder, self._saved, world.pulse.tick)
        self._step = 0
        self.largest: GlobalBatch | None = None

    def run(self, stack: ExitStack) -> tuple[list[Step], list[Step], Tracing | None, float] | None:
        """All steps; those that were noted, those under torch's profiler, and its trace. None: asked to end."""
        plan, spans = self._plan, self._spans
        stack.enter_context(self._saver)
        stack.enter_context(spans.listening())
        if not self._steps(plan.wait + plan.warmup):
            return None
        self._world.barrier()
        spans.is_on = True
        if not self._steps(plan.active):
            return None
        noted, spans.steps = spans.steps, []
        tracing, when = None, 0.0
        if plan.looks_at(self._world.rank):
            tracing = Tracing(self._world.rank, self._world.device, plan.folder, warmup=plan.warmup, traced=plan.traced)
        if plan.traced:
            with tracing.running() if tracing is not None else nullcontext(lambda: None) as next_step:
                for number in range(plan.warmup + plan.traced):
                    spans.is_on = number >= plan.warmup
                    if number == plan.warmup:
                        when = mark(time.perf_counter)
                    if not self._steps(1):
                        return None
                    next_step()
        spans.is_on = False
        return noted, spans.steps, tracing, when

    @property
    def save_seconds(self) -> float | None:
        """How long a checkpoint takes until it is on the disk; None where none is."""
        return sum(self._save_seconds) / len(self._save_seconds) if self._save_seconds else None

    def _steps(self, count: int) -> bool:
        """So many steps; whether nobody has asked to end."""
        spans = self._spans
        for _ in range(count):
            self._step += 1
            with spans.step(self._step):
                spans.enter("data")
                batch = next(self._batches)
                if self.largest is None or batch.size > self.largest.size:
                    self.largest = batch
                spans.enter("other")
                if self._built.engine.step(batch).stop:
                    return False
                self._save(batch)
        return True

    def _save(self, batch: GlobalBatch) -> None:
        self._saver.look()
        every, engine = self._plan.options.checkpoint_every, self._built.engine
        if not every or self._step % every:
            return
        self._spans.enter("checkpoint")
        progress = Progress(step=self._step, cursor=batch.end, recipe=self._recipe)
        if self._world.is_main:
            self._saver.save(self._step, lambda: pack(engine.training, progress))
        else:
            pack(engine.training, progress, keep=False)
        self._spans.enter("other")

    def _saved(self, saved: Saved) -> None:
        self._save_seconds.append(saved.seconds)


def profile_rank(recipe: Recipe, plan: Plan) -> Ran | None:
    """Train and note; what all ranks have noted, on rank 0, and nothing if somebody asked to end.

    Raises:
        InputError: the recipe cannot be run so.
    """
    options = plan.options
    with (
        world_of(recipe, options) as world,
        ExitStack() as stack,
    ):
        spans = Spans(world, clock_of(world.device))
        observe(spans)  # for the life of this process, which a trial has for itself
        built = build(recipe, options, world)
        trial = Trial(recipe, plan, built, world, spans)
        found = trial.run(stack)
        if found is None:
            return None
        steps, slower, tracing, when = found
        traced = tracing.found if tracing is not None else None
        assert trial.largest is not None, "there is one active step at least"
        said: list[Any] = all_gather(
            [
                [step.as_data() for step in steps],
                [step.as_data() for step in slower],
                asdict(traced) if traced is not None else None,
                when,
                asdict(costs(built.engine, built.train, trial.largest, world)),
            ],
            world,
        )
        return _put_together(said, circumstances(recipe, plan, built, world, spans, trial.save_seconds))


def _put_together(said: list[Any], around: Circumstances) -> Ran:
    traced = {rank: Traced(**each[2]) for rank, each in enumerate(said) if each[2] is not None}
    every = [Costs(**each[4]) for each in said]
    slowest = replace(
        every[0], batch=max(each.batch for each in every), gradients=max(each.gradients for each in every)
    )
    return Ran(
        Measured([[Step.from_data(step) for step in each[0]] for each in said], traced, slowest, around),
        [[Step.from_data(step) for step in each[1]] for each in said],
        {rank: said[rank][3] for rank in traced},
    )


def circumstances(
    recipe: Recipe, plan: Plan, built: Built, world: World, spans: Spans, save_seconds: float | None
) -> Circumstances:
    """What advice depends on."""
    cores = read_processors().usable
    return Circumstances(
        workers=built.train.workers,
        cores=cores,
        checkpoint_every=plan.options.checkpoint_every,
        save_seconds=save_seconds,
        shards=recipe.shards,
        batch_size=recipe.batch_size,
        strategy=built.engine.strategy,
        device=world.device.type,
        bucket_mb=recipe.strategy.bucket_mb,
        hook=recipe.strategy.hook,
        threads=recipe.step.threads,
        is_compiled=recipe.step.compile,
        is_apart=spans.is_apart,
        joins_norms=spans.joins_norms,
        is_known_inside=not world.layout.is_split,
    )
