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

from collections.abc import Sequence
from typing import Any

import torch

from samestep.view.ranks import Ranks


class Rows:
    """Rows of one tensor that the ranks hold.

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


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.own(whole).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather(gradient, ctx.rows), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gather(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cut(gradient, ctx.rows), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return leave(gradient, ctx.ranks), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return enter(gradient, ctx.ranks), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, exchange: Any) -> torch.Tensor:
        ctx.exchange = exchange
        total: torch.Tensor = exchange.sum(part)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Total.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]


def cut(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the own rows of a whole tensor; the gradient is gathered."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return rows.own(whole)
    own: torch.Tensor = _Cut.apply(whole, rows)  # type: ignore[no-untyped-call]
    return own


def gather(own: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the whole tensor of own rows; the gradient is cut."""
    whole: torch.Tensor = _Gather.apply(own, rows)  # type: ignore[no-untyped-call]
    return whole


def enter(whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return a replicated tensor for use in own computations; the gradient is the sum over ranks."""
    inside: torch.Tensor = _Enter.apply(whole, ranks)  # type: ignore[no-untyped-call]
    return inside


def leave(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the sum of own parts as a replicated tensor; the gradient enters own computations."""
    total: torch.Tensor = _Leave.apply(part, ranks)  # type: ignore[no-untyped-call]
    return total


def total(part: torch.Tensor, exchange: Any) -> torch.Tensor:
    """Return the sum of own parts for use in own computations; the gradient is the sum of own gradients.

    Args:
        part: own part.
        exchange: its method `sum` adds parts of all ranks.
    """
    result: torch.Tensor = _Total.apply(part, exchange)  # type: ignore[no-untyped-call]
    return result
