"""Trials of `samestep bench` on one rank: training of a variant, and times of its steps."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from samestep.config import DEFAULT_PREFETCH, Recipe, RunOptions
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.engine.engine import Engine
from samestep.engine.sync_batch_norm import norm_layers
from samestep.errors import InputError
from samestep.recipes.builder import Built, build, start_world
from samestep.tools.bench import WARMUP_STEPS, Contender, Trained
from samestep.tools.timing import Timing

_MANY_WORKERS = "This DataLoader will create"  # start of torch's warning about more workers than cores


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
            _train(built.engine, islice(built.train.endless(), steps))
        except StopRequested:
            return None
        held, peak = _measure_memory(built.engine)
        samples = built.train.samples
        if not epochs:
            return Trained({}, held, peak, samples)
        values = built.engine.evaluate(built.evaluation, list(built.metrics))
        return Trained(values, held, peak, samples)


def time_contenders(contenders: Sequence[Contender], steps: int, options: RunOptions) -> list[Timing] | None:
    """Time some steps of each variant; return None if a stop was requested."""
    timings = []
    for contender in contenders:
        with start_world(contender.recipe, options) as world:
            built = _build(contender, options, world)
            try:
                timings.append(_time_steps(built.engine, built.train, warmup=WARMUP_STEPS, steps=steps))
            except StopRequested:
                return None
    return timings


def time_workers(
    recipe: Recipe, counts: Sequence[int], rounds: int, steps: int, options: RunOptions
) -> list[list[Timing]] | None:
    """Time steps with each number of loader processes, in turn; return the timings of each round in order of `counts`.

    Every second round runs in reverse order. Return None if a stop was requested.
    """
    warnings.filterwarnings("ignore", message=_MANY_WORKERS)  # the trials show which numbers are too large
    result = []
    with start_world(recipe, options) as world:
        built = build(recipe, replace(options, workers=0), world)
        for number in range(rounds):
            if world.is_main and not options.quiet:
                print(f"timing, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            order = counts[::-1] if number % 2 else counts
            try:
                timings = {count: _time_loader(built, count, steps) for count in order}
            except StopRequested:
                return None
            result.append([timings[count] for count in counts])
    return result


def _time_loader(built: Built, count: int, steps: int) -> Timing:
    """Time steps with `count` loader processes, on the samples after those of the previous trial.

    No trial reads files that the operating system has kept in memory since another trial.
    """
    data = built.train
    with built.engine.world.context.status.operation(f"trial of {count} loader processes"):
        loader = data.with_workers(count, DEFAULT_PREFETCH)
        try:
            return _time_steps(built.engine, loader, warmup=WARMUP_STEPS, steps=steps)
        finally:
            loader.close()
            data.cursor = loader.cursor


def _build(contender: Contender, options: RunOptions, world: World) -> Built:
    built = build(contender.recipe, options, world)
    if contender.recipe.step.batch_norm == "sync" and not norm_layers(built.engine.model):
        raise InputError("the model has no batch norm")
    return built


def _time_steps(engine: Engine, loader: Loader, *, warmup: int, steps: int) -> Timing:
    """Train `warmup` steps, then time `steps` more; raise `StopRequested` after a stop request. Collective."""
    batches = loader.endless()
    _train(engine, islice(batches, warmup))
    samples = 0
    waits = 0.0
    _wait_for_all(engine.world)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        _train(engine, [batch])
        samples += batch.size
    _wait_for_all(engine.world)
    seconds = time.perf_counter() - began
    return Timing(seconds / steps, waits / seconds, samples / seconds)


def _train(engine: Engine, batches: Iterator[GlobalBatch] | Sequence[GlobalBatch]) -> None:
    for batch in batches:
        if engine.step(batch).stop:
            raise StopRequested


def _wait_for_all(world: World) -> None:
    """Wait for the computations of this rank's accelerator, then for the other ranks."""
    if is_accelerator(world.device):
        accelerator_module().synchronize(world.device)
    world.barrier()


def _measure_memory(engine: Engine) -> tuple[int, int | None]:
    """Return the held bytes and their peak on the rank with the most; no peak on a CPU. Collective."""
    world = engine.world
    peak = accelerator_module().max_memory_allocated(world.device) if is_accelerator(world.device) else None
    rows = all_gather([_held_bytes(engine), peak or 0], world)
    held = max(row[0] for row in rows)
    return held, None if peak is None else max(row[1] for row in rows)


def _held_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, gradients, buffers and optimizer state on this rank."""
    parameters = list(engine.local_parameters.local.values())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in engine.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    tensors = [*parameters, *gradients, *engine.model.buffers(), *state]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
