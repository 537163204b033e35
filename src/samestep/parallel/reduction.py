"""How the gradients of shards become one gradient: `exact` in the order of the tree, `fast` as they come.

A rank computes its shards one after another. The gradients of all but its last are kept; those of the last meet
the kept ones, and then the other ranks', while backward still runs: one communication a step, however many
shards a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from samestep.config import Reduction as ReductionName
from samestep.config.strategy import Hook
from samestep.parallel.exchange import plain_sum, tree_sum
from samestep.parallel.flat import flattened
from samestep.parallel.low_rank import LowRankSum
from samestep.parallel.rounded import rounded_sum
from samestep.parallel.tree import Node, ShardTree, merged
from samestep.runtime.world import World

Parameter = torch.nn.Parameter
Tensors = list[torch.Tensor]
# The sum over ranks of the gradients of some parameters, side by side in one tensor, in place of them.
SumOverRanks = Callable[[Sequence[Parameter], torch.Tensor], torch.Tensor]


class Reduction(Protocol):
    """Sums over shards; `tests/conformance/test_reductions.py` holds every implementation to this."""

    def keep(self, tree: ShardTree, shard: int) -> None:
        """Put the gradients of a shard aside that is not the last one of this rank."""

    def local(self, tree: ShardTree, last: int) -> None:
        """Where this rank owns all shards: afterwards `.grad` holds the sum of the last one's and the kept."""

    def bucket(
        self, tree: ShardTree, last: int, parameters: Sequence[Parameter], gradients: Tensors, flat: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the gradients of some parameters over all shards and ranks, written to `flat`.

        Args:
            last: the shard that `gradients` are of, the last one of this rank.
            gradients: views of `flat`, one a parameter.
        """

    def kept(self, tree: ShardTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        """The same of what was kept alone, as a new flat tensor, for batches that leave a rank without samples."""

    def vector(self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int) -> torch.Tensor:
        """The sum of one float64 vector of `length` a shard over all shards and ranks."""

    def forget(self) -> None:
        """Drop what was kept, once every bucket of the step has met it."""


def build_reduction(
    name: ReductionName, world: World, parameters: Sequence[Parameter], hook: Hook = "none"
) -> Reduction:
    """The implementation behind a recipe's word, for the trained `parameters` of a model.

    Args:
        hook: how gradients travel between ranks; where that is not as they are, no order of summation is exact.
    """
    if hook != "none" and world.size > 1:
        return FastReduction(world, parameters, _carrier(hook, world, parameters))
    return ExactReduction(world, parameters) if name == "exact" else FastReduction(world, parameters)


def _carrier(hook: Hook, world: World, parameters: Sequence[Parameter]) -> SumOverRanks:
    if hook == "powersgd":
        return LowRankSum(world, parameters)
    dtype = torch.float16 if hook == "fp16" else torch.bfloat16
    return lambda _, total: rounded_sum(world, total, dtype)


class ExactReduction:
    """Partial sums meet in one fixed tree over shards, so the bits do not depend on the number of ranks."""

    def __init__(self, world: World, parameters: Sequence[Parameter]) -> None:
        self._world = world
        self._parameters = list(parameters)
        self._position = {parameter: i for i, parameter in enumerate(parameters)}
        self._kept: dict[Node, Tensors] = {}

    def keep(self, tree: ShardTree, shard: int) -> None:
        self._kept[shard, shard + 1] = _take_gradients(self._parameters)
        # Adding up early bounds what is kept to one set of gradients a level of the tree.
        kept: dict[Node, Tensors] = {}
        for node in tree.cover(self._world.rank, self._world.size):
            kept |= merged(tree, node, self._kept, _add)
        self._kept = kept

    def local(self, tree: ShardTree, last: int) -> None:
        gradients = _take_gradients(self._parameters)
        self._fold_into(tree, (0, tree.shards), last, self._parameters, gradients)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def bucket(
        self, tree: ShardTree, last: int, parameters: Sequence[Parameter], gradients: Tensors, flat: torch.Tensor
    ) -> torch.Tensor:
        mine = []
        for node in tree.cover(self._world.rank, self._world.size):
            if node[0] <= last < node[1]:
                self._fold_into(tree, node, last, parameters, gradients)
                mine.append(flat)
            else:
                mine.append(flattened(self._select(node, parameters), parameters))
        return tree_sum(self._world, tree, mine, flat)

    def kept(self, tree: ShardTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        nodes = tree.cover(self._world.rank, self._world.size)
        mine = [flattened(self._select(node, parameters), parameters) for node in nodes]
        total = mine[0] if mine else flattened([torch.zeros_like(p) for p in parameters], parameters)
        return tree_sum(self._world, tree, mine, total)

    def vector(self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int) -> torch.Tensor:
        return _tree_vector(self._world, tree, vectors, length)

    def forget(self) -> None:
        """Drop what was kept, once every bucket of the step has met it."""
        self._kept = {}

    def _fold_into(
        self, tree: ShardTree, node: Node, last: int, parameters: Sequence[Parameter], gradients: Tensors
    ) -> None:
        values = {n: self._select(n, parameters) for n in self._kept if node[0] <= n[0] and n[1] <= node[1]}
        total = tree.fold(node, {**values, (last, last + 1): gradients}, _add)
        assert total is gradients, "the last shard is the right-most, and sums go to the right-hand operand"

    def _select(self, node: Node, parameters: Sequence[Parameter]) -> Tensors:
        kept = self._kept[node]
        return [kept[self._position[parameter]] for parameter in parameters]


class FastReduction:
    """Gradients are summed as they come: shard after shard in a rank, over ranks by the backend.

    Args:
        over_ranks: sums over ranks instead.
    """

    def __init__(self, world: World, parameters: Sequence[Parameter], over_ranks: SumOverRanks | None = None) -> None:
        self._world = world
        self._over_ranks = over_ranks or (lambda _, total: plain_sum(world, total))
        self._parameters = list(parameters)
        self._kept: dict[Parameter, torch.Tensor] = {}

    def keep(self, tree: ShardTree, shard: int) -> None:
        gradients = _take_gradients(self._parameters)
        self._add_kept(self._parameters, gradients)
        self._kept = dict(zip(self._parameters, gradients, strict=True))

    def local(self, tree: ShardTree, last: int) -> None:
        gradients = _take_gradients(self._parameters)
        self._add_kept(self._parameters, gradients)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def bucket(
        self, tree: ShardTree, last: int, parameters: Sequence[Parameter], gradients: Tensors, flat: torch.Tensor
    ) -> torch.Tensor:
        self._add_kept(parameters, gradients)
        return self._over_ranks(parameters, flat)

    def kept(self, tree: ShardTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        mine = [self._kept[p] if p in self._kept else torch.zeros_like(p) for p in parameters]
        return self._over_ranks(parameters, flattened(mine, parameters))

    def vector(self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int) -> torch.Tensor:
        return _tree_vector(self._world, tree, vectors, length)

    def forget(self) -> None:
        self._kept = {}

    def _add_kept(self, parameters: Sequence[Parameter], gradients: Tensors) -> None:
        if self._kept:
            torch._foreach_add_(gradients, [self._kept[parameter] for parameter in parameters])


def _tree_vector(world: World, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int) -> torch.Tensor:
    """In tree order under either reduction: a vector this short is sooner summed so than by an all-reduce."""
    leaves: dict[Node, Tensors] = {(shard, shard + 1): [vector] for shard, vector in vectors.items()}
    folded = [tree.fold(node, leaves, _add) for node in tree.cover(world.rank, world.size)]
    mine = [tensors[0] for tensors in folded if tensors is not None]
    total = mine[0] if mine else torch.zeros(length, dtype=torch.float64, device=world.device)
    return tree_sum(world, tree, mine, total)


def _add(left: Tensors, right: Tensors) -> Tensors:
    torch._foreach_add_(right, left)
    return right


def _take_gradients(parameters: Sequence[Parameter]) -> Tensors:
    """The gradients, which the parameters no longer have afterwards."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
