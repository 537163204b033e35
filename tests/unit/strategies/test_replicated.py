"""Options of `ddp` in divided calls: shares of the rows, and gradients that are sent in 16 bits."""

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.config import StrategyConfig
from samestep.global_view import parallel_module
from samestep.view.view import View


def outcomes(options: dict[str, Any], reduction: Any) -> dict[str, Any]:
    View.divides_small_calls = True
    torch.set_default_dtype(torch.float64)
    config = StrategyConfig(name="ddp", **options)
    world = samestep.init(device="cpu", threads=1, strategy=config, reduction=reduction)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model = samestep.parallel(model, reduction=reduction, microbatches=8)
    for _ in range(3):
        inputs = torch.randn(16, 6)
        model.zero_grad()
        model(inputs).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()
    owner = parallel_module(model)
    assert owner is not None or world.size == 1
    divided = 0 if owner is None else owner.summary.divided
    slices = None if owner is None else owner._slices_of(16)
    rows = [] if slices is None else [stop - start for start, stop in slices.by_rank]
    return {"gradients": gradients, "divided": divided, "rows": rows}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    result: dict[str, Any] = samestep.launch(outcomes, {}, "fast", processes=1)
    return result


def test_shares_divide_the_rows(alone: dict[str, Any]) -> None:
    result = samestep.launch(outcomes, {"shares": (5, 2, 1)}, "fast", processes=3)
    assert result["divided"] == 2
    assert result["rows"] == [10, 4, 2]
    assert result["gradients"] == pytest.approx(alone["gradients"], rel=1e-9, abs=1e-14)


def test_shares_have_the_same_bits_under_exact() -> None:
    options: list[dict[str, Any]] = [{}, {"shares": (3, 1)}, {"shares": (1, 2, 5)}]
    results = [
        samestep.launch(outcomes, chosen, "exact", processes=len(chosen.get("shares", (1,)))) for chosen in options
    ]
    assert results[0]["gradients"] == results[1]["gradients"] == results[2]["gradients"]
    assert [result["divided"] for result in results] == [3, 3, 3]


@pytest.mark.parametrize(("hook", "precision"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_gradients_are_sent_in_16_bits(hook: str, precision: float, alone: dict[str, Any]) -> None:
    result = samestep.launch(outcomes, {"hook": hook}, "fast", processes=3)
    expected = torch.tensor(alone["gradients"], dtype=torch.float64)
    deviation = (torch.tensor(result["gradients"], dtype=torch.float64) - expected).abs().max() / expected.abs().max()
    assert 0 < deviation < 3 * precision
