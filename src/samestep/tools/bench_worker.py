"""Trials of `samestep bench` on one rank: training of a variant, times and losses of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from samestep.config import Recipe, RunOptions
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.errors import NonFiniteError
from samestep.parallelize import any_rank
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.optimizers import apply_schedule
from samestep.recipes.predict import evaluated
from samestep.tools.bench import WARMUP_STEPS, Contender, Timing, Trained
from samestep.tools.learning_rates import has_diverged
from samestep.tools.ranks import StopRequested, endless, train


def train_contender(contender: Contender, epochs: int, options: RunOptions) -> Trained | None:
    """Train a variant for some epochs, or for one step if `epochs` is 0, and evaluate.

    Return None if a stop was requested.

    Raises:
        InputError: the variant cannot run.
    """
    with start_world(contender.recipe, options) as world:
        if is_accelerator(world.device):
            accelerator_module().reset_peak_memory_stats(world.device)
        built = _build(contender, options, world)
        steps = epochs * len(built.train) or 1
        try:
            for _ in train(built.driver, islice(endless(built.train), steps)):
                pass
        except StopRequested:
            return None
        peak = _peak_memory(world)
        samples = built.train.samples_of(0)
        values = evaluated(built, built.metrics) if epochs else {}
        return Trained(values, peak, samples)


def time_contenders(
    contenders: Sequence[Contender], steps: int, options: RunOptions
) -> list[Timing] | None:
    """Time some steps of each variant; return None if a stop was requested."""
    timings = []
    for contender in contenders:
        with start_world(contender.recipe, options) as world:
            try:
                timings.append(_time_steps(_build(contender, options, world), steps))
            except StopRequested:
                return None
    return timings


def losses_of_rates(
    recipe: Recipe, rates: Sequence[float], options: RunOptions
) -> list[float] | None:
    """Train a step with each rate, until the loss diverges; return the losses.

    A rate is the `lr` of the recipe: groups of parameters keep their ratios. None after a stop.
    """
    losses: list[float] = []
    with start_world(recipe, options) as world:
        built = build(recipe, options, world)
        scheduler = built.driver.scheduler
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        own = float(recipe.optimizer.options.get("lr", scheduler.base_lrs[0]))
        factors = [rate / own for rate in (*rates, rates[-1])]  # one more, after the last step
        scheduler.lr_lambdas = [factors.__getitem__] * len(scheduler.base_lrs)
        apply_schedule(scheduler)
        for batch in islice(endless(built.train), len(rates)):
            try:
                result = built.driver.step(batch)
            except NonFiniteError:
                break
            if result.skipped or has_diverged([*losses, result.loss]):
                break
            losses.append(result.loss)
            if any(any_rank(world, world.stop_requested)):
                return None
    return losses


def _build(contender: Contender, options: RunOptions, world: World) -> Built:
    built = build(contender.recipe, options, world)
    if contender.devices > contender.processes:
        built.driver.model = nn.DataParallel(built.driver.model, list(range(contender.devices)))
    return built


def _time_steps(built: Built, steps: int) -> Timing:
    """Train warm-up steps, then time `steps` more; raise `StopRequested` after a stop request."""
    world = built.driver.world
    batches = endless(built.train)
    for _ in train(built.driver, islice(batches, WARMUP_STEPS)):
        pass
    samples = 0
    waits = 0.0
    # The kernels of the warm-up must not count.
    _wait_for_all(world)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        for _ in train(built.driver, [batch]):
            samples += len(batch.samples)
    _wait_for_all(world)
    seconds = time.perf_counter() - began
    return Timing(seconds / steps, waits / seconds, samples / seconds)


def _wait_for_all(world: World) -> None:
    """Wait for the computations of this rank's accelerator, then for the other ranks."""
    if is_accelerator(world.device):
        accelerator_module().synchronize(world.device)
    world.barrier()


def _peak_memory(world: World) -> int | None:
    """Return the peak GPU memory in bytes of the rank with the most; None on a CPU. Collective."""
    if not is_accelerator(world.device):
        return None
    peaks: list[int] = all_gather(accelerator_module().max_memory_allocated(world.device), world)
    return max(peaks)
