"""What ranks run for `unit/engine/test_step_sync_ranks.py`: each check returns what every rank found, by rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from batches import batch_of, random_batch, random_data
from models import Normed, Root, seeded
from ranks_loader import gathered
from ranks_step import SHARDS, SIZE, bad_gradient, bad_loss, engine_of, state_of
from samestep.errors import InputError, NonFiniteError

World = samestep.World


class Rooted(nn.Sequential):
    """Where an input is zero, its gradient is not finite, before the norm layer."""

    def __init__(self) -> None:
        super().__init__(Root(), nn.BatchNorm1d(4), nn.Linear(4, 4))


class Choosing(nn.Module):
    """Takes its norm layers in another order where the first sample begins with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layers = (self.one, self.two) if inputs[0, 0] > 0 else (self.two, self.one)
        for layer in layers:
            inputs = layer(inputs)
        outputs: torch.Tensor = self.out(inputs)
        return outputs


def stops(world: World, model: type[nn.Module], bad: Callable[[World], Any]) -> tuple[str, bool]:
    """What a step says that stops, and whether it left the model as it was."""
    engine = engine_of(world, seeded(0, model), batch_norm="sync")
    engine.step(random_batch(world, SIZE, SHARDS))
    before = state_of(engine)
    try:
        engine.step(bad(world))
    except NonFiniteError as stopped:
        return str(stopped), state_of(engine) == before
    return "", False


def small(world: World) -> Any:
    """Steps of which some leave ranks without samples, from weights that differ from rank to rank."""
    engine = engine_of(world, seeded(world.rank, Normed), batch_norm="sync")
    for step, size in enumerate([SIZE, 3, 2, SIZE, 3, 4]):
        engine.step(random_batch(world, size, SHARDS, seed=step))
    return state_of(engine), engine.strategy


def apart(world: World, negative: int) -> tuple[str, str, str]:
    """What a step says when the last `negative` shards are at other layers than the rest."""
    inputs, targets = random_data(2 * SHARDS)
    inputs[:, 0] = 1
    inputs[2 * (SHARDS - negative) :, 0] = -1
    engine = engine_of(world, seeded(0, Choosing), batch_norm="sync")
    try:
        engine.step(batch_of(world, inputs, targets, SHARDS))
    except InputError as refused:
        return refused.value, str(refused.rule), str(refused.do)
    return "", "", ""


def other_shapes(world: World) -> str:
    """What an engine says of a model that is not the same on every rank."""
    widths = (6, 5 + (world.rank == 1))
    try:
        engine_of(world, nn.Sequential(nn.Linear(*widths), nn.BatchNorm1d(widths[1])), batch_norm="sync")
    except InputError as refused:
        return refused.value
    return ""


CHECKS: dict[str, Callable[[World], Any]] = {
    "stops loss": lambda world: stops(world, Normed, bad_loss),
    "stops gradient": lambda world: stops(world, Rooted, bad_gradient),
    "small": small,
    "apart": lambda world: apart(world, 1),
    "apart by halves": lambda world: apart(world, SHARDS // 2),
    "other shapes": other_shapes,
}


def run_checks() -> dict[str, list[Any]]:
    """Every check's findings, by rank."""
    with samestep.start(device="cpu") as world:
        return {name: gathered(check(world)) for name, check in CHECKS.items()}


def step_of_one_sample() -> None:
    """A step with a batch of one sample, on every rank."""
    with samestep.start(device="cpu") as world:
        engine_of(world, seeded(0, Normed), batch_norm="sync").step(random_batch(world, 1, SHARDS))


def step_that_fails() -> None:
    """A step in which one shard raises, while all others wait for it."""
    with samestep.start(device="cpu") as world:
        model = seeded(0, Normed)
        model[0].register_forward_hook(fail_above)
        inputs, targets = random_data(2 * SHARDS)
        inputs[5] = 2000
        engine_of(world, model, batch_norm="sync").step(batch_of(world, inputs, targets, SHARDS))


def fail_above(module: nn.Module, arguments: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
    if bool((arguments[0] > 1000).any()):
        raise ArithmeticError("too large")
