"""Rank functions for `unit/engine/test_consistency.py`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import samestep
from helpers.batches import random_batch
from helpers.models import Normed, Perceptron, seeded
from samestep.data.batch import GlobalBatch
from samestep.engine.engine import Engine
from samestep.errors import InputError, RankMismatchError
from workers.loader import gathered

World = samestep.World
Change = Callable[[Engine], Any]
EVERY, CHANGED_AFTER = 5, 7  # the check after step 5 passes, the check after step 10 fails


def engine_of(world: World, *, check_every: int | None, kind: type[nn.Module] = Normed) -> Engine:
    model = seeded(0, kind)
    model.register_buffer("table", torch.arange(3), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, check_every=check_every)


def batch(world: World, seed: int = 0) -> GlobalBatch:
    return random_batch(world, 19, 8, seed=seed)


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last element."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[-1] ^= 1


def step_slot(engine: Engine, slot: str) -> torch.Tensor:
    return engine.optimizer.state[next(iter(engine.model.parameters()))][slot]


CHANGES: dict[str, Change] = {
    "parameter": lambda engine: flip(engine.model[4].weight),
    "averaged buffer": lambda engine: flip(engine.model[1].running_mean),
    "other buffer": lambda engine: engine.model.table.add_(1),
    "optimizer": lambda engine: flip(step_slot(engine, "exp_avg_sq")),
    "all parameters": lambda engine: [flip(parameter) for parameter in engine.model.parameters()],
}


def change_one_rank(world: World, change: Change, changed: tuple[int, ...]) -> tuple[int, str]:
    """Return the number of steps before the error, and its text; 0 and an empty text without an error."""
    engine = engine_of(world, check_every=EVERY)
    try:
        for number in range(1, 20):
            engine.step(batch(world))
            if number == CHANGED_AFTER and world.rank in changed:
                change(engine)
    except RankMismatchError as error:
        return engine.steps, str(error)
    return 0, ""


def start_differently(world: World) -> tuple[int, str]:
    engine = engine_of(world, check_every=100)
    if world.rank == 1:
        engine.model.table.add_(1)
    try:
        engine.step(batch(world))
    except RankMismatchError as error:
        return engine.steps, str(error)
    return engine.steps, ""


def check_explicitly(world: World) -> str:
    engine = engine_of(world, check_every=100)
    engine.step(batch(world))
    engine.check()
    if world.rank == 0:
        flip(engine.model[4].weight)
    try:
        engine.check()
    except RankMismatchError as error:
        return str(error)
    return ""


def train(world: World, check_every: int | None) -> list[Any]:
    """Return the results of a correct program with its own collectives between steps."""
    engine = engine_of(world, check_every=check_every)
    other = engine_of(world, check_every=None, kind=Perceptron)
    results: list[Any] = []
    for number in range(6):
        result = engine.step(batch(world, number))
        results += [result.loss, result.grad_norm, other.step(batch(world)).loss, float(torch.rand(()))]
        results.append(collectives(world))
        results.append(engine.evaluate([batch(world)]))
    tensors = [*engine.model.state_dict().values(), *other.model.state_dict().values()]
    return [results, [tensor.tolist() for tensor in tensors]]


def collectives(world: World) -> list[Any]:
    """Issue correct collectives of many kinds, some from different lines and some in a subgroup."""
    value = torch.full((3,), float(world.rank))
    dist.all_reduce(value)
    if world.is_main:
        dist.broadcast(value, src=0)
    else:
        dist.broadcast(value, src=0)
    parts = [torch.zeros(3) for _ in range(world.size)]
    dist.all_gather(parts, value)
    objects: list[Any] = [None] * world.size
    dist.all_gather_object(objects, world.rank)
    dist.barrier()
    dist.reduce(value, dst=1, op=dist.ReduceOp.MAX)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if world.rank == 0:
        dist.send(torch.ones(1), 1)
    elif world.rank == 1:
        dist.recv(torch.ones(1), 0)
    work.wait()
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)
    world.barrier()
    return [value.tolist() if world.rank == 1 else None, objects]


def use_different_check_every(world: World) -> tuple[str, str]:
    try:
        engine_of(world, check_every=1 + world.rank)
    except InputError as error:
        return error.code, error.value
    return "", ""


def run_changes(ranks: tuple[int, ...]) -> dict[str, list[Any]]:
    """Return the result of every change on `ranks`, by rank."""
    with samestep.start(device="cpu") as world:
        results = {name: gathered(change_one_rank(world, change, ranks)) for name, change in CHANGES.items()}
        results["none"] = gathered(change_one_rank(world, lambda engine: None, ()))
        results["initial state"] = gathered(start_differently(world))
        results["explicit check"] = gathered(check_explicitly(world))
        results["different check_every"] = gathered(use_different_check_every(world))
        return results


def run_training(check_every: int | None) -> list[Any]:
    """Return the results of all ranks."""
    with samestep.start(device="cpu") as world:
        return gathered(train(world, check_every))


def run_operation_fault(fault: str) -> None:
    """Compute six steps; after the third, one rank issues other operations."""
    with samestep.start(device="cpu") as world:
        engine = engine_of(world, check_every=2)
        is_odd = world.rank == min(2, world.size - 1)
        for number in range(1, 7):
            if fault == "fewer batches" and is_odd and number == 4:
                break
            engine.step(batch(world))
            if fault == "evaluation on main" and number == 3 and world.is_main:
                engine.evaluate([batch(world)])
        if fault == "fewer evaluations" and not is_odd:
            engine.evaluate([batch(world)])
