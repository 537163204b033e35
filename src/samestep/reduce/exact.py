"""The `exact` reduction: sums over microbatches in one tree, with the same bits on every number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.reduce.tree import MicrobatchTree, Node, tree_all_reduce


class ExactReduction:
    """`Reduction` in the order of a `MicrobatchTree`: each microbatch is one slice of a batch.

    Args:
        world: the ranks.
        microbatches: number of microbatches; at least the number of ranks.
    """

    def __init__(self, world: World, microbatches: int) -> None:
        self.own = owned_microbatches(microbatches, world.size, world.rank)
        self._world = world
        self._tree = MicrobatchTree(microbatches, microbatches)
        self._cover = self._tree.cover(world.rank, world.size)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all microbatches, in the order of the tree."""
        copies = [part.detach().resolve_conj().resolve_neg().contiguous().clone().view(-1) for part in parts]
        leaves = {(number, number + 1): copy for number, copy in zip(self.own, copies, strict=True)}
        return self.wait(self.start(self.merge(leaves))).view(parts[0].shape)

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return the sums with all pairs of subtrees added of which both are there."""
        merged: dict[Node, torch.Tensor] = {}
        for node in self._cover:
            merged |= self._tree.merge(node, sums, torch.Tensor.add_)
        return merged

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Sum over ranks."""
        subtrees = list(sums.values())
        return tree_all_reduce(self._world, self._tree, subtrees, subtrees[-1])

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum."""
        total: torch.Tensor = work
        return total
