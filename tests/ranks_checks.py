"""What ranks run for `unit/engine/test_checks.py`."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import samestep
from batches import random_batch
from models import Normed, Perceptron, seeded
from ranks_loader import gathered
from samestep.data.batch import GlobalBatch
from samestep.engine.step import Engine
from samestep.errors import DriftError, InputError

World = samestep.World
Change = Callable[[Engine], None]
EVERY, CHANGED_AFTER = 5, 7  # so the steps up to 5 are good, and it is step 10 that tells


def engine_of(world: World, *, check_every: int | None, model: type[nn.Module] = Normed) -> Engine:
    made = seeded(0, model)
    made.register_buffer("table", torch.arange(3), persistent=False)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    loss = samestep.cross_entropy
    return Engine(made, optimizer, loss, world=world, check_every=check_every)


def batch(world: World, seed: int = 0) -> GlobalBatch:
    return random_batch(world, 19, 8, seed=seed)


def flip(tensor: torch.Tensor) -> None:
    """Turn the lowest bit of the last element over."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[-1] ^= 1


def step_slot(engine: Engine, slot: str) -> torch.Tensor:
    return engine.optimizer.state[next(iter(engine.model.parameters()))][slot]


CHANGES: dict[str, Change] = {
    "parameter": lambda engine: flip(engine.model[4].weight),
    "averaged buffer": lambda engine: flip(engine.model[1].running_mean),
    "other buffer": lambda engine: engine.model.table.add_(1),
    "optimizer": lambda engine: flip(step_slot(engine, "exp_avg_sq")),
    "learning rate": lambda engine: engine.optimizer.param_groups[0].update(lr=0.02),
}


def drifts(world: World, change: Change, changed: tuple[int, ...]) -> tuple[int, str]:
    """Steps until ranks are seen to differ, and what is said of it."""
    engine = engine_of(world, check_every=EVERY)
    try:
        for number in range(1, 20):
            engine.step(batch(world))
            if number == CHANGED_AFTER and world.rank in changed:
                change(engine)
    except DriftError as error:
        return engine.steps, str(error)
    return 0, ""


def begins_apart(world: World) -> tuple[int, str]:
    engine = engine_of(world, check_every=100)
    if world.rank == 1:
        engine.model.table.add_(1)
    try:
        engine.step(batch(world))
    except DriftError as error:
        return engine.steps, str(error)
    return engine.steps, ""


def asked_to_check(world: World) -> str:
    engine = engine_of(world, check_every=100)
    engine.step(batch(world))
    engine.check()
    if world.rank == 0:
        flip(engine.model[4].weight)
    try:
        engine.check()
    except DriftError as error:
        return str(error)
    return ""


def trained(world: World, check_every: int | None) -> list[Any]:
    """What a correct program gets, with collectives of its own between the steps."""
    engine = engine_of(world, check_every=check_every)
    other = engine_of(world, check_every=None, model=Perceptron)
    found: list[Any] = []
    for number in range(6):
        result = engine.step(batch(world, number))
        found += [result.loss, result.grad_norm, other.step(batch(world)).loss, float(torch.rand(()))]
        found.append(collectives(world))
        found.append(engine.evaluate([batch(world)]))
    tensors = [*engine.model.state_dict().values(), *other.model.state_dict().values()]
    return [found, [tensor.tolist() for tensor in tensors]]


def collectives(world: World) -> list[Any]:
    """Correct ones of many kinds; ranks may ask for one from different lines, and for subgroups apart."""
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


def disagrees(world: World) -> str:
    try:
        engine_of(world, check_every=1 + world.rank)
    except InputError as refused:
        return str(refused)
    return ""


def entries(world: World) -> tuple[int, int]:
    """How many entries of this rank the store holds after some steps and after many; measured from the inside."""
    engine = engine_of(world, check_every=100)
    counts = []
    for _ in range(2):
        for _ in range(10):
            engine.step(batch(world))
            dist.barrier()
        counts.append(len(world.roll_call._mine))
    return counts[0], counts[1]


def run_drifts(ranks: tuple[int, ...]) -> dict[str, list[Any]]:
    """Every change on `ranks`, by rank."""
    with samestep.start(device="cpu") as world:
        found = {name: gathered(drifts(world, change, ranks)) for name, change in CHANGES.items()}
        found["none"] = gathered(drifts(world, lambda engine: None, ()))
        found["from the start"] = gathered(begins_apart(world))
        found["asked"] = gathered(asked_to_check(world))
        found["disagrees"] = gathered(disagrees(world))
        found["entries"] = gathered(entries(world))
        return found


def run_trained(check_every: int | None) -> list[Any]:
    """What all ranks found."""
    with samestep.start(device="cpu") as world:
        return gathered(trained(world, check_every))


def run_roll_call(fault: str, timeout: float = 60) -> None:
    """Six steps in which rank 2 (rank 1 of two) does something else after the third."""
    with samestep.start(device="cpu", timeout=timedelta(seconds=timeout)) as world:
        engine = engine_of(world, check_every=2)
        is_odd = world.rank == min(2, world.size - 1)
        for number in range(1, 7):
            if fault == "fewer batches" and is_odd and number == 4:
                break
            engine.step(batch(world))
            if number == 3:
                after_third(fault, world, engine, is_odd=is_odd)
        if fault == "fewer evaluations" and not is_odd:
            engine.evaluate([batch(world)])


def after_third(fault: str, world: World, engine: Engine, *, is_odd: bool) -> None:
    """What goes wrong in the middle."""
    value = torch.ones(3)
    if (fault == "skipped" and not is_odd) or (fault == "extra" and is_odd):
        dist.all_reduce(value)
    elif fault == "other":
        dist.broadcast(value, src=0) if is_odd else dist.all_reduce(value)
    elif fault == "other length":
        dist.all_reduce(torch.ones(4 if is_odd else 3))
    elif fault == "other operation":
        dist.all_reduce(value, op=dist.ReduceOp.MAX if is_odd else dist.ReduceOp.SUM)
    elif fault == "not waited for" and is_odd:
        dist.all_reduce(value, async_op=True)
    elif fault == "evaluation on main" and world.is_main:
        engine.evaluate([batch(world)])
    elif fault == "asleep" and is_odd:
        time.sleep(60)
