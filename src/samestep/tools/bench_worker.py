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
from samestep.global_view import any_rank
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.optimizers import apply_schedule
from samestep.recipes.predict import evaluated
from samestep.recipes.training_step import Driver
from samestep.tools.bench import WARMUP_STEPS, Contender, Timing, Trained
from samestep.tools.learning_rates import has_diverged
from samestep.tools.ranks import StopRequested, endless, train, wait_for_all


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
        held, peak = _measure_memory(built.driver)
        samples = built.train.samples_of(0)
        values = evaluated(built, built.metrics) if epochs else {}
        return Trained(values, held, peak, samples)


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
    wait_for_all(world)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        for _ in train(built.driver, [batch]):
            samples += len(batch.samples)
    wait_for_all(world)
    seconds = time.perf_counter() - began
    return Timing(seconds / steps, waits / seconds, samples / seconds)


def _measure_memory(driver: Driver) -> tuple[int, int | None]:
    """Return bytes of parameters, gradients, buffers and optimizer state, and the peak on a GPU.

    Both are those of the rank with the most. Collective.
    """
    saved = driver.local_parameters
    parameters = [parameter for name, parameter in saved.local.items() if saved.has(name)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for slots in driver.optimizer.state.values() for value in slots.values()]
    state = [value for value in values if torch.is_tensor(value)]
    tensors = [*parameters, *gradients, *driver.model.buffers(), *state]
    own = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # of DTensors
    held = sum(tensor.nbytes for tensor in own if not tensor.is_meta)
    device = driver.world.device
    if not is_accelerator(device):
        return max(all_gather(held, driver.world)), None
    peak = accelerator_module().max_memory_allocated(device)
    rows = all_gather([held, peak], driver.world)
    return max(row[0] for row in rows), max(row[1] for row in rows)
