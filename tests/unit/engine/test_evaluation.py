"""Evaluation counts every sample once, changes nothing, and rounds once."""

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

import samestep
from batches import batch_of, random_batch, random_data
from models import Normed, Perceptron, Recorder, seeded
from samestep.engine.step import Engine
from samestep.errors import RunError
from samestep.runtime.random_state import preserved_generators, seed_generators

World = samestep.World


class Seen:
    """A metric that remembers what it was given."""

    name = "seen"

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


def told(targets: list[float]) -> Any:
    """Batches of one sample a shard, and a loss that is the targets themselves."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        return samestep.Loss(targets.sum() + 0 * outputs.sum(), len(targets))

    values = torch.tensor(targets, dtype=torch.float64)
    return loss, lambda world: [batch_of(world, torch.zeros(len(values), 6, dtype=torch.float64), values, len(values))]


@pytest.mark.parametrize("sizes", [[16, 16, 5], [1], [8, 3]])
def test_the_loss_is_the_mean_over_all_samples(alone: World, sizes: list[int]) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 16, 4))
    data = [random_data(size, seed=size) for size in sizes]
    values = engine.evaluate([batch_of(alone, *pair, 8) for pair in data], [seen := Seen()])
    engine.model.eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    expected = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    assert values == {"loss": pytest.approx(expected, rel=1e-12), "samples": sum(sizes), "seen": sum(sizes)}
    assert all(outputs == targets > 0 for outputs, targets in seen.counted)


def test_tokens_are_counted_one_by_one(alone: World) -> None:
    inputs, targets = random_data(12)
    targets[[0, 1, 2, 5]] = -100
    engine = engine_of(alone, seeded(0, Perceptron))
    values = engine.evaluate([batch_of(alone, inputs, targets, 4)])
    expected = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    assert values == {"loss": pytest.approx(expected, rel=1e-12), "samples": 12}


def test_losses_are_summed_with_one_rounding(alone: World) -> None:
    loss, batches = told([1e16, 1.0, -1e16, 1.0])
    assert engine_of(alone, seeded(0, Perceptron), loss).evaluate(batches(alone))["loss"] == 0.5


@pytest.mark.parametrize(
    ("losses", "text"),
    [([math.nan, 1.0], "nan"), ([math.inf, 1.0], "inf"), ([math.inf, -math.inf], "nan"), ([1.7e308, 1.7e308], "inf")],
)
def test_a_loss_that_is_not_finite_is_told_as_it_is(alone: World, losses: list[float], text: str) -> None:
    loss, batches = told(losses)
    assert str(engine_of(alone, seeded(0, Perceptron), loss).evaluate(batches(alone))["loss"]) == text


def test_nothing_to_count_is_an_error(alone: World) -> None:
    inputs, targets = random_data(4)
    engine = engine_of(alone, seeded(0, Perceptron))
    with pytest.raises(RunError, match="the loss counted nothing in evaluation"):
        engine.evaluate([batch_of(alone, inputs, torch.full_like(targets, -100), 4)])


def test_evaluation_changes_nothing(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 16, 4))
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    engine.evaluate([random_batch(alone, 16, 4, seed=1)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert engine.steps == 1


def test_evaluation_leaves_the_generators_as_they_were(alone: World) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    engine = engine_of(alone, seeded(0, Recorder))
    with preserved_generators():
        seed_generators(1)
        expected = drawn()
        seed_generators(1)
        engine.evaluate([random_batch(alone, 8, 4)])
        assert drawn() == expected


def test_what_a_model_draws_in_evaluation_is_the_same_each_time_and_not_trainings(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Recorder))
    batch, found = random_batch(alone, 8, 4), []
    engine.step(batch)
    found.append(dict(engine.model.drawn))
    for _ in range(2):
        engine.evaluate([batch])
        found.append(dict(engine.model.drawn))
    training, first, second = found
    assert first == second
    assert len({*training.values(), *first.values()}) == 8


def asked_after(world: World, looks: int) -> World:
    """A world that is asked to end when it has been looked at so often."""
    left = iter(range(looks))
    return World(rank=0, size=1, device=world.device, stop_requested=lambda: next(left, None) is None)


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_an_evaluation_is_given_up_at_the_next_batch_and_leaves_no_counts(alone: World, looks: int) -> None:
    world = asked_after(alone, looks)
    engine, seen = engine_of(world, seeded(0, Normed)), Seen()
    batches = [random_batch(alone, 8, 4, seed=seed) for seed in range(3)]
    assert engine.evaluate_until_stop(batches, [seen]) is None
    assert len(seen.counted) == 4 * looks
    assert engine.evaluate(batches, [seen])["seen"] == 24


def test_a_request_after_the_last_batch_comes_too_late(alone: World) -> None:
    engine = engine_of(asked_after(alone, 2), seeded(0, Normed))
    values = engine.evaluate_until_stop([random_batch(alone, 8, 4, seed=seed) for seed in range(2)])
    assert values is not None
    assert values["samples"] == 16


def test_evaluate_does_not_end_early(alone: World) -> None:
    engine = engine_of(asked_after(alone, 0), seeded(0, Normed))
    assert engine.evaluate([random_batch(alone, 8, 4)])["samples"] == 8
