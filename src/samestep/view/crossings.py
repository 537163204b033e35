"""Crossings between replicated and own values, each the derivative of another.

Outside of a divided call each rank holds the whole value and the whole gradient; inside it holds
parts, one for each of its slices.

| crossing | value | gradient |
|---|---|---|
| `cut` | whole -> rows of each own slice | rows -> whole: `gather` |
| `enter` | whole -> the same for each own slice | parts -> their sum: `leave` |
| `gather` | rows of each own slice -> whole | whole -> rows: `cut` |
| `leave` | parts -> their sum | whole -> the same: `enter` |
| `totals` | parts -> their sum, for each own slice | parts -> their sum, for each own slice |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from samestep.view.ranks import Slices

Parts = Sequence[torch.Tensor]


class Sums(Protocol):
    """Sums over all slices of a batch, of all ranks."""

    def sum(self, parts: Parts) -> torch.Tensor:
        """Return the sum of a part of each slice, as a new tensor without a graph.

        Args:
            parts: one tensor of each own slice, all of one shape and dtype.
        """
        ...


class RankMessages(Protocol):
    """Messages between the ranks that hold rows."""

    rank: int
    size: int

    def sum(self, parts: Any) -> torch.Tensor:
        """Return a sum over ranks."""
        ...

    def gather_rows(
        self, own: Parts, bounds: Sequence[tuple[int, int]], factor: int
    ) -> torch.Tensor:
        """Return the rows of all ranks in order, as a new contiguous tensor."""
        ...


class RowBounds:
    """Bounds of the rows of one tensor in the slices of a batch.

    Attributes:
        rows: rows of the whole tensor.
        start: first own row of the tensor.
        stop: first row of the tensor after the own ones.

    Args:
        ranks: the ranks.
        slices: slices of the batch.
        factor: rows of the tensor per row of the batch.
    """

    def __init__(self, ranks: RankMessages, slices: Slices, factor: int = 1) -> None:
        self.ranks = ranks
        self.slices = slices
        self.factor = factor
        self.rows = slices.bounds[-1][1] * factor
        start, stop = slices.by_rank[ranks.rank]
        self.start = start * factor
        self.stop = stop * factor

    def own(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each own slice of a tensor; they share its memory, unless slices are copies."""
        parts = [
            whole[start * self.factor : stop * self.factor]
            for start, stop in self.slices.own_bounds
        ]
        if self.slices.copies:
            return [part.clone() for part in parts]
        return parts

    def gather(self, own: Parts) -> torch.Tensor:
        """Return the rows of all slices of all ranks, from those of the own slices."""
        return self.ranks.gather_rows(own, self.slices.by_rank, self.factor)

    def times(self, factor: int) -> RowBounds:
        """Return the bounds of a tensor with `factor` rows per row of the batch."""
        if factor == self.factor:
            return self
        return RowBounds(self.ranks, self.slices, factor)

    def is_equal(self, other: RowBounds) -> bool:
        """Whether ranks hold the same rows."""
        return self is other or (self.factor == other.factor and self.has_slices(other.slices))

    def has_slices(self, slices: Slices) -> bool:
        """Whether the batch has these slices."""
        return self.slices is slices or list(self.slices.bounds) == list(slices.bounds)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cross: Callable[..., Sequence[torch.Tensor]],
        back: Callable[..., Sequence[torch.Tensor]],
        *values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        crossed = tuple(cross(*values))
        ctx.set_materialize_grads(len(crossed) > 1)
        return crossed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if gradients[0] is None:  # the only one
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *ctx.back(*gradients))


def crossing(
    values: Parts,
    cross: Callable[..., Sequence[torch.Tensor]],
    back: Callable[..., Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the values of a crossing. `back` is the crossing of its gradients, so they can be differentiated."""
    return list(_Crossing.apply(cross, back, *values))  # type: ignore[no-untyped-call]


def cut(whole: torch.Tensor, rows: RowBounds) -> list[torch.Tensor]:
    """Return the rows of each own slice of a whole tensor; the gradient is gathered."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return rows.own(whole)
    return crossing(
        [whole],
        lambda value: [part.detach() for part in rows.own(value)],
        lambda *gradients: [gather(gradients, rows)],
    )


def gather(own: Parts, rows: RowBounds) -> torch.Tensor:
    """Return the whole tensor of the rows of each own slice; the gradient is cut."""
    return crossing(own, lambda *parts: [rows.gather(parts)], lambda gradient: cut(gradient, rows))[
        0
    ]


def enter(whole: torch.Tensor, sums: Sums, count: int) -> list[torch.Tensor]:
    """Return a replicated tensor for use in each of `count` own slices; the gradient is the sum over all slices."""
    return crossing(
        [whole],
        lambda value: [value.detach() for _ in range(count)],
        lambda *gradients: [leave(gradients, sums)],
    )


def leave(parts: Parts, sums: Sums) -> torch.Tensor:
    """Return the sum of a part of each slice as a replicated tensor; the gradient enters each slice."""
    return crossing(
        parts, lambda *own: [sums.sum(own)], lambda gradient: enter(gradient, sums, len(parts))
    )[0]


def totals(sums: Sums, parts: Parts) -> list[torch.Tensor]:
    """Return the sum of a part of each slice for use in each own slice; so is the gradient."""

    def cross(*own: torch.Tensor) -> list[torch.Tensor]:
        total = sums.sum(own)
        return [total, *[total.clone() for _ in own[1:]]]  # slices may write into them

    return crossing(parts, cross, lambda *gradients: totals(sums, gradients))


def replicated(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a plain tensor: a loss with divided parameters outside of calls gives a DTensor."""
    if type(gradient) is torch.Tensor or not hasattr(gradient, "full_tensor"):
        return gradient
    full: torch.Tensor = gradient.full_tensor()
    return full
