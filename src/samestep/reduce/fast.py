"""The `fast` reduction: each rank computes one slice of a batch, and the backend adds in an order of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from samestep.reduce.tree import Node


class RankSums(Protocol):
    """Sums over ranks."""

    rank: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over ranks, as a new contiguous tensor."""
        ...

    def start_sum(self, values: torch.Tensor) -> Any:
        """Start to sum `values` over ranks in place, and return the work to wait for."""
        ...

    def wait(self, work: Any) -> None:
        """Wait for a sum."""
        ...


class FastReduction:
    """`Reduction` in the order of the backend.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: RankSums) -> None:
        self.own = range(ranks.rank, ranks.rank + 1)
        self._ranks = ranks

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over ranks."""
        (part,) = parts
        return self._ranks.sum(part)

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return the sums, of which there is one."""
        return dict(sums)

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum over ranks in place."""
        (flat,) = sums.values()
        return self._ranks.start_sum(flat), flat

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum."""
        started, flat = work
        self._ranks.wait(started)
        total: torch.Tensor = flat
        return total
