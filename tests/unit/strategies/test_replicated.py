"""`ddp` in divided calls with gradients that are sent in 16 bits."""

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.config import StrategyConfig
from samestep.view.view import View


def outcomes(options: dict[str, Any], reduction: Any) -> dict[str, Any]:
    View.divides_small_calls = True
    torch.set_default_dtype(torch.float64)
    config = StrategyConfig(name="ddp", **options)
    samestep.init(device="cpu", threads=1, strategy=config, reduction=reduction)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model = samestep.parallel(model, reduction=reduction, microbatches=8)
    for _ in range(3):
        inputs = torch.randn(16, 6)
        model.zero_grad()
        model(inputs).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()
    return {"gradients": gradients}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    result: dict[str, Any] = samestep.launch(outcomes, {}, "fast", processes=1)
    return result


@pytest.mark.parametrize(("hook", "precision"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_gradients_are_sent_in_16_bits(hook: str, precision: float, alone: dict[str, Any]) -> None:
    result = samestep.launch(outcomes, {"hook": hook}, "fast", processes=3)
    expected = torch.tensor(alone["gradients"], dtype=torch.float64)
    deviation = (torch.tensor(result["gradients"], dtype=torch.float64) - expected).abs().max() / expected.abs().max()
    assert 0 < deviation < 3 * precision
