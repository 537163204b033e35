"""The one order in which sums over shards are taken: a fixed balanced binary tree.

Floating-point addition is commutative but not associative, so a sum has the same bits on every number of ranks
only if the same pairs are added. The tree over shards `[lo, hi)` is the sum of the tree over its first half
and that over its second half, `mid = lo + (hi - lo) // 2`. A rank adds the subtrees it owns; ranks then meet in
the rest of the tree. Shards without samples are left out of it.

Pure integer arithmetic: what is added to what is known before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from samestep.sharding import owned_shards

Node = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class ShardTree:
    """The tree over the shards of one global batch.

    Attributes:
        shards: number of shards, empty ones included.
        samples: samples in the global batch; decides which shards are empty.
    """

    shards: int
    samples: int

    def has_samples(self, node: Node) -> bool:
        """Whether any shard below `node` has samples."""
        lo, hi = node
        return self.samples * hi // self.shards > self.samples * lo // self.shards

    def cover(self, rank: int, size: int) -> tuple[Node, ...]:
        """The largest subtrees that rank `rank` of `size` owns whole, in order; those without samples left out."""
        return _cover(self, rank, size)

    def pairs_up(self, size: int) -> bool:
        """Whether each of `size` ranks owns one subtree, and these join two by two, level by level."""
        return _pairs_up(self, size)

    def is_shared_by_all(self, size: int) -> bool:
        """Whether each of `size` ranks has samples in this batch (a last batch may be too small for that)."""
        return all(self.cover(rank, size) for rank in range(size))

    def fold(self, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T | None:
        """The sum below `node` from `values` of some subtrees; None where nothing is below it."""
        if node in values:
            return values[node]
        if node[1] - node[0] == 1:
            return None
        left, right = (self.fold(half, values, add) for half in halves(node))
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)


def merged(tree: ShardTree, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> dict[Node, T]:
    """`values` of subtrees below `node`, each pair added whose sum is wanted as soon as both are there."""
    if node in values:
        return {node: values[node]}
    if node[1] - node[0] == 1:
        return {}
    below: dict[Node, T] = {}
    for half in halves(node):
        below |= merged(tree, half, values, add)
    if not below or any(tree.has_samples(half) and half not in below for half in halves(node)):
        return below
    total = tree.fold(node, below, add)
    assert total is not None
    return {node: total}


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node that is not a leaf."""
    lo, hi = node
    mid = lo + (hi - lo) // 2
    return (lo, mid), (mid, hi)


@lru_cache(maxsize=4096)
def _pairs_up(tree: ShardTree, size: int) -> bool:
    covers = [tree.cover(rank, size) for rank in range(size)]
    if any(len(cover) != 1 for cover in covers):
        return False
    nodes = [cover[0] for cover in covers]
    while len(nodes) > 1:
        if len(nodes) % 2:
            return False
        pairs = list(zip(nodes[::2], nodes[1::2], strict=True))
        nodes = [(left[0], right[1]) for left, right in pairs]
        if any(halves(node) != pair for node, pair in zip(nodes, pairs, strict=True)):
            return False
    return nodes == [(0, tree.shards)]


@lru_cache(maxsize=4096)
def _cover(tree: ShardTree, rank: int, size: int) -> tuple[Node, ...]:
    owned = owned_shards(tree.shards, size, rank)

    def descend(node: Node) -> tuple[Node, ...]:
        lo, hi = node
        if hi <= owned.start or lo >= owned.stop or not tree.has_samples(node):
            return ()
        if owned.start <= lo and hi <= owned.stop:
            return (node,)
        left, right = halves(node)
        return descend(left) + descend(right)

    return descend((0, tree.shards))
