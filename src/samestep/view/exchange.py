"""Sums over ranks inside of a divided call, at which a rank can also report that it has failed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samestep.view.crossings import total
from samestep.view.ranks import Ranks


class CallAbandoned(Exception):
    """A rank has left the divided call; all ranks compute it whole."""


class CallExchange:
    """Exchange of one divided call.

    A rank with code that fails takes part in the next sum of the others with a mark, so that they leave the call too
    and no rank waits. It must know the size of that sum: sizes are those of an earlier call of the kind. Without one, a
    word precedes each sum.

    Args:
        ranks: the ranks.
        sizes: numbers of elements of the sums of an earlier call; None if there was none.
        all_are_here: sends a word; returns whether all ranks are in the same sum.
    """

    joins_graph = False  # each rank has a graph of its own

    def __init__(self, ranks: Ranks, sizes: tuple[int, ...] | None, all_are_here: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._expected = sizes
        self._all_are_here = all_are_here
        self._is_forward = True
        self.sizes: list[int] = []  # of the sums of the forward
        self.is_known_to_all = False  # all ranks know that the call is abandoned

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over ranks. Differentiable."""
        return total(values, self)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over ranks, without a graph.

        Raises:
            CallAbandoned: a rank has failed, or the sum is not the one that the kind of the call has here.
        """
        if not self._is_forward:
            return self._ranks.sum(values)
        index = len(self.sizes)
        if self._expected is None:
            if not self._all_are_here():
                self.is_known_to_all = True
                raise CallAbandoned
            self.sizes.append(values.numel())
            return self._ranks.sum(values)
        if index >= len(self._expected) or values.numel() != self._expected[index]:
            raise CallAbandoned
        self.sizes.append(values.numel())
        # float64: a rank that fails does not know the dtype, and the sums are small.
        message = torch.zeros(values.numel() + 1, dtype=torch.float64, device=values.device)
        message[:-1] = values.detach().reshape(-1)
        summed = self._ranks.sum(message)
        if summed[-1] != 0:
            self.sizes = list(self._expected)
            raise CallAbandoned
        return summed[:-1].reshape(values.shape).to(values.dtype)

    def leave(self, device: torch.device) -> None:
        """Report to the other ranks that this one has left the call, if they can be in a sum."""
        if self._expected is not None and len(self.sizes) < len(self._expected):
            message = torch.zeros(self._expected[len(self.sizes)] + 1, dtype=torch.float64, device=device)
            message[-1] = 1
            self._ranks.sum(message)

    def end_forward(self) -> None:
        """End the forward, which is complete on all ranks; later sums belong to the backward."""
        self._is_forward = False
