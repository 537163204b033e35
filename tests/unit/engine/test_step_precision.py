"""Steps with bf16 and fp16, and the loss scaler."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Perceptron, seeded
from samestep.config import StepConfig
from samestep.engine.engine import Engine
from samestep.errors import NonFiniteError

World = samestep.World


def engine_of(world: World, precision: str, **options: Any) -> Engine:
    model = seeded(0, Perceptron, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Engine(
        model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(precision=precision, **options)
    )


def batch_for(world: World, scale: float = 1.0) -> Any:
    inputs, targets = random_data(16)
    return batch_of(world, inputs.float() * scale, targets, 4)


def weights_of(engine: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_low_precision_trains_like_full_precision(
    alone: World, precision: str, tolerance: float, reduction: str
) -> None:
    full, low = engine_of(alone, "fp32"), engine_of(alone, precision, reduction=reduction)
    start = weights_of(full)
    for _ in range(5):
        results = [engine.step(batch_for(alone)) for engine in (full, low)]
    assert results[1].loss == pytest.approx(results[0].loss, rel=tolerance)
    assert not torch.equal(weights_of(low), weights_of(full))
    torch.testing.assert_close(weights_of(low) - start, weights_of(full) - start, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_outputs_have_the_configured_precision(alone: World, precision: str, dtype: torch.dtype) -> None:
    types = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        types.append(outputs.dtype)
        return samestep.cross_entropy(outputs, targets)

    model = seeded(0, Perceptron, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(model, optimizer, loss, world=alone, config=StepConfig(precision=precision))
    engine.step(batch_for(alone))
    engine.evaluate([batch_for(alone)])
    assert set(types) == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_result_has_the_norm_of_the_unscaled_gradient(alone: World) -> None:
    full, low = engine_of(alone, "fp32"), engine_of(alone, "fp16")
    norms = [engine.step(batch_for(alone)).grad_norm for engine in (full, low)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


def test_unscaled_gradient_is_clipped(alone: World) -> None:
    engine = engine_of(alone, "fp16", clip_norm=0.01)
    before = weights_of(engine)
    engine.step(batch_for(alone))
    assert float((weights_of(engine) - before).norm()) == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_overflow_skips_the_step_and_reduces_the_scale(alone: World, non_finite: str) -> None:
    engine = engine_of(alone, "fp16", non_finite=non_finite)
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**40})
    before = weights_of(engine)
    result = engine.step(batch_for(alone))
    assert (result.skipped, result.step) == (True, 1)
    assert math.isfinite(result.loss)
    assert torch.equal(weights_of(engine), before)
    assert engine.scaler.get_scale() == 2.0**39
    while engine.step(batch_for(alone)).skipped:
        assert torch.equal(weights_of(engine), before)
    assert not torch.equal(weights_of(engine), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_non_finite_loss_is_an_error_in_every_precision(alone: World, precision: str) -> None:
    engine = engine_of(alone, precision)
    with pytest.raises(NonFiniteError, match="microbatches 0, 1, 2, 3 "):
        engine.step(batch_for(alone, math.inf))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_can_continue_after_a_caught_error(alone: World, precision: str) -> None:
    engine = engine_of(alone, precision)
    with pytest.raises(NonFiniteError):
        engine.step(batch_for(alone, math.nan))
    result = engine.step(batch_for(alone))
    assert (result.step, result.skipped) == (1, False)


def test_non_finite_loss_can_be_skipped_with_fp16(alone: World) -> None:
    engine = engine_of(alone, "fp16", non_finite="skip")
    before = weights_of(engine)
    assert engine.step(batch_for(alone, math.nan)).skipped
    assert torch.equal(weights_of(engine), before)
    assert not engine.step(batch_for(alone)).skipped


def test_overflow_without_loss_scaling_is_an_error(alone: World) -> None:
    """bf16 has the range of fp32 and uses no loss scaling."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(model, optimizer, functional.mse_loss, world=alone, config=StepConfig(precision="bf16"))
    inputs = torch.full((4, 1), 1e30)
    with pytest.raises(NonFiniteError, match="gradient"):
        engine.step(batch_of(alone, inputs, torch.full((4, 1), 1e15), 2))
