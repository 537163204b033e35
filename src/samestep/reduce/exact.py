"""The `exact` reduction: sums over microbatches in one tree, with the same bits on every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.reduce.tree import MicrobatchTree, Node, tree_all_reduce

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ExactReduction:
    """`Reduction` in the order of a `MicrobatchTree`: each microbatch is one slice of a batch.

    Args:
        world: the ranks.
        microbatches: number of microbatches; at least the number of ranks.
    """

    def __init__(self, world: World, microbatches: int) -> None:
        self.own = owned_microbatches(microbatches, world.shares, world.rank)
        self._world = world
        self._tree = MicrobatchTree(microbatches)
        self._cover = self._tree.cover(world.rank, world.shares)
        self._stream: Any = None  # of sums of gradients, which overlap with the backward
        if is_accelerator(world.device) and world.size > 1:
            self._stream = accelerator_module().Stream(world.device)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all microbatches, in the order of the tree."""
        flat = [part.detach().resolve_conj().resolve_neg().contiguous().view(-1) for part in parts]
        leaves = {(number, number + 1): part for number, part in zip(self.own, flat, strict=True)}
        subtrees = self._merged(leaves, torch.add)  # new tensors: the parts are not written
        for node in subtrees.keys() & leaves.keys():
            subtrees[node] = leaves[node].clone()
        total = self._sum_over_ranks(list(subtrees.values()))
        # `data`: a view could not be written in place, as `loss *= ...` does.
        return total.view(parts[0].shape).data

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return the sums with all pairs of subtrees added of which both are there."""
        return self._merged(sums, torch.Tensor.add_)

    def _merged(self, sums: Mapping[Node, torch.Tensor], add: Add) -> dict[Node, torch.Tensor]:
        merged: dict[Node, torch.Tensor] = {}
        for node in self._cover:
            merged |= self._tree.merge(node, sums, add)
        return merged

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum over ranks on accelerators; sum on CPUs, where a thread would compete with the backward."""
        subtrees = list(sums.values())
        if self._stream is None:
            return self._sum_over_ranks(subtrees)
        accelerator = accelerator_module()
        self._stream.wait_stream(accelerator.current_stream(self._world.device))
        with accelerator.stream(self._stream):
            total = self._sum_over_ranks(subtrees)
        for subtree in subtrees:
            subtree.record_stream(self._stream)  # their memory belongs to the other stream
        return total

    def wait(self, work: Any) -> torch.Tensor:
        """Return the sum."""
        total: torch.Tensor = work
        if self._stream is not None:
            current = accelerator_module().current_stream(self._world.device)
            current.wait_stream(self._stream)
            total.record_stream(current)
        return total

    def _sum_over_ranks(self, subtrees: list[torch.Tensor]) -> torch.Tensor:
        return tree_all_reduce(self._world, self._tree, subtrees)
