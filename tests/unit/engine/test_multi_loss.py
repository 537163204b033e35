"""Parts are divided by their own counts of the whole batch, however it is cut."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import samestep
from batches import batch_of, random_batch, random_data
from models import Perceptron, seeded
from samestep.config import StepRules
from samestep.engine.loss import Loss
from samestep.engine.step import Engine
from samestep.errors import InputError, NonFiniteError, RunError
from samestep.metrics import build_metrics

World = samestep.World
Part = samestep.LossPart


def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return samestep.cross_entropy(outputs, targets).sum


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs**2).sum()


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


def engine_of(world: World, *parts: Part) -> Engine:
    model = seeded(0, Perceptron)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), samestep.MultiLoss(parts), world=world)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(is_ignored=[True] * 9, shards=4, weights=(1.0, 0.5))
@example(is_ignored=[False, True, True], shards=8, weights=(1.0, 0.0))
@given(
    is_ignored=st.lists(st.booleans(), min_size=1, max_size=20),
    shards=st.integers(1, 9),
    weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_gradient_and_loss_are_those_of_the_whole_batch(
    alone: World, is_ignored: list[bool], shards: int, weights: tuple[float, float]
) -> None:
    inputs, targets = random_data(len(is_ignored), seed=len(is_ignored))
    targets[torch.tensor(is_ignored)] = -100
    engine = engine_of(
        alone, Part("tokens", tokens, counted, weight=weights[0]), Part("squares", squares, weight=weights[1])
    )
    plain = seeded(0, Perceptron)
    outputs = plain(inputs)
    means = [
        torch.zeros(()) if all(is_ignored) else functional.cross_entropy(outputs, targets),
        (outputs**2).sum(1).mean(),
    ]
    expected = weights[0] * means[0] + weights[1] * means[1]
    expected.backward()

    batch = batch_of(alone, inputs, targets, shards)
    values = engine.evaluate([batch])
    result = engine.step(batch)
    scale = sum(abs(weight) * float(mean.detach()) for weight, mean in zip(weights, means, strict=True))
    close = {"rel": 1e-12, "abs": 1e-13 * scale}
    assert result.loss == pytest.approx(float(expected.detach()), **close)
    assert values["loss"] == pytest.approx(float(expected.detach()), **close)
    assert values["loss_squares"] == pytest.approx(float(means[1].detach()), rel=1e-12)
    assert math.isnan(values["loss_tokens"]) == all(is_ignored)
    assert result.count == len(is_ignored)
    for mine, its in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-11, atol=1e-13 * (1 + scale))


@pytest.mark.parametrize("shards", [1, 4, 8])
def test_a_term_that_is_counted_once_is_there_once(alone: World, shards: int) -> None:
    engine = engine_of(alone, Part("penalty", lambda outputs, targets: outputs.sum() * 0 + 3.0, "once", weight=0.5))
    batch = random_batch(alone, 13, shards)
    assert engine.step(batch).loss == pytest.approx(1.5, rel=1e-14)
    assert engine.evaluate([batch, random_batch(alone, 3, shards)])["loss_penalty"] == pytest.approx(3.0, rel=1e-14)


def test_one_part_by_samples_is_the_plain_loss(alone: World) -> None:
    results = []
    for loss in (samestep.cross_entropy, samestep.MultiLoss([Part("only", tokens)])):
        model = seeded(0, Perceptron)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, world=alone)
        results.append((engine.step(random_batch(alone, 16, 4)), model.state_dict()))
    (first, weights), (second, others) = results
    assert first == second
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_parts_go_with_batch_norm_over_the_whole_batch(alone: World) -> None:
    """Then a step is that of the whole batch in plain torch, whatever the shards."""
    inputs, targets = random_data(13)
    targets[:5] = -100
    model, plain = seeded(0, NormedAndSquared), seeded(0, NormedAndSquared)
    loss = samestep.MultiLoss(
        [
            Part("tokens", lambda outputs, targets: tokens(outputs[0], targets), counted),
            Part("squares", lambda outputs, targets: squares(outputs[0], targets), weight=0.3),
            Part("penalty", lambda outputs, targets: outputs[1], "once", weight=0.1),
        ]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, loss, world=alone, rules=StepRules(batch_norm="sync"))
    result = engine.step(batch_of(alone, inputs, targets, 4))
    outputs, penalty = plain(inputs)
    expected = functional.cross_entropy(outputs, targets) + 0.3 * squares(outputs, targets) / 13 + 0.1 * penalty
    expected.backward()
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-14)


def test_a_part_that_is_not_finite_names_its_shard(alone: World) -> None:
    inputs, targets = random_data(8)
    inputs[6] = math.nan
    engine = engine_of(alone, Part("tokens", tokens, counted), Part("squares", squares))
    with pytest.raises(NonFiniteError, match="the loss of shard 3 is not finite"):
        engine.step(batch_of(alone, inputs, targets, 4))


def test_parts_may_have_different_types_of_numbers(alone: World) -> None:
    engine = engine_of(alone, Part("a", lambda o, t: o.float().sum()), Part("b", lambda o, t: o.sum().reshape(1, 1)))
    batch = random_batch(alone, 6, 2)
    with torch.no_grad():
        expected = 2 / 6 * sum(float(engine.model(shard.data[0]).sum()) for shard in batch.parts)
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)


def test_nothing_to_count_in_any_part_is_an_error(alone: World) -> None:
    inputs, targets = random_data(4)
    engine = engine_of(alone, Part("tokens", tokens, counted))
    with pytest.raises(RunError, match="the loss counted nothing in evaluation"):
        engine.evaluate([batch_of(alone, inputs, torch.full_like(targets, -100), 2)])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (1.5, "loss part bad returned a float;"),
        (Loss(torch.ones(()), 1), "loss part bad returned a Loss;"),
        (torch.ones(2), r"loss part bad returned a Tensor of shape \(2,\);"),
    ],
)
def test_what_is_no_sum_is_refused(alone: World, returned: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        engine_of(alone, Part("bad", lambda outputs, targets: returned)).step(random_batch(alone, 4, 2))


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_counts_that_cannot_be_are_refused(alone: World, count: float) -> None:
    engine = engine_of(alone, Part("bad", squares, lambda targets: count))
    with pytest.raises(InputError, match="loss part bad counted"):
        engine.step(random_batch(alone, 4, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Part("two words", tokens),
        lambda: Part("", tokens),
        lambda: Part("a", tokens, "tokens"),  # type: ignore[arg-type]
        lambda: Part("a", tokens, weight=math.nan),
        lambda: samestep.MultiLoss([]),
        lambda: samestep.MultiLoss([Part("a", tokens), Part("a", squares)]),
    ],
)
def test_parts_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert error.value.rule
    assert error.value.do


def test_a_loss_of_parts_is_refused_inside_another_loss(alone: World) -> None:
    """There it would be a mean of means."""
    inner = samestep.MultiLoss([Part("tokens", tokens, counted)])
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, lambda o, t: 2 * inner(o, t), world=alone)
    with pytest.raises(TypeError, match=r"give it to samestep\.Engine as it is"):
        engine.step(random_batch(alone, 4, 2))


# --- outputs that are more than a tensor -----------------------------------------------------------------


class NormedAndSquared(torch.nn.Sequential):
    """With batch norm; returns its outputs, and the squares of its last weights."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 4)
        )

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(inputs), self[3].weight.square().sum()


class Both(Perceptron):
    """Returns a tuple."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(inputs)
        return logits, logits.sum(1)


def test_a_plain_loss_may_take_outputs_that_are_a_tuple(alone: World) -> None:
    model = seeded(0, Both)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, lambda outputs, targets: tokens(outputs[0], targets) / 4, world=alone)
    batch = random_batch(alone, 8, 2)
    expected = engine.evaluate([batch])["loss"]
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-14)


def test_metrics_of_recipes_refuse_outputs_that_are_no_tensor(alone: World) -> None:
    model = seeded(0, Both)
    loss = samestep.MultiLoss([Part("tokens", lambda outputs, targets: tokens(outputs[0], targets))])
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, world=alone)
    with pytest.raises(InputError, match="metric accuracy was given the model's outputs as a tuple"):
        engine.evaluate([random_batch(alone, 8, 2)], build_metrics(("accuracy",), 4, alone.device))
