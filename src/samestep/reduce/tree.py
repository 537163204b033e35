"""Sums over microbatches in one fixed order, a balanced binary tree: the number of ranks changes no bit.

Floating-point addition is commutative but not associative: a sum has the same bits on any number of ranks only if the
same pairs are added. The sum over `[lo, hi)` is the sum over the first half plus that over the second half,
`mid = lo + (hi - lo) // 2`. A rank adds the subtrees of its own microbatches; ranks then communicate to add the rest of
the tree. Microbatches without samples are omitted.

Decisions: docs/decisions/numerics.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
from samestep.microbatches import Shares, owned_microbatches, rank_count

Node = tuple[int, int]
Additions = tuple[tuple[Node, tuple[Node, ...]], ...]  # sums with their operands
T = TypeVar("T")
Messages = list[tuple[torch.Tensor, int]]  # with the rank of the peer

_COLLECTIVE = "a tree all-reduce"
# Up to this size, the number of messages costs more than their length (measured on loopback with 4 ranks).
_SMALL_BYTES = 2**20


class MicrobatchTree(NamedTuple):  # hashed several times per microbatch
    """Tree over the microbatches of one global batch."""

    microbatches: int  # number of microbatches, including empty ones
    samples: int  # size of the global batch, which determines the empty microbatches

    @property
    def filled(self) -> list[int]:
        """The microbatches with samples."""
        return [number for number in range(self.microbatches) if self.has_samples((number, number + 1))]

    def has_samples(self, node: Node) -> bool:
        """Return whether any microbatch below `node` has samples."""
        lo, hi = node
        return self.samples * hi // self.microbatches > self.samples * lo // self.microbatches

    @lru_cache(maxsize=4096)  # noqa: B019  # a run has few trees, and each is two numbers
    def cover(self, rank: int, shares: Shares) -> tuple[Node, ...]:
        """Return the largest subtrees with samples that a rank owns completely, in order."""
        owned = owned_microbatches(self.microbatches, shares, rank)

        def descend(node: Node) -> tuple[Node, ...]:
            lo, hi = node
            if hi <= owned.start or lo >= owned.stop or not self.has_samples(node):
                return ()
            if owned.start <= lo and hi <= owned.stop:
                return (node,)
            left, right = children(node)
            return descend(left) + descend(right)

        return descend((0, self.microbatches))

    @lru_cache(maxsize=4096)  # noqa: B019
    def pairs_up(self, shares: Shares) -> bool:
        """Return whether each rank owns one subtree, and these merge in pairs, level by level."""
        level: list[Node] = [(0, self.microbatches)]
        while len(level) < rank_count(shares):
            level = [child for node in level for child in children(node)]
        return self.covers(shares) == tuple((node,) for node in level)

    @lru_cache(maxsize=4096)  # noqa: B019
    def covers(self, shares: Shares) -> tuple[tuple[Node, ...], ...]:
        """Return the largest subtrees with samples of each rank."""
        return tuple(self.cover(rank, shares) for rank in range(rank_count(shares)))

    def merge(self, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> dict[Node, T]:
        """Return the values of subtrees below `node`, with all pairs added of which both operands are available."""
        results, additions = self._plan(node, tuple(values))
        sums = dict(values)
        for total, operands in additions:
            sums[total] = reduce(add, [sums.pop(operand) for operand in operands])
        return {result: sums[result] for result in results}

    @lru_cache(maxsize=4096)  # noqa: B019  # many times faster than the recursion, in every microbatch
    def _plan(self, node: Node, available: tuple[Node, ...]) -> tuple[tuple[Node, ...], Additions]:
        """Return the nodes that `merge` returns from values of the nodes `available`, and its additions in order."""
        lo, hi = node
        if node in available:
            return (node,), ()
        inner = tuple((first, end) for first, end in available if lo <= first and end <= hi)
        if not inner:
            return (), ()
        left, right = children(node)
        left_nodes, first = self._plan(left, inner)
        right_nodes, second = self._plan(right, inner)
        nodes = left_nodes + right_nodes
        additions = first + second
        operands = tuple(child for child in (left, right) if self.has_samples(child))
        if operands and all(child in nodes for child in operands):
            return (node,), (*additions, (node, operands))
        return nodes, additions

    def sum(self, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
        """Return the sum over all microbatches from the values of subtrees."""
        return self.merge((0, self.microbatches), values, add)[0, self.microbatches]


def children(node: Node) -> tuple[Node, Node]:
    """Return the two children of an inner node."""
    lo, hi = node
    mid = lo + (hi - lo) // 2
    return (lo, mid), (mid, hi)


def tree_all_reduce(
    world: World, tree: MicrobatchTree, subtree_sums: list[torch.Tensor], total: torch.Tensor
) -> torch.Tensor:
    """Sum over all microbatches in the order of `tree`, on every rank; return `total`, the output.

    `subtree_sums` are the sums of this rank in the order of `tree.cover`: flat, of equal length. `total` is one of
    them, or another tensor of this length if this rank has none.

    If the ranks' subtrees pair up, as for a power of two, pairs of ranks exchange and add: complete vectors while these
    are small, halves of halves otherwise (recursive doubling, and halving and doubling: Thakur et al., "Optimization
    of collective communication operations in MPICH", 2005). Otherwise each rank reduces one slice of the vector: it
    receives that slice of every subtree sum, adds the slices in tree order, and sends the result to all ranks. A
    backend never adds, not even for two ranks: NCCL may add in a network switch, with other rounding.
    """
    if world.size == 1:
        return total
    if not tree.pairs_up(world.shares):
        world.run_collective(lambda: _reduce_by_slices(world, tree, subtree_sums, total), _COLLECTIVE)
    else:
        _reduce_by_pairs(world, total)
    return total


def _reduce_by_pairs(world: World, total: torch.Tensor) -> None:
    reduce_pairs = _reduce_by_doubling if total.nbytes <= _SMALL_BYTES else _reduce_by_halving
    world.run_collective(lambda: reduce_pairs(world, total), _COLLECTIVE)


def _reduce_by_doubling(world: World, total: torch.Tensor) -> None:
    received = torch.empty_like(total)
    for distance in _distances(world):
        communicate(world, [(total, world.rank ^ distance)], [(received, world.rank ^ distance)])
        total.add_(received)


def _reduce_by_halving(world: World, total: torch.Tensor) -> None:
    current = total
    history: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for distance in _distances(world):
        peer = world.rank ^ distance
        middle = current.numel() // 2
        low = current[:middle]
        high = current[middle:]
        own, other = (high, low) if world.rank & distance else (low, high)
        received = torch.empty_like(own)
        communicate(world, [(other, peer)], [(received, peer)])
        current = own.add_(received)
        history.append((peer, own, other))
    for peer, own, other in reversed(history):
        communicate(world, [(own, peer)], [(other, peer)])


def _distances(world: World) -> list[int]:
    """Return the distances between the ranks of a pair: powers of two below the number of ranks."""
    return [2**level for level in range(world.size.bit_length() - 1)]


def _reduce_by_slices(
    world: World, tree: MicrobatchTree, subtree_sums: list[torch.Tensor], total: torch.Tensor
) -> None:
    length = total.numel()
    size = world.size
    slices = [slice(length * rank // size, length * (rank + 1) // size) for rank in range(size)]
    covers = tree.covers(world.shares)
    own = total[slices[world.rank]]
    peers = [(world.rank + offset) % size for offset in range(1, size)]
    rows = {peer: list(total.new_empty(len(covers[peer]), own.numel())) for peer in peers}
    communicate(
        world,
        [(vector[slices[peer]], peer) for peer in peers for vector in subtree_sums],
        [(row, peer) for peer in peers for row in rows[peer]],
    )
    rows[world.rank] = [vector[slices[world.rank]] for vector in subtree_sums]
    values = {node: row for rank in range(size) for node, row in zip(covers[rank], rows[rank], strict=True)}
    own.copy_(tree.sum(values, lambda left, right: right.add_(left)))
    communicate(world, [(own, peer) for peer in peers], [(total[slices[peer]], peer) for peer in peers])


def communicate(world: World, sent: Messages, received: Messages) -> None:
    """Send and receive tensors; each comes with the rank of the peer."""
    if world.stages_messages:
        communicate_staged(world, sent, received)
    elif world.sockets is not None:
        world.sockets.exchange(sent, received)
    else:
        _exchange(world, sent, received)


def communicate_staged(world: World, sent: Messages, received: Messages) -> None:
    """Send and receive copies in pinned host memory, in the order of the current stream of the device."""
    staged_sent = [(_host_buffer(tensor).copy_(tensor, non_blocking=True), peer) for tensor, peer in sent]
    staged_received = [(_host_buffer(tensor), peer) for tensor, peer in received]
    if is_accelerator(world.device):
        accelerator_module().current_stream(world.device).synchronize()
    _exchange(world, staged_sent, staged_received)
    for (tensor, _), (copy, _) in zip(received, staged_received, strict=True):
        tensor.copy_(copy, non_blocking=True)


def _host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_accelerator(tensor.device))


def _exchange(world: World, sent: Messages, received: Messages) -> None:
    operations = [
        dist.P2POp(operation, tensor, group=world.group, group_peer=peer)
        for operation, messages in ((dist.irecv, received), (dist.isend, sent))
        for tensor, peer in messages
        if tensor.numel() > 0
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
