"""Rank functions for `unit/engine/test_step_runner.py`; each check returns one result per rank."""

import math
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Perceptron, Picky, Recorder, Root, seeded
from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.signals import StopRequest
from samestep.distributed.world import RunContext
from samestep.engine.engine import Engine
from samestep.errors import InputError, NonFiniteError
from workers.loader import gathered

World = samestep.World
Batch = Callable[[World], GlobalBatch]
MICROBATCHES, SIZE = 8, 19


def engine_of(world: World, model: nn.Module, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(**options))


def state_of(engine: Engine) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in engine.model.state_dict().values()]


def bad_loss(world: World) -> GlobalBatch:
    inputs, targets = random_data(SIZE)
    inputs[[3, 17]] = math.nan
    return batch_of(world, inputs, targets, MICROBATCHES)


def bad_gradient(world: World) -> GlobalBatch:
    inputs, targets = random_data(SIZE)
    inputs[[3, 17], 0] = 0
    return batch_of(world, inputs, targets, MICROBATCHES)


def stop(world: World, reduction: str, model: type[nn.Module], bad: Callable[[World], GlobalBatch]) -> tuple[str, bool]:
    """Return the error of a bad step, and whether the state of the model is unchanged."""
    engine = engine_of(world, seeded(0, model), reduction=reduction)
    engine.step(random_batch(world, SIZE, MICROBATCHES))
    before = state_of(engine)
    try:
        engine.step(bad(world))
    except NonFiniteError as error:
        return str(error), state_of(engine) == before
    return "", False


def skip(world: World, reduction: str, model: type[nn.Module], bad: Batch) -> Any:
    """Return the results of three steps, of which the second is skipped, and the state after them."""
    engine = engine_of(world, seeded(0, model), reduction=reduction, non_finite="skip")
    good = random_batch(world, SIZE, MICROBATCHES)
    results = [engine.step(batch) for batch in (good, bad(world), good)]
    return [(r.step, str(r.loss), str(r.grad_norm), r.skipped) for r in results], state_of(engine)


def reduce_scale(world: World) -> Any:
    """Compute fp16 steps; the initial scale is so large that the first steps overflow."""
    model = seeded(0, Normed, dtype=torch.float32)
    engine = engine_of(world, model, precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**32})
    inputs, targets = random_data(SIZE)
    batch = batch_of(world, inputs.float(), targets, MICROBATCHES)
    results = [engine.step(batch) for _ in range(20)]
    return [(r.loss, r.skipped) for r in results], engine.scaler.get_scale(), state_of(engine)


def draw(world: World) -> dict[float, float]:
    """Return the draws of a model in the second of two steps, by microbatch."""
    engine = engine_of(world, seeded(0, Recorder))
    for _ in range(2):
        engine.step(random_batch(world, SIZE, MICROBATCHES))
    return engine.model.drawn


def draw_between_steps(world: World) -> list[float]:
    """Return the draws of a program between its steps."""
    engine = engine_of(world, seeded(0, Normed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            engine.step(random_batch(world, SIZE, MICROBATCHES))
        return drawn


def request_stop(world: World) -> list[bool]:
    """Return `stop` of two steps; the last rank receives a request before the second."""
    stop = StopRequest()
    own_world = World(rank=world.rank, size=world.size, device=world.device, context=RunContext.local(stop))
    engine = engine_of(own_world, seeded(0, Perceptron))
    first = engine.step(random_batch(own_world, SIZE, MICROBATCHES)).stop
    if world.rank == world.size - 1:
        stop.number = signal.SIGTERM
    return [first, engine.step(random_batch(own_world, SIZE, MICROBATCHES)).stop]


def request_save(world: World) -> list[bool]:
    """Return `save` of three steps; rank 0 requests a checkpoint after the second."""
    engine = engine_of(world, seeded(0, Perceptron))
    requests = (False, world.is_main, False)
    return [engine.step(random_batch(world, SIZE, MICROBATCHES), save=request).save for request in requests]


def stop_evaluation(world: World, **options: Any) -> list[object]:
    """Return two evaluations; the last rank receives a stop request in the first."""
    answers = [False, world.rank == world.size - 1]

    class ScriptedStop(StopRequest):
        def __call__(self) -> bool:
            return bool(answers and answers.pop(0))

    own_world = World(rank=world.rank, size=world.size, device=world.device, context=RunContext.local(ScriptedStop()))
    engine = engine_of(own_world, seeded(0, Perceptron), **options)
    batches = [random_batch(own_world, SIZE, MICROBATCHES) for _ in range(3)]
    first = engine.evaluate_until_stop(batches)
    answers.clear()
    return [first, engine.evaluate_until_stop(batches)]


def use_idle_parameter(world: World, reduction: str) -> tuple[str, str]:
    """Return code and message for a parameter that no microbatch uses."""
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    engine = engine_of(world, model, reduction=reduction)
    try:
        engine.step(random_batch(world, SIZE, MICROBATCHES))
    except InputError as error:
        return error.code, error.value
    return "", ""


CHECKS: dict[str, Callable[[World], Any]] = {
    "draw": draw,
    "draw between steps": draw_between_steps,
    "stop request": request_stop,
    "save request": request_save,
    "stopped evaluation": stop_evaluation,
    "stopped evaluation of a global loss": lambda world: stop_evaluation(world, gather="global"),
    "reduced scale": reduce_scale,
    **{
        f"{check.__name__} {reduction} {kind}": lambda world, check=check, reduction=reduction, kind=kind: check(
            world, reduction, *{"loss": (Normed, bad_loss), "gradient": (Root, bad_gradient)}[kind]
        )
        for check in (stop, skip)
        for reduction in ("exact", "fast")
        for kind in ("loss", "gradient")
    },
    "idle parameter exact": lambda world: use_idle_parameter(world, "exact"),
    "idle parameter fast": lambda world: use_idle_parameter(world, "fast"),
}


def run_checks() -> dict[str, list[Any]]:
    """Return the results of every check, by rank."""
    with samestep.start(device="cpu") as world:
        return {name: gathered(check(world)) for name, check in CHECKS.items()}


def use_layer_in(used: list[int], reduction: str, size: int) -> None:
    """Compute a step in which only the microbatches `used` use a layer."""
    inputs, targets = random_data(size)
    inputs[:, 0] = -1
    for microbatch in used:
        inputs[size * microbatch // MICROBATCHES : size * (microbatch + 1) // MICROBATCHES, 0] = 1
    with samestep.start(device="cpu") as world:
        engine = engine_of(world, seeded(0, Picky), reduction=reduction)
        engine.step(batch_of(world, inputs, targets, MICROBATCHES))
