"""Decisions about calls whose operations depend on their rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import samestep
from samestep.view.parallel import _MOST_SURPRISES
from samestep.view.view import View


class Masked(nn.Module):
    """Mean over the columns of a mask, with other operations for a batch without padding, as of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.all()):
            return self.layer(rows)
        return self.layer(rows * mask)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    monkeypatch.setattr(View, "divides_small_calls", True)
    try:
        with samestep.init(device="cpu", reduction="exact"):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def calls(masks: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return output and gradient of each call of a new module under `exact`."""
    torch.manual_seed(1)
    module = samestep.parallel(Masked(), reduction="exact", microbatches=4)
    results = []
    for mask in masks:
        rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
        module.zero_grad()
        outputs = module(rows, mask)
        outputs.square().sum().backward()
        results.append([outputs.detach().clone(), module.layer.weight.grad.clone()])
    return results


def test_calls_are_decided_without_those_before_under_exact(exact: None) -> None:
    padded = torch.ones(16, 6)
    padded[3, 4:] = 0
    full = torch.ones(16, 6)
    every = padded.clone()
    every[:, 5] = 0
    many = [padded] * (_MOST_SURPRISES + 2)
    orders = ([full, *many, every, full], [padded, every, full, padded, full], [every, full])
    alone = {id(mask): calls([mask])[0] for mask in (padded, full, every)}
    for masks in orders:
        for number, (mask, result) in enumerate(zip(masks, calls(masks), strict=True)):
            for one, other in zip(result, alone[id(mask)], strict=True):
                assert torch.equal(one, other), number
