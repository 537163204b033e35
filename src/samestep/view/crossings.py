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
from typing import Any

import torch

from samestep.microbatches import Slices
from samestep.reduce.fast import Reduction, Sums
from samestep.view.messages import Ranks, RowMessages
from samestep.view.region import Joined, Parts


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

    def __init__(self, ranks: Ranks | RowMessages, slices: Slices, factor: int = 1) -> None:
        self.ranks: Any = ranks
        self.slices = slices
        self.factor = factor
        self.rows = slices.rows * factor
        start, stop = slices.by_rank[ranks.rank]
        self.start = start * factor
        self.stop = stop * factor

    def own(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each own slice of a tensor, as copies if slices are copies."""
        factor = self.factor
        parts = [whole[start * factor : stop * factor] for start, stop in self.slices.own_bounds]
        if self.slices.copies:
            parts = [part.clone() for part in parts]
        return parts

    def gather(self, own: Parts) -> torch.Tensor:
        """Return the rows of all slices of all ranks, from those of the own slices."""
        whole: torch.Tensor = self.ranks.gather_rows(own, self.slices.by_rank, self.factor)
        return whole

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
        # The absent gradient of a single result stays absent; of several, `back` needs all.
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
    """Return the values of a crossing. `back` is the crossing of its gradients."""
    return list(_Crossing.apply(cross, back, *values))  # type: ignore[no-untyped-call]


def cut(whole: torch.Tensor, rows: RowBounds) -> list[torch.Tensor]:
    """Return the rows of each own slice of a whole tensor; the gradient is gathered."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return rows.own(whole)
    # Detached: autograd forbids writes into views if one node returns several.
    return crossing(
        [whole],
        lambda value: [part.detach() for part in rows.own(value)],
        lambda *gradients: [gather(gradients, rows)],
    )


def gather(own: Parts, rows: RowBounds) -> torch.Tensor:
    """Return the whole tensor of the rows of each own slice; the gradient is cut."""
    (whole,) = crossing(
        own, lambda *parts: [rows.gather(parts)], lambda gradient: cut(gradient, rows)
    )
    return whole


def enter(whole: torch.Tensor, sums: Sums, count: int) -> list[torch.Tensor]:
    """Return a replicated tensor for each of `count` own slices; its gradient is summed."""
    return crossing(
        [whole],
        lambda value: [value.detach() for _ in range(count)],
        lambda *gradients: [leave(gradients, sums)],
    )


def leave(parts: Parts, sums: Sums) -> torch.Tensor:
    """Return the sum of a part of each slice as a replicated tensor; the gradient enters them."""
    (total,) = crossing(
        parts, lambda *own: [sums.sum(own)], lambda gradient: enter(gradient, sums, len(parts))
    )
    return total


def totals(sums: Sums, parts: Parts) -> list[torch.Tensor]:
    """Return the sum of a part of each slice for use in each own slice; so is the gradient."""

    def cross(*own: torch.Tensor) -> list[torch.Tensor]:
        total = sums.sum(own)
        return [total, *[total.clone() for _ in own[1:]]]  # slices may write into them

    return crossing(parts, cross, lambda *gradients: totals(sums, gradients))


def replicated(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a plain tensor, also that of a loss with divided parameters."""
    if type(gradient) is torch.Tensor or not hasattr(gradient, "full_tensor"):
        return gradient
    full: torch.Tensor = gradient.full_tensor()
    return full


class CallAbandoned(Exception):
    """A rank has left the divided call; all ranks compute it whole."""


Sum = tuple[int, torch.dtype]  # number of elements and dtype


class CallExchange:
    """Exchange of one divided call.

    A rank with code that fails takes part in the remaining sums of the others, with zeros, so that
    no rank waits. The others compute on with sums that have no meaning, until the word at the end
    of the call; reading a mark in each sum would wait for accelerators. A rank must know the
    remaining sums: they are those of an earlier call of the kind. Without one, a word precedes each
    sum.

    Args:
        reduction: sums over all slices.
        expected: sums of the forward of an earlier call; None if there was none.
        all_are_here: sends a word; returns whether all ranks are in the same sum.

    Attributes:
        sums: sums of the forward, until now.
        expected: sums of an earlier call.
        is_known_to_all: all ranks know that the call is abandoned.
    """

    def __init__(
        self,
        reduction: Reduction,
        expected: tuple[Sum, ...] | None,
        all_are_here: Callable[[], bool],
    ) -> None:
        self.sums: list[Sum] = []
        self.is_known_to_all = False
        self._reduction = reduction
        self._count = len(reduction.own)
        self.expected = expected
        self._all_are_here = all_are_here
        self._is_forward = True

    def join(self, compute: Joined, value: Any) -> Any:
        """Return the result of `compute` for the only own slice."""
        return compute(self, [value])[0]

    def sum(self, parts: Parts) -> torch.Tensor:
        """Return the sum of one tensor of each slice, without a graph.

        Raises:
            CallAbandoned: a rank has failed, or the sum is not the one that the kind of the call
                has here.
        """
        first = parts[0]
        if self._is_forward:
            own = first.numel(), first.dtype
            number = len(self.sums)
            if self.expected is None:
                if not self._all_are_here():
                    self.is_known_to_all = True
                    raise CallAbandoned
            elif number >= len(self.expected) or own != self.expected[number]:
                # Nothing is sent: other ranks may be in a sum of another size.
                raise CallAbandoned
            self.sums.append(own)
        if first.dtype not in (torch.float16, torch.bfloat16):
            return self._reduction.sum(parts)
        # A sum of halves would be rounded at each addition.
        return self._reduction.sum([part.float() for part in parts]).to(first.dtype)

    def require_all_sums(self) -> None:
        """Require that the forward has had all sums of its kind, in which other ranks may be.

        Raises:
            CallAbandoned: it has ended before.
        """
        if self.expected is not None and len(self.sums) < len(self.expected):
            raise CallAbandoned

    def leave(self, device: torch.device, stop: int | None = None) -> None:
        """Take part in the remaining sums of the forward with zeros, after leaving the call.

        Args:
            device: device of the sums.
            stop: number of the first sum in which not to take part yet; None to take part in all.
        """
        # Without an earlier call, the next word of this rank ends the sum of the others.
        expected = self.expected or ()
        for elements, dtype in expected[len(self.sums) : stop]:
            self.sum([torch.zeros(elements, dtype=dtype, device=device)] * self._count)

    def end_forward(self) -> None:
        """End the forward, which is complete on all ranks; later sums belong to the backward."""
        self._is_forward = False
