"""Sums of vectors over ranks, in the order of the tree or in the backend's own."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from samestep.parallel.tree import Node, ShardTree
from samestep.runtime.world import World

_NAME = "the sum in tree order"
# Up to here the number of messages matters more than their length (tried on loopback with 4 ranks).
_SMALL_BYTES = 2**20


def tree_sum(world: World, tree: ShardTree, mine: list[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    """The sum over all shards in the order of `tree`, on every rank.

    Where the ranks' subtrees pair up, as they do for a power of two, pairs exchange and add: whole vectors while they
    are small, halves of halves otherwise (recursive doubling, and halving and doubling: Thakur et al., "Optimization
    of collective communication operations in MPICH", 2005). Two ranks may as well use the backend's all-reduce,
    since a sum of two operands commutes. Else each rank becomes responsible for one slice of the vector: it receives
    that slice of every subtree sum, adds them in tree order, and sends the result to all.

    Args:
        mine: this rank's subtree sums in the order of `tree.cover`, flat, of equal length.
        total: where the sum goes, of the same length; may be one of `mine`.

    Returns:
        `total`.
    """
    covers = [tree.cover(rank, world.size) for rank in range(world.size)]
    if world.size == 1:
        _assign(total, _fold(tree, covers[0], mine))
    elif tree.pairs_up(world.size):
        _assign(total, mine[0])
        if total.numel() * total.element_size() <= _SMALL_BYTES:
            world.guarded(lambda: _sum_by_doubling(world, total), _NAME)
        elif world.size == 2:
            world.all_reduce(total)
        else:
            world.guarded(lambda: _sum_by_halving(world, total), _NAME)
    else:
        world.guarded(lambda: _sum_by_slices(world, tree, covers, mine, total), _NAME)
    return total


def plain_sum(world: World, total: torch.Tensor) -> torch.Tensor:
    """The backend's all-reduce of `total`, in place: equal to the tree to rounding."""
    if world.size > 1:
        world.all_reduce(total)
    return total


def _sum_by_doubling(world: World, total: torch.Tensor) -> None:
    got = torch.empty_like(total)
    distance = 1
    while distance < world.size:
        _swap(world, total, got, world.rank ^ distance)
        total.add_(got)
        distance *= 2


def _sum_by_halving(world: World, total: torch.Tensor) -> None:
    kept = total
    history: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    distance = 1
    while distance < world.size:
        middle = kept.numel() // 2
        low, high = kept[:middle], kept[middle:]
        mine, theirs = (high, low) if world.rank & distance else (low, high)
        got = torch.empty_like(mine)
        _swap(world, theirs, got, world.rank ^ distance)
        mine.add_(got)
        history.append((distance, mine, theirs))
        kept = mine
        distance *= 2
    for distance, mine, theirs in reversed(history):
        _swap(world, mine, theirs, world.rank ^ distance)


def _swap(world: World, give: torch.Tensor, take: torch.Tensor, peer: int) -> None:
    _communicate([_to(world, give, peer)], [_from(world, take, peer)])


def _to(world: World, tensor: torch.Tensor, peer: int) -> dist.P2POp:
    return dist.P2POp(dist.isend, tensor, group=world.group, group_peer=peer)


def _from(world: World, tensor: torch.Tensor, peer: int) -> dist.P2POp:
    return dist.P2POp(dist.irecv, tensor, group=world.group, group_peer=peer)


def _sum_by_slices(
    world: World, tree: ShardTree, covers: list[tuple[Node, ...]], mine: list[torch.Tensor], total: torch.Tensor
) -> None:
    length, rank, size = total.numel(), world.rank, world.size
    bounds = [length * r // size for r in range(size + 1)]
    slices = [slice(start, stop) for start, stop in pairwise(bounds)]
    own = slices[rank]
    others = [(rank + offset) % size for offset in range(1, size)]
    received = {peer: total.new_empty(len(covers[peer]), own.stop - own.start) for peer in others}
    _communicate(
        [_to(world, vector[slices[peer]], peer) for peer in others for vector in mine],
        [_from(world, row, peer) for peer in others for row in received[peer]],
    )
    nodes = [node for cover in covers for node in cover]
    parts = [
        part for r in range(size) for part in ([vector[own] for vector in mine] if r == rank else list(received[r]))
    ]
    _assign(total[own], _fold(tree, tuple(nodes), parts))
    _communicate(
        [_to(world, total[own], peer) for peer in others],
        [_from(world, total[slices[peer]], peer) for peer in others],
    )


def _communicate(sends: list[dist.P2POp], receives: list[dist.P2POp]) -> None:
    operations = [operation for operation in [*receives, *sends] if operation.tensor.numel() > 0]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _fold(tree: ShardTree, nodes: tuple[Node, ...], vectors: list[torch.Tensor]) -> torch.Tensor:
    total = tree.fold((0, tree.shards), dict(zip(nodes, vectors, strict=True)), _add)
    assert total is not None, "a global batch has at least one sample"
    return total


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return right.add_(left)


def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if target.data_ptr() != value.data_ptr():
        target.copy_(value)
