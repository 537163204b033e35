"""Interface of a reduction: everything that divided calls sum over the ranks goes through one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from samestep.reduce.tree import Node


class Reduction(Protocol):
    """Sums over the slices of a batch, each of which belongs to one rank.

    Attributes:
        own: numbers of the slices of this rank.
    """

    own: range

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of one tensor of each slice, as a new contiguous tensor, on all ranks.

        Args:
            parts: tensors of the own slices, of one shape and dtype.
        """
        ...

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return sums of flat tensors of own slices, with those added that can be, in place.

        Args:
            sums: tensors by the slices `[lo, hi)` that they hold.
        """
        ...

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum the result of `merge` over ranks, and return the work. All ranks start in one order."""
        ...

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum of a work that was started."""
        ...
