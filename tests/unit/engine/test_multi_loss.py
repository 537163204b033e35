"""Terms of a loss are divided by their own counts over the global batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Perceptron, seeded
from samestep.config import StepConfig
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.errors import InputError, NonFiniteError, RunError
from samestep.metrics.metrics import build_metrics

World = samestep.World
LossTerm = samestep.LossTerm


def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return samestep.cross_entropy(outputs, targets).sum


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs**2).sum()


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


def engine_of(world: World, *terms: LossTerm) -> Engine:
    model = seeded(0, Perceptron)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), samestep.MultiLoss(terms), world=world)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(is_ignored=[True] * 9, microbatches=4, weights=(1.0, 0.5))
@example(is_ignored=[False, True, True], microbatches=8, weights=(1.0, 0.0))
@given(
    is_ignored=st.lists(st.booleans(), min_size=1, max_size=20),
    microbatches=st.integers(1, 9),
    weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_gradient_and_loss_equal_those_of_the_whole_batch(
    alone: World, is_ignored: list[bool], microbatches: int, weights: tuple[float, float]
) -> None:
    inputs, targets = random_data(len(is_ignored), seed=len(is_ignored))
    targets[torch.tensor(is_ignored)] = -100
    engine = engine_of(
        alone,
        LossTerm("tokens", tokens, counted, weight=weights[0]),
        LossTerm("squares", squares, weight=weights[1]),
    )
    plain = seeded(0, Perceptron)
    outputs = plain(inputs)
    means = [
        torch.zeros(()) if all(is_ignored) else functional.cross_entropy(outputs, targets),
        (outputs**2).sum(1).mean(),
    ]
    expected = weights[0] * means[0] + weights[1] * means[1]
    expected.backward()

    batch = batch_of(alone, inputs, targets, microbatches)
    values = engine.evaluate([batch])
    result = engine.step(batch)
    scale = sum(abs(weight) * float(mean.detach()) for weight, mean in zip(weights, means, strict=True))
    close = {"rel": 1e-12, "abs": 1e-13 * scale}
    assert result.loss == pytest.approx(float(expected.detach()), **close)
    assert values["loss"] == pytest.approx(float(expected.detach()), **close)
    assert values["loss_squares"] == pytest.approx(float(means[1].detach()), rel=1e-12)
    assert math.isnan(values["loss_tokens"]) == all(is_ignored)
    assert result.count == len(is_ignored)
    for parameter, reference in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-11, atol=1e-13 * (1 + scale))


@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_term_counted_once_is_added_once(alone: World, microbatches: int) -> None:
    engine = engine_of(alone, LossTerm("penalty", lambda outputs, targets: outputs.sum() * 0 + 3.0, "once", weight=0.5))
    batch = random_batch(alone, 13, microbatches)
    assert engine.step(batch).loss == pytest.approx(1.5, rel=1e-14)
    assert engine.evaluate([batch, random_batch(alone, 3, microbatches)])["loss_penalty"] == pytest.approx(
        3.0, rel=1e-14
    )


def test_one_term_counted_by_samples_equals_a_plain_loss(alone: World) -> None:
    results = []
    for loss in (samestep.cross_entropy, samestep.MultiLoss([LossTerm("only", tokens)])):
        model = seeded(0, Perceptron)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, world=alone)
        results.append((engine.step(random_batch(alone, 16, 4)), model.state_dict()))
    (first, weights), (second, others) = results
    assert first == second
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_terms_with_sync_batch_norm(alone: World) -> None:
    """A step equals that of plain torch on the whole batch."""
    inputs, targets = random_data(13)
    targets[:5] = -100
    model, plain = seeded(0, NormedAndSquared), seeded(0, NormedAndSquared)
    loss = samestep.MultiLoss(
        [
            LossTerm("tokens", lambda outputs, targets: tokens(outputs[0], targets), counted),
            LossTerm("squares", lambda outputs, targets: squares(outputs[0], targets), weight=0.3),
            LossTerm("penalty", lambda outputs, targets: outputs[1], "once", weight=0.1),
        ]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, loss, world=alone, config=StepConfig(batch_norm="sync"))
    result = engine.step(batch_of(alone, inputs, targets, 4))
    outputs, penalty = plain(inputs)
    expected = functional.cross_entropy(outputs, targets) + 0.3 * squares(outputs, targets) / 13 + 0.1 * penalty
    expected.backward()
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-10, atol=1e-14)


def test_non_finite_term_is_reported_with_its_microbatch(alone: World) -> None:
    inputs, targets = random_data(8)
    inputs[6] = math.nan
    engine = engine_of(alone, LossTerm("tokens", tokens, counted), LossTerm("squares", squares))
    with pytest.raises(NonFiniteError, match="microbatch 3 "):
        engine.step(batch_of(alone, inputs, targets, 4))


def test_terms_with_different_types_and_shapes(alone: World) -> None:
    engine = engine_of(
        alone, LossTerm("a", lambda o, t: o.float().sum()), LossTerm("b", lambda o, t: o.sum().reshape(1, 1))
    )
    batch = random_batch(alone, 6, 2)
    with torch.no_grad():
        expected = 2 / 6 * sum(float(engine.model(microbatch.data[0]).sum()) for microbatch in batch.local_microbatches)
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)


def test_nothing_counted_by_any_term_is_an_error(alone: World) -> None:
    inputs, targets = random_data(4)
    engine = engine_of(alone, LossTerm("tokens", tokens, counted))
    with pytest.raises(RunError) as error:
        engine.evaluate([batch_of(alone, inputs, torch.full_like(targets, -100), 2)])
    assert error.value.code == "E_LOSS"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.5, "loss term bad returned a float"),
        (Loss(torch.ones(()), 1), "loss term bad returned a Loss"),
        (torch.ones(2), r"loss term bad returned a Tensor of shape \(2,\)"),
    ],
)
def test_invalid_results_of_terms_are_refused(alone: World, returned: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine_of(alone, LossTerm("bad", lambda outputs, targets: returned)).step(random_batch(alone, 4, 2))


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_invalid_counts_are_refused(alone: World, count: float) -> None:
    engine = engine_of(alone, LossTerm("bad", squares, lambda targets: count))
    with pytest.raises(InputError, match=f"bad counted {count} in microbatch 0") as error:
        engine.step(random_batch(alone, 4, 2))
    assert error.value.code == "E_LOSS"


@pytest.mark.parametrize(
    "make",
    [
        lambda: LossTerm("two words", tokens),
        lambda: LossTerm("", tokens),
        lambda: LossTerm("a", tokens, "tokens"),  # type: ignore[arg-type]
        lambda: LossTerm("a", tokens, weight=math.nan),
        lambda: samestep.MultiLoss([]),
        lambda: samestep.MultiLoss([LossTerm("a", tokens), LossTerm("a", squares)]),
    ],
)
def test_invalid_terms_are_refused(make: Any) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert error.value.code == "E_LOSS"


def test_multi_loss_inside_another_loss_is_refused(alone: World) -> None:
    """It would compute a mean of means."""
    inner = samestep.MultiLoss([LossTerm("tokens", tokens, counted)])
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, lambda o, t: 2 * inner(o, t), world=alone)
    with pytest.raises(TypeError, match=r"pass it to samestep\.Engine"):
        engine.step(random_batch(alone, 4, 2))


# --- outputs that are not one tensor -----------------------------------------------------------------


class NormedAndSquared(torch.nn.Sequential):
    """A model with batch norm that returns its outputs and the sum of squares of its last weights."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 4)
        )

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(inputs), self[3].weight.square().sum()


class TupleOutput(Perceptron):
    """A model that returns a tuple."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(inputs)
        return logits, logits.sum(1)


def test_plain_loss_of_a_tuple_of_outputs(alone: World) -> None:
    model = seeded(0, TupleOutput)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = Engine(model, optimizer, lambda o, targets: tokens(o[0], targets) / len(targets), world=alone)
    batch = random_batch(alone, 8, 2)
    expected = engine.evaluate([batch])["loss"]
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-14)


def test_recipe_metrics_refuse_outputs_that_are_not_a_tensor(alone: World) -> None:
    model = seeded(0, TupleOutput)
    loss = samestep.MultiLoss([LossTerm("tokens", lambda outputs, targets: tokens(outputs[0], targets))])
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, world=alone)
    with pytest.raises(InputError, match=r"accuracy .* tuple"):
        engine.evaluate([random_batch(alone, 8, 2)], build_metrics(("accuracy",), 4))
