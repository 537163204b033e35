"""Sums over ranks inside of a divided call, at which a rank can also report that it has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.reduce.reduction import Reduction
from samestep.view.crossings import Parts, totals
from samestep.view.region import Joined


class CallAbandoned(Exception):
    """A rank has left the divided call; all ranks compute it whole."""


class CallExchange:
    """Exchange of one divided call.

    A rank with code that fails takes part in the next sum of the others with a mark, so that they leave the call too
    and no rank waits. It must know the size of that sum: sizes are those of an earlier call of the kind. Without one, a
    word precedes each sum.

    Args:
        reduction: sums over all slices.
        sizes: numbers of elements of the sums of an earlier call; None if there was none.
        all_are_here: sends a word; returns whether all ranks are in the same sum.
    """

    def __init__(self, reduction: Reduction, sizes: tuple[int, ...] | None, all_are_here: Callable[[], bool]) -> None:
        self._reduction = reduction
        self._count = len(reduction.own)
        self._expected = sizes
        self._all_are_here = all_are_here
        self._is_forward = True
        self.sizes: list[int] = []  # of the sums of the forward
        self.is_known_to_all = False  # all ranks know that the call is abandoned

    def join(self, compute: Joined, value: Any) -> Any:
        """Return the result of `compute` for the only own slice."""
        return compute(self, [value])[0]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all slices. Differentiable."""
        return totals(self, [values])[0]

    def sum(self, parts: Parts) -> torch.Tensor:
        """Return the sum of one tensor of each slice, without a graph.

        Raises:
            CallAbandoned: a rank has failed, or the sum is not the one that the kind of the call has here.
        """
        if not self._is_forward:
            return self._reduction.sum(parts)
        index = len(self.sizes)
        first = parts[0]
        elements = first.numel()
        if self._expected is None:
            if not self._all_are_here():
                self.is_known_to_all = True
                raise CallAbandoned
            self.sizes.append(elements)
            return self._reduction.sum(parts)
        if index >= len(self._expected) or elements != self._expected[index]:
            raise CallAbandoned
        self.sizes.append(elements)
        # float64: a rank that fails does not know the dtype, and the sums are small.
        messages = []
        for part in parts:
            message = torch.zeros(elements + 1, dtype=torch.float64, device=part.device)
            message[:-1] = part.detach().reshape(-1)
            messages.append(message)
        summed = self._reduction.sum(messages)
        if summed[-1] != 0:
            self.sizes = list(self._expected)
            raise CallAbandoned
        return summed[:-1].reshape(first.shape).to(first.dtype)

    def leave(self, device: torch.device) -> None:
        """Report to the other ranks that this one has left the call, if they can be in a sum."""
        if self._expected is not None and len(self.sizes) < len(self._expected):
            message = torch.zeros(self._expected[len(self.sizes)] + 1, dtype=torch.float64, device=device)
            message[-1] = 1
            self._reduction.sum([message] * self._count)

    def end_forward(self) -> None:
        """End the forward, which is complete on all ranks; later sums belong to the backward."""
        self._is_forward = False
