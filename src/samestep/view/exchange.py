"""Sums over ranks inside of a divided call, which a rank can also leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.reduce.reduction import Reduction
from samestep.view.crossings import Parts, totals
from samestep.view.region import Joined


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
        self._expected = expected
        self._all_are_here = all_are_here
        self._is_forward = True

    def join(self, compute: Joined, value: Any) -> Any:
        """Return the result of `compute` for the only own slice."""
        return compute(self, [value])[0]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all slices. Differentiable."""
        return totals(self, [values])[0]

    def sum(self, parts: Parts) -> torch.Tensor:
        """Return the sum of one tensor of each slice, without a graph.

        Raises:
            CallAbandoned: a rank has failed, or the sum is not the one that the kind of the call
            has here.
        """
        first = parts[0]
        if self._is_forward:
            self._begin((first.numel(), first.dtype))
        if first.dtype not in (torch.float16, torch.bfloat16):
            return self._reduction.sum(parts)
        return self._reduction.sum([part.float() for part in parts]).to(first.dtype)

    def _begin(self, own: Sum) -> None:
        if self._expected is None:
            if not self._all_are_here():
                self.is_known_to_all = True
                raise CallAbandoned
        elif len(self.sums) >= len(self._expected) or own != self._expected[len(self.sums)]:
            raise CallAbandoned
        self.sums.append(own)

    def require_all_sums(self) -> None:
        """Require that the forward has had all sums of its kind, in which other ranks may be.

        Raises:
            CallAbandoned: it has ended before.
        """
        if self._expected is not None and len(self.sums) < len(self._expected):
            raise CallAbandoned

    def leave(self, device: torch.device, stop: int | None = None) -> None:
        """Take part in the remaining sums of the forward with zeros, as this rank has left the call.

        Args:
            device: device of the sums.
            stop: number of the first sum in which not to take part yet; None to take part in all.
        """
        expected = self._expected or ()
        for elements, dtype in expected[len(self.sums) : stop]:
            self.sum([torch.zeros(elements, dtype=dtype, device=device)] * self._count)

    def end_forward(self) -> None:
        """End the forward, which is complete on all ranks; later sums belong to the backward."""
        self._is_forward = False
