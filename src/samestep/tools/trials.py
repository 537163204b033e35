"""Trials of `samestep bench` on one rank: training of a variant, and times of its steps."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from samestep.config import Recipe, RunOptions
from samestep.data.whole_batches import WholeBatches
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.global_view import any_rank
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.driver import Driver
from samestep.recipes.predict import evaluated
from samestep.recipes.samples import RecipeBatch
from samestep.tools.bench import WARMUP_STEPS, Contender, Trained
from samestep.tools.timing import Timing

_MANY_WORKERS = (
    "This DataLoader will create"  # start of torch's warning about more workers than cores
)


class StopRequested(Exception):
    """A stop was requested; raised after the same step on all ranks."""


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
            _train(built.driver, islice(_endless(built.train), steps))
        except StopRequested:
            return None
        held, peak = _measure_memory(built.driver)
        samples = built.train.samples_of(0)
        if not epochs:
            return Trained({}, held, peak, samples)
        values = evaluated(built, built.metrics)
        return Trained(values, held, peak, samples)


def time_contenders(
    contenders: Sequence[Contender], steps: int, options: RunOptions
) -> list[Timing] | None:
    """Time some steps of each variant; return None if a stop was requested."""
    timings = []
    for contender in contenders:
        with start_world(contender.recipe, options) as world:
            built = _build(contender, options, world)
            try:
                timings.append(
                    _time_steps(built.driver, built.train, warmup=WARMUP_STEPS, steps=steps)
                )
            except StopRequested:
                return None
    return timings


def _build(contender: Contender, options: RunOptions, world: World) -> Built:
    built = build(contender.recipe, options, world)
    if contender.devices > contender.processes:
        built.driver.model = nn.DataParallel(built.driver.model, list(range(contender.devices)))
    return built


def time_workers(
    recipe: Recipe, counts: Sequence[int], rounds: int, steps: int, options: RunOptions
) -> list[list[Timing]] | None:
    """Time steps with each number of loader processes, in turn; return the timings of each round in order of `counts`.

    Every second round runs in reverse order. Return None if a stop was requested.
    """
    warnings.filterwarnings(
        "ignore", message=_MANY_WORKERS
    )  # the trials show which numbers are too large
    result = []
    with start_world(recipe, options) as world:
        for number in range(rounds):
            if world.is_main and not options.quiet:
                print(f"timing, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            order = counts[::-1] if number % 2 else counts
            try:
                timings = {
                    count: _time_loader(recipe, replace(options, workers=count), world, steps)
                    for count in order
                }
            except StopRequested:
                return None
            result.append([timings[count] for count in counts])
    return result


def _time_loader(recipe: Recipe, options: RunOptions, world: World, steps: int) -> Timing:
    """Time steps with a number of loader processes."""
    with world.context.status.operation(f"trial of {options.workers} loader processes"):
        built = build(recipe, options, world)
        try:
            return _time_steps(built.driver, built.train, warmup=WARMUP_STEPS, steps=steps)
        finally:
            built.train.close()


def _endless(data: WholeBatches) -> Iterator[RecipeBatch]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from (batch for batch in data if batch.data is not None)


def _time_steps(driver: Driver, data: WholeBatches, *, warmup: int, steps: int) -> Timing:
    """Train `warmup` steps, then time `steps` more; raise `StopRequested` after a stop request. Collective."""
    batches = _endless(data)
    _train(driver, islice(batches, warmup))
    samples = 0
    waits = 0.0
    _wait_for_all(driver.world)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        _train(driver, [batch])
        samples += len(batch.samples)
    _wait_for_all(driver.world)
    seconds = time.perf_counter() - began
    return Timing(seconds / steps, waits / seconds, samples / seconds)


def _train(driver: Driver, batches: Iterable[RecipeBatch]) -> None:
    for batch in batches:
        driver.step(batch)
        if any(any_rank(driver.world, driver.world.stop_requested)):
            raise StopRequested


def _wait_for_all(world: World) -> None:
    """Wait for the computations of this rank's accelerator, then for the other ranks."""
    if is_accelerator(world.device):
        accelerator_module().synchronize(world.device)
    world.barrier()


def _measure_memory(driver: Driver) -> tuple[int, int | None]:
    """Return the held bytes and their peak on the rank with the most; no peak on a CPU. Collective."""
    world = driver.world
    peak = (
        accelerator_module().max_memory_allocated(world.device)
        if is_accelerator(world.device)
        else None
    )
    rows = all_gather([_held_bytes(driver), peak or 0], world)
    held = max(row[0] for row in rows)
    return held, None if peak is None else max(row[1] for row in rows)


def _held_bytes(driver: Driver) -> int:
    """Return the bytes of parameters, gradients, buffers and optimizer state on this rank."""
    saved = driver.local_parameters
    parameters = [parameter for name, parameter in saved.local.items() if saved.has(name)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [
        value
        for values in driver.optimizer.state.values()
        for value in values.values()
        if torch.is_tensor(value)
    ]
    tensors = [*parameters, *gradients, *driver.model.buffers(), *state]
    own = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # of DTensors
    return sum(tensor.nbytes for tensor in own if not tensor.is_meta)
