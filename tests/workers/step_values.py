"""Rank function for `unit/engine/test_step_stats.py`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Perceptron, seeded
from samestep.engine.engine import Engine
from workers.bad_samples import Faulty
from workers.loader import gathered

MICROBATCHES, SIZES = 8, (19, 19, 3, 19)  # the third batch has fewer microbatches with samples
Values = Callable[[int, torch.Tensor, torch.Tensor], dict[str, Any]]  # from step, logits and losses of samples

# Values for logging by case, and the steps after the first one in which ranks exchange them in their own message.
CASES: dict[str, tuple[Values, list[int]]] = {
    "none": (lambda step, logits, losses: {}, []),
    "equal names": (lambda step, logits, losses: {"b": losses.mean(), "a": 2.5, "least": -0.0}, []),
    "not finite": (lambda step, logits, losses: {"a": math.nan, "b": -math.inf}, []),
    "another name": (lambda step, logits, losses: {"a" if step < 2 else "b": losses.mean()}, [2]),
    "none later": (lambda step, logits, losses: {"a": 1} if step < 2 else {}, [2]),
    "one microbatch": (lambda step, logits, losses: {"a": 1} if losses.numel() < 3 else {}, [1, 2, 3]),
    "a sum and a count": (lambda step, logits, losses: {"a": samestep.Loss(losses.sum(), 2 * len(losses))}, []),
}


def run_on_all() -> list[dict[str, Any]]:
    """Return, by rank and case, the values of each step as text, and the later steps with a further message."""
    with samestep.start(device="cpu") as world:
        return gathered({name: _train(world, values) for name, (values, _) in CASES.items()})


def with_unusable_microbatch() -> list[list[dict[str, float]]]:
    """Return loss and values of two steps and an evaluation; all samples of the first microbatch are unusable."""

    def forward(model: Any, data: Any) -> dict[str, Any]:
        loss = functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        result = samestep.Loss(loss, len(data[1]))
        return {"loss": result, "same": result, "mean": loss.detach() / len(data[1])}

    with samestep.start(device="cpu") as world:
        model = seeded(1, Perceptron, dtype=torch.float32)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        batches = samestep.loader(
            Faulty(frozenset((0, 1))), batch_size=8, microbatches=4, world=world, bad_samples="skip"
        )
        steps = [engine.step(batch, forward=forward) for batch in islice(batches, 2)]
        evaluation = engine.evaluate(batches, forward=forward)
        results = [*({"loss": step.loss, **step.values} for step in steps), evaluation]
        return gathered(results)


@contextmanager
def _waits(world: samestep.World) -> Iterator[list[str]]:
    """Collect the names of the collectives in the block."""
    names: list[str] = []

    def begin(name: str) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    world.context.status.on_wait = begin
    yield names
    world.context.status.on_wait = None


def _train(world: samestep.World, values: Values) -> tuple[list[dict[str, str]], list[int]]:
    model = seeded(1, Perceptron)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
    results, with_message = [], []
    for step, size in enumerate(SIZES):
        batch = batch_of(world, *random_data(size, seed=step), MICROBATCHES)

        def forward(model: Any, data: Any, step: int = step) -> dict[str, Any]:
            logits = model(data[0])
            losses = functional.cross_entropy(logits, data[1], reduction="none")
            return {"loss": losses.mean(), **values(step, logits.detach(), losses.detach())}

        with _waits(world) as waits:
            result = engine.step(batch, forward=forward)
        if step > 0 and "an all-gather" in waits:
            with_message.append(step)
        results.append({name: float(value).hex() for name, value in result.values.items()})
    return results, with_message
