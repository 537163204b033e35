"""Crossings between replicated and own values, each the derivative of another.

Outside of a divided call each rank holds the whole value and the whole gradient; inside it holds its own part.

| crossing | value | gradient |
|---|---|---|
| `cut` | whole -> own rows | own rows -> whole: `gather` |
| `enter` | whole -> the same | own parts -> their sum: `leave` |
| `gather` | own rows -> whole | whole -> own rows: `cut` |
| `leave` | own parts -> their sum | whole -> the same: `enter` |
| `total` | own parts -> their sum, inside | own parts -> their sum, inside |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from samestep.view.ranks import Ranks


class RowBounds:
    """Bounds of the rows of one tensor that the ranks hold.

    Args:
        ranks: the ranks.
        bounds: rows of the batch that each rank computes.
        factor: rows of the tensor per row of the batch.
    """

    def __init__(self, ranks: Ranks, bounds: Sequence[tuple[int, int]], factor: int = 1) -> None:
        self.ranks = ranks
        self.bounds = bounds
        self.factor = factor

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the own rows of a tensor; they share its memory."""
        start, stop = self.bounds[self.ranks.rank]
        return whole[start * self.factor : stop * self.factor]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        return self.ranks.gather_rows(own, self.bounds, self.factor)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, cross: Callable[[Any], torch.Tensor], back: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        ctx.back = back
        return cross(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


def _cross(
    value: torch.Tensor, cross: Callable[[Any], torch.Tensor], back: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Return the value of a crossing. `back` is the crossing of its gradient, so gradients can be differentiated."""
    result: torch.Tensor = _Crossing.apply(value, cross, back)  # type: ignore[no-untyped-call]
    return result


def cut(whole: torch.Tensor, rows: RowBounds) -> torch.Tensor:
    """Return the own rows of a whole tensor; the gradient is gathered."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return rows.own(whole)
    return _cross(whole, lambda value: rows.own(value).detach(), lambda gradient: gather(gradient, rows))


def gather(own: torch.Tensor, rows: RowBounds) -> torch.Tensor:
    """Return the whole tensor of own rows; the gradient is cut."""
    return _cross(own, rows.gather, lambda gradient: cut(gradient, rows))


def enter(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return a replicated tensor for use in own computations; the gradient is the sum over ranks."""
    return _cross(whole, torch.Tensor.detach, lambda gradient: leave(gradient, ranks))


def leave(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the sum of own parts as a replicated tensor; the gradient enters own computations."""
    return _cross(part, ranks.sum, lambda gradient: enter(gradient, ranks))


def total(part: torch.Tensor, exchange: Any) -> torch.Tensor:
    """Return the sum of own parts for use in own computations; the gradient is the sum of own gradients.

    Args:
        part: own part.
        exchange: its method `sum` adds parts of all ranks.
    """
    return _cross(part, exchange.sum, lambda gradient: total(gradient, exchange))
