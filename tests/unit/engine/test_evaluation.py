"""Evaluation counts every sample once, changes no state and rounds sums once."""

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Perceptron, Recorder, seeded
from samestep.distributed.rng import preserved_generators, seed_generators
from samestep.distributed.signals import StopRequest
from samestep.distributed.world import RunContext
from samestep.engine.engine import Engine
from samestep.errors import RunError

World = samestep.World


class CountingMetric:
    """A metric that counts outputs and records the sizes of its updates."""

    name = "outputs_counted"

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert not outputs.requires_grad
        self.sizes.append((len(outputs), len(targets)))

    def compute(self, world: World) -> float:
        value = float(sum(outputs for outputs, _ in self.sizes))
        self.reset()
        return value

    def reset(self) -> None:
        self.counted, self.sizes = self.sizes, []


def engine_of(world: World, model: Any, loss: Any = samestep.cross_entropy) -> Engine:
    return Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, world=world)


def loss_and_batches(targets: list[float]) -> Any:
    """Return a loss equal to the targets, and a function from a world to batches with one sample per microbatch."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        return samestep.Loss(targets.sum() + 0 * outputs.sum(), len(targets))

    values = torch.tensor(targets, dtype=torch.float64)
    return loss, lambda world: [batch_of(world, torch.zeros(len(values), 6, dtype=torch.float64), values, len(values))]


@pytest.mark.parametrize("sizes", [[16, 16, 5], [1], [8, 3]])
def test_loss_is_the_mean_over_all_samples(alone: World, sizes: list[int]) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 16, 4))
    data = [random_data(size, seed=size) for size in sizes]
    values = engine.evaluate([batch_of(alone, *pair, 8) for pair in data], [metric := CountingMetric()])
    engine.model.eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    expected = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    assert values == {"loss": pytest.approx(expected, rel=1e-12), "samples": sum(sizes), "outputs_counted": sum(sizes)}
    assert all(outputs == targets > 0 for outputs, targets in metric.counted)


def test_loss_is_the_mean_over_tokens(alone: World) -> None:
    inputs, targets = random_data(12)
    targets[[0, 1, 2, 5]] = -100
    engine = engine_of(alone, seeded(0, Perceptron))
    values = engine.evaluate([batch_of(alone, inputs, targets, 4)])
    expected = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    assert values == {"loss": pytest.approx(expected, rel=1e-12), "samples": 12}


def test_sum_of_losses_is_rounded_once(alone: World) -> None:
    loss, batches = loss_and_batches([1e16, 1.0, -1e16, 1.0])
    assert engine_of(alone, seeded(0, Perceptron), loss).evaluate(batches(alone))["loss"] == 0.5


@pytest.mark.parametrize(
    ("losses", "text"),
    [([math.nan, 1.0], "nan"), ([math.inf, 1.0], "inf"), ([math.inf, -math.inf], "nan"), ([1.7e308, 1.7e308], "inf")],
)
def test_non_finite_loss_is_returned(alone: World, losses: list[float], text: str) -> None:
    loss, batches = loss_and_batches(losses)
    assert str(engine_of(alone, seeded(0, Perceptron), loss).evaluate(batches(alone))["loss"]) == text


def test_nothing_counted_is_an_error(alone: World) -> None:
    inputs, targets = random_data(4)
    engine = engine_of(alone, seeded(0, Perceptron))
    with pytest.raises(RunError) as error:
        engine.evaluate([batch_of(alone, inputs, torch.full_like(targets, -100), 4)])
    assert error.value.code == "E_LOSS"


def test_evaluation_changes_no_state(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 16, 4))
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    engine.evaluate([random_batch(alone, 16, 4, seed=1)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert engine.steps == 1


class Carrying(torch.nn.Linear):
    state = None
    total, calls = torch.zeros(()), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.state is None
        assert self.calls == self.total == 0
        self.state, self.calls = inputs, self.calls + 1
        self.total += 1
        return super().forward(inputs)


def test_microbatches_start_with_the_attributes_before_the_evaluation(alone: World) -> None:
    model = Carrying(6, 4, dtype=torch.float64)
    model.total = torch.zeros(())
    engine_of(alone, model).evaluate([random_batch(alone, 8, 4)])
    assert (model.state, model.calls, model.total.item()) == (None, 0, 0.0)


def test_evaluation_leaves_the_generators_unchanged(alone: World) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    engine = engine_of(alone, seeded(0, Recorder))
    with preserved_generators():
        seed_generators(1)
        expected = drawn()
        seed_generators(1)
        engine.evaluate([random_batch(alone, 8, 4)])
        assert drawn() == expected


def test_draws_in_evaluation_repeat_and_differ_from_training(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Recorder))
    batch, draws = random_batch(alone, 8, 4), []
    engine.step(batch)
    draws.append(dict(engine.model.drawn))
    for _ in range(2):
        engine.evaluate([batch])
        draws.append(dict(engine.model.drawn))
    training, first, second = draws
    assert first == second
    assert len({*training.values(), *first.values()}) == 8


def stop_after(world: World, reads: int) -> World:
    """Return a world whose stop request is set after `reads` reads."""
    left = iter(range(reads))

    class StopAfter(StopRequest):
        def __call__(self) -> bool:
            return next(left, None) is None

    return World(rank=0, size=1, device=world.device, context=RunContext.local(StopAfter()))


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_stop_request_ends_evaluation_at_the_next_batch_and_resets_metrics(alone: World, reads: int) -> None:
    world = stop_after(alone, reads)
    engine, metric = engine_of(world, seeded(0, Normed)), CountingMetric()
    batches = [random_batch(alone, 8, 4, seed=seed) for seed in range(3)]
    assert engine.evaluate_until_stop(batches, [metric]) is None
    assert len(metric.counted) == 4 * reads
    assert engine.evaluate(batches, [metric])["outputs_counted"] == 24


def test_stop_request_after_the_last_batch_has_no_effect(alone: World) -> None:
    engine = engine_of(stop_after(alone, 2), seeded(0, Normed))
    values = engine.evaluate_until_stop([random_batch(alone, 8, 4, seed=seed) for seed in range(2)])
    assert values is not None
    assert values["samples"] == 16


def test_evaluate_ignores_stop_requests(alone: World) -> None:
    engine = engine_of(stop_after(alone, 0), seeded(0, Normed))
    assert engine.evaluate([random_batch(alone, 8, 4)])["samples"] == 8
