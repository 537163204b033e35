"""Rank functions for `unit/engine/test_sync_batch_norm_runner.py`; each check returns one result per rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Root, seeded
from samestep.errors import InputError, NonFiniteError, RankMismatchError
from workers.loader import gathered
from workers.step import MICROBATCHES, SIZE, bad_gradient, bad_loss, engine_of, state_of

World = samestep.World


class RootNorm(nn.Sequential):
    """The gradient of a zero input is not finite before the norm layer."""

    def __init__(self) -> None:
        super().__init__(Root(), nn.BatchNorm1d(4), nn.Linear(4, 4))


class SwappedNorms(nn.Module):
    """Calls the norm layers in reverse order if the first value of the first sample is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layers = (self.one, self.two) if inputs[0, 0] > 0 else (self.two, self.one)
        for layer in layers:
            inputs = layer(inputs)
        outputs: torch.Tensor = self.out(inputs)
        return outputs


class SkippedNorm(nn.Module):
    """Skips the second norm layer if the first value of the first sample is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.one(inputs)
        hidden = self.two(hidden) if inputs[0, 0] > 0 else hidden * self.two.weight + self.two.bias
        outputs: torch.Tensor = self.out(hidden)
        return outputs


def stop(world: World, model: type[nn.Module], bad: Callable[[World], Any]) -> tuple[str, bool]:
    """Return the error of a bad step, and whether the state of the model is unchanged."""
    engine = engine_of(world, seeded(0, model), batch_norm="sync")
    engine.step(random_batch(world, SIZE, MICROBATCHES))
    before = state_of(engine)
    try:
        engine.step(bad(world))
    except NonFiniteError as error:
        return str(error), state_of(engine) == before
    return "", False


def train_small_batches(world: World) -> Any:
    """Compute steps, some without samples for some ranks; the initial weights differ between ranks."""
    engine = engine_of(world, seeded(0, Normed), batch_norm="sync")
    for step, size in enumerate([SIZE, 3, 2, SIZE, 3, 4]):
        engine.step(random_batch(world, size, MICROBATCHES, seed=step))
    return state_of(engine), engine.strategy


def use_different_layers(
    world: World, negative: int, model: type[nn.Module] = SwappedNorms, before: int = 0
) -> tuple[str, str]:
    """Return the error of a step in which the last `negative` microbatches call the norm layers differently.

    There are `before` equal steps before it, and one after it.
    """
    inputs, targets = random_data(2 * MICROBATCHES)
    inputs[:, 0] = 1
    equal = batch_of(world, inputs.clone(), targets, MICROBATCHES)
    inputs[2 * (MICROBATCHES - negative) :, 0] = -1
    engine = engine_of(world, seeded(0, model), batch_norm="sync")
    for _ in range(before):
        engine.step(equal)
    try:
        engine.step(batch_of(world, inputs, targets, MICROBATCHES))
    except InputError as error:
        engine.step(equal)
        return error.code, error.value
    return "", ""


def use_different_models(world: World) -> str:
    """Return the code of the error of an engine whose model differs between ranks."""
    widths = (6, 5 + (world.rank == 1))
    try:
        engine_of(world, nn.Sequential(nn.Linear(*widths), nn.BatchNorm1d(widths[1])), batch_norm="sync")
    except RankMismatchError as error:
        return error.code
    return ""


CHECKS: dict[str, Callable[[World], Any]] = {
    "stop loss": lambda world: stop(world, Normed, bad_loss),
    "stop gradient": lambda world: stop(world, RootNorm, bad_gradient),
    "small batches": train_small_batches,
    "last microbatch": lambda world: use_different_layers(world, 1),
    "second half": lambda world: use_different_layers(world, MICROBATCHES // 2),
    "last microbatch later": lambda world: use_different_layers(world, 1, before=2),
    "skipped layer": lambda world: use_different_layers(world, 1, SkippedNorm),
    "skipped layer later": lambda world: use_different_layers(world, 1, SkippedNorm, before=2),
    "different models": use_different_models,
}


def run_checks() -> dict[str, list[Any]]:
    """Return the results of every check, by rank."""
    with samestep.start(device="cpu") as world:
        return {name: gathered(check(world)) for name, check in CHECKS.items()}


def step_of_one_sample() -> None:
    """Compute a step with a batch of one sample."""
    with samestep.start(device="cpu") as world:
        engine_of(world, seeded(0, Normed), batch_norm="sync").step(random_batch(world, 1, MICROBATCHES))


def failing_step() -> None:
    """Compute a step in which one microbatch raises while all others wait at an exchange."""
    with samestep.start(device="cpu") as world:
        model = seeded(0, Normed)
        model[0].register_forward_hook(fail_above)
        inputs, targets = random_data(2 * MICROBATCHES)
        inputs[5] = 2000
        engine_of(world, model, batch_norm="sync").step(batch_of(world, inputs, targets, MICROBATCHES))


def fail_above(module: nn.Module, arguments: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
    if bool((arguments[0] > 1000).any()):
        raise ArithmeticError("too large")
