"""Training on batches of which each rank keeps its own rows: gathers of each step, and losses."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.view.ranks import Ranks
from samestep.view.rows import is_rows
from samestep.view.view import View

SAMPLES, BATCH = 29, 7  # the last batch is one sample, which two ranks cannot divide


class _Gathers:
    """Counts the gathers of this rank."""

    def __init__(self) -> None:
        self.count = 0
        gather = Ranks.gather_rows

        def counted(*arguments: Any) -> torch.Tensor:
            self.count += 1
            return gather(*arguments)

        Ranks.gather_rows = counted  # type: ignore[method-assign]


def _train(model: nn.Module, batches: Iterable[Any], gathers: _Gathers) -> dict[str, list[Any]]:
    """Train for two epochs; return losses, gathers and kinds of the batches of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: dict[str, list[Any]] = {"losses": [], "gathers": [], "rows": []}
    for _ in range(2):
        for x, y in batches:
            before = gathers.count
            y[y == 3] = 255
            scores = model(x * 2 - 1)
            known = (y != 255).unsqueeze(1)
            dice = (scores.softmax(1) * known).square().sum() / known.sum()
            loss = nn.functional.cross_entropy(scores, y, ignore_index=255) + dice
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = ((scores.argmax(1) == y) & known[:, 0]).sum().item()
            found["losses"] += [loss.item(), right]
            found["gathers"].append(gathers.count - before)
            found["rows"].append([is_rows(x), is_rows(y)])
    return found


def run(reduction: str) -> dict[str, Any]:
    """Train a plain model, and one with divided calls on batches of `samestep.loader`.

    Args:
        reduction: of the divided calls.
    """
    samestep.init(threads=1, reduction=reduction)  # type: ignore[arg-type]
    View.divides_small_calls = True
    View.output_limit = 1
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(SAMPLES, 3, 40, 40, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES, 40, 40), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    gathers = _Gathers()
    loader = DataLoader(TensorDataset(images, labels), BATCH)
    expected = _train(copy.deepcopy(model), loader, gathers)["losses"]
    model = samestep.parallel(model, reduction=reduction)  # type: ignore[type-var]
    found = _train(model, samestep.loader(loader), gathers)
    return {**found, "expected": expected}
