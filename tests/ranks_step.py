"""What ranks run for `unit/engine/test_step_ranks.py`: each check returns what every rank found, by rank."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from batches import batch_of, random_batch, random_data
from models import Normed, Perceptron, Picky, Recorder, Root, seeded
from ranks_loader import gathered
from samestep.config import StepRules
from samestep.data.batch import GlobalBatch
from samestep.engine.step import Engine
from samestep.errors import InputError, NonFiniteError

World = samestep.World
Batch = Callable[[World], GlobalBatch]
SHARDS, SIZE = 8, 19


def engine_of(world: World, model: nn.Module, **rules: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(**rules))


def state_of(engine: Engine) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in engine.model.state_dict().values()]


def bad_loss(world: World) -> GlobalBatch:
    inputs, targets = random_data(SIZE)
    inputs[[3, 17]] = math.nan
    return batch_of(world, inputs, targets, SHARDS)


def bad_gradient(world: World) -> GlobalBatch:
    inputs, targets = random_data(SIZE)
    inputs[[3, 17], 0] = 0
    return batch_of(world, inputs, targets, SHARDS)


def stops(
    world: World, reduction: str, model: type[nn.Module], bad: Callable[[World], GlobalBatch]
) -> tuple[str, bool]:
    """What a step says that stops, and whether it left the model as it was."""
    engine = engine_of(world, seeded(0, model), reduction=reduction)
    engine.step(random_batch(world, SIZE, SHARDS))
    before = state_of(engine)
    try:
        engine.step(bad(world))
    except NonFiniteError as stopped:
        return str(stopped), state_of(engine) == before
    return "", False


def skips(world: World, reduction: str, model: type[nn.Module], bad: Batch) -> Any:
    """What three steps tell of which the second is skipped, and the state that they lead to."""
    engine = engine_of(world, seeded(0, model), reduction=reduction, non_finite="skip")
    good = random_batch(world, SIZE, SHARDS)
    results = [engine.step(batch) for batch in (good, bad(world), good)]
    return [(r.step, str(r.loss), str(r.grad_norm), r.skipped) for r in results], state_of(engine)


def scaled(world: World) -> Any:
    """Steps under fp16 from a scale so large that the first ones overflow."""
    model = seeded(0, Normed, dtype=torch.float32)
    engine = engine_of(world, model, precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**32})
    inputs, targets = random_data(SIZE)
    batch = batch_of(world, inputs.float(), targets, SHARDS)
    results = [engine.step(batch) for _ in range(20)]
    return [(r.loss, r.skipped) for r in results], engine.scaler.get_scale(), state_of(engine)


def draws(world: World) -> dict[float, float]:
    """What a model drew, by shard, in the second of two steps."""
    engine = engine_of(world, seeded(0, Recorder))
    for _ in range(2):
        engine.step(random_batch(world, SIZE, SHARDS))
    return engine.model.drawn


def draws_outside(world: World) -> list[float]:
    """What a program draws around its steps."""
    engine = engine_of(world, seeded(0, Normed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            engine.step(random_batch(world, SIZE, SHARDS))
        return drawn


def asked_to_end(world: World) -> list[bool]:
    """What steps tell when the last rank is asked to end before the second."""
    asked: list[bool] = []
    mine = World(rank=world.rank, size=world.size, device=world.device, stop_requested=lambda: bool(asked))
    engine = engine_of(mine, seeded(0, Perceptron))
    first = engine.step(random_batch(mine, SIZE, SHARDS)).stop
    if world.rank == world.size - 1:
        asked.append(True)
    return [first, engine.step(random_batch(mine, SIZE, SHARDS)).stop]


def wants_saved(world: World) -> list[bool]:
    """What steps tell when rank 0 wants a checkpoint after the second."""
    engine = engine_of(world, seeded(0, Perceptron))
    wishes = (False, world.is_main, False)
    return [engine.step(random_batch(world, SIZE, SHARDS), save=wish).save for wish in wishes]


def given_up(world: World) -> list[object]:
    """Two evaluations that may be given up: the last rank is asked to end in the first, then nobody is."""
    asked = [False, world.rank == world.size - 1]
    mine = World(
        rank=world.rank, size=world.size, device=world.device, stop_requested=lambda: bool(asked and asked.pop(0))
    )
    engine = engine_of(mine, seeded(0, Perceptron))
    batches = [random_batch(mine, SIZE, SHARDS) for _ in range(3)]
    first = engine.evaluate_until_stop(batches)
    asked.clear()
    return [first, engine.evaluate_until_stop(batches)]


def idle_parameter(world: World, reduction: str) -> str:
    """What a step says of a parameter that no shard uses."""
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    return refusal(engine_of(world, model, reduction=reduction), random_batch(world, SIZE, SHARDS))


def refusal(engine: Engine, batch: GlobalBatch) -> str:
    try:
        engine.step(batch)
    except InputError as refused:
        return refused.value
    return ""


CHECKS: dict[str, Callable[[World], Any]] = {
    "draws": draws,
    "draws outside": draws_outside,
    "asked to end": asked_to_end,
    "wants saved": wants_saved,
    "given up": given_up,
    "scaled": scaled,
    **{
        f"{what.__name__} {reduction} {kind}": lambda world, what=what, reduction=reduction, kind=kind: what(
            world, reduction, *{"loss": (Normed, bad_loss), "gradient": (Root, bad_gradient)}[kind]
        )
        for what in (stops, skips)
        for reduction in ("exact", "fast")
        for kind in ("loss", "gradient")
    },
    "idle parameter exact": lambda world: idle_parameter(world, "exact"),
    "idle parameter fast": lambda world: idle_parameter(world, "fast"),
}


def run_checks() -> dict[str, list[Any]]:
    """Every check's findings, by rank."""
    with samestep.start(device="cpu") as world:
        return {name: gathered(check(world)) for name, check in CHECKS.items()}


def use_a_layer_in(used: list[int], reduction: str, size: int) -> None:
    """Take a step in which some shards use a layer that the others do not."""
    inputs, targets = random_data(size)
    inputs[:, 0] = -1
    for shard in used:
        inputs[size * shard // SHARDS : size * (shard + 1) // SHARDS, 0] = 1
    with samestep.start(device="cpu") as world:
        engine = engine_of(world, seeded(0, Picky), reduction=reduction)
        engine.step(batch_of(world, inputs, targets, SHARDS))
