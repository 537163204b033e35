"""Reductions: everything that divided calls sum over ranks; and `fast`, in the backend's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal, Protocol

import torch

Node = tuple[int, int]  # slices [lo, hi) of a batch that a sum holds


class Sums(Protocol):
    """Sums over all slices of a batch, of all ranks."""

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of one tensor of each slice, as a new tensor without a graph.

        Args:
            parts: tensors of the own slices, of one shape and dtype.
        """
        ...


class Reduction(Sums, Protocol):
    """Sums over the slices of a batch, each of which belongs to one rank, also of gradients.

    Sums are contiguous tensors, on all ranks.

    Attributes:
        own: numbers of the slices of this rank.
    """

    own: range

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return sums of flat tensors of own slices, with those added that can be, in place.

        Args:
            sums: tensors by the slices `[lo, hi)` that they hold.
        """
        ...

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum the result of `merge`, in one order on all ranks, and return the work."""
        ...

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum of a work that was started."""
        ...


class RankSums(Protocol):
    """Sums over ranks (`samestep.view.messages.Ranks`)."""

    rank: int
    size: int

    def sum(self, values: torch.Tensor) -> torch.Tensor: ...

    def start_sum(self, values: torch.Tensor) -> Any: ...

    def wait(self, work: Any) -> None: ...


class FastReduction:
    """`Reduction` in the order of the backend.

    Args:
        ranks: the ranks.
        own: numbers of the slices of this rank; None for one slice.
        hook: gradients are sent in 16 bits, as by the communication hooks of torch's
            DistributedDataParallel.
    """

    def __init__(
        self,
        ranks: RankSums,
        own: range | None = None,
        hook: Literal["none", "fp16", "bf16"] = "none",
    ) -> None:
        if own is None:
            own = range(ranks.rank, ranks.rank + 1)
        self.own = own
        self._ranks = ranks
        self._hook = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[hook]

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over own slices and ranks."""
        return self._ranks.sum(reduce(torch.add, parts))

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return the sum of own slices."""
        node = min(low for low, _ in sums), max(high for _, high in sums)
        return {node: reduce(torch.Tensor.add_, sums.values())}

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum over ranks in place."""
        (flat,) = sums.values()
        sent = flat
        if self._hook is not None:
            sent = (flat / self._ranks.size).to(self._hook)  # the mean: a sum could overflow
        return self._ranks.start_sum(sent), sent, flat

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum."""
        started, sent, flat = work
        self._ranks.wait(started)
        total: torch.Tensor = flat
        if sent is not flat:
            total.copy_(sent).mul_(self._ranks.size)
        return total
