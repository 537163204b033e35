"""The `exact` reduction: sums over microbatches in one tree, with the same bits on every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
from samestep.microbatches import Shares, owned_microbatches, rank_count
from samestep.reduce.fast import Node

Additions = tuple[tuple[Node, tuple[Node, Node]], ...]  # sums with their operands
T = TypeVar("T")
Messages = list[tuple[torch.Tensor, int]]  # with the rank of the peer

# Up to this size, the number of messages costs more than their length (measured on loopback with 4
# ranks).
_SMALL_BYTES = 2**16
_ALIGNMENT = (
    32  # elements; NCCL copies memory that is not aligned to 16 bytes byte by byte (its issue 413)
)


class MicrobatchTree(NamedTuple):  # hashed several times per microbatch
    """Tree over the microbatches of one global batch."""

    microbatches: int

    @lru_cache(maxsize=4096)  # noqa: B019  # a run has few trees, and each is one number
    def cover(self, rank: int, shares: Shares) -> tuple[Node, ...]:
        """Return the largest subtrees that a rank owns completely, in order."""
        owned = owned_microbatches(self.microbatches, shares, rank)

        def descend(node: Node) -> tuple[Node, ...]:
            lo, hi = node
            if hi <= owned.start or lo >= owned.stop:
                return ()
            if owned.start <= lo and hi <= owned.stop:
                return (node,)
            left, right = children(node)
            return descend(left) + descend(right)

        return descend((0, self.microbatches))

    @lru_cache(maxsize=4096)  # noqa: B019
    def covers(self, shares: Shares) -> tuple[tuple[Node, ...], ...]:
        """Return the largest subtrees of each rank."""
        return tuple(self.cover(rank, shares) for rank in range(rank_count(shares)))

    def merge(
        self, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]
    ) -> dict[Node, T]:
        """Return the values of subtrees below `node`, with all pairs added of which both operands are available."""
        results, additions = self._plan(node, tuple(values))
        sums = dict(values)
        for total, (left, right) in additions:
            sums[total] = add(sums.pop(left), sums.pop(right))
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
        if nodes == (left, right):
            return (node,), (*additions, (node, (left, right)))
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
    world: World, tree: MicrobatchTree, subtree_sums: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the sum over all microbatches in the order of `tree`, on every rank.

    Each rank adds one slice of the vectors: it receives this slice of every subtree sum, adds in
    tree order, and sends the result to all ranks (reduce-scatter and all-gather: Thakur et al.,
    "Optimization of collective communication operations in MPICH", 2005). Of small vectors each
    rank adds everything, which saves the second message. A backend
    never adds, not even for two ranks: NCCL may add in a network switch, with other rounding.

    Args:
        world: the ranks.
        tree: the tree.
        subtree_sums: sums of this rank, at least one, in the order of `tree.cover`: flat,
            contiguous, of equal length. They are overwritten.
    """
    first = subtree_sums[0]
    length = first.numel()
    if world.size == 1:
        return first
    is_small = first.nbytes <= _SMALL_BYTES
    slices = [slice(0, length)] * world.size if is_small else _slices(length, world.size)
    total = first

    def exchange() -> None:
        nonlocal total
        total = _own_slice(world, tree, subtree_sums, slices)
        if not is_small:
            total = _all_slices(world, total, slices, length)

    world.run_collective(exchange, "a tree all-reduce")
    return total


def _slices(length: int, size: int) -> list[slice]:
    """Return a slice of a vector for each rank; all but the last ones have an equal length."""
    step = -(-length // (size * _ALIGNMENT)) * _ALIGNMENT
    return [slice(min(rank * step, length), min((rank + 1) * step, length)) for rank in range(size)]


def _own_slice(
    world: World,
    tree: MicrobatchTree,
    subtree_sums: Sequence[torch.Tensor],
    slices: Sequence[slice],
) -> torch.Tensor:
    """Return the sum of the slice of this rank."""
    covers = tree.covers(world.shares)
    own = [vector[slices[world.rank]] for vector in subtree_sums]
    if _has_collectives(world):
        rows = _received_rows(world, covers, subtree_sums, slices)
    else:
        rows = [list(own[0].new_empty(len(cover), own[0].numel())) for cover in covers]
        rows[world.rank] = own
        communicate(
            world,
            [(vector[slices[peer]], peer) for peer in _peers(world) for vector in subtree_sums],
            [(row, peer) for peer in _peers(world) for row in rows[peer]],
        )
    values: dict[Node, torch.Tensor] = {}
    for cover, vectors in zip(covers, rows, strict=True):
        values |= zip(cover, vectors, strict=True)
    return tree.sum(values, lambda left, right: right.add_(left))


def _received_rows(
    world: World,
    covers: Sequence[Sequence[Node]],
    subtree_sums: Sequence[torch.Tensor],
    slices: Sequence[slice],
) -> list[list[torch.Tensor]]:
    """Return the slice of this rank of all subtree sums of each rank, received in one all-to-all."""
    width = subtree_sums[0].element_size()
    own = slices[world.rank].stop - slices[world.rank].start
    sent = subtree_sums[0]
    if (
        len(subtree_sums) > 1 or slices[0] == slices[-1]
    ):  # otherwise the slices lie one after another in memory
        sent = torch.cat([vector[part] for part in slices for vector in subtree_sums])
    received = sent.new_empty(sum(map(len, covers)) * own)
    # As bytes: backends do not send tensors of every dtype.
    counts = [len(cover) * own * width for cover in covers]
    sizes = [len(subtree_sums) * (part.stop - part.start) * width for part in slices]
    world.process_group.alltoall_base(_bytes(received), _bytes(sent), counts, sizes).wait()
    rows = iter(received.view(-1, own))
    return [[next(rows) for _ in cover] for cover in covers]


def _all_slices(
    world: World, own: torch.Tensor, slices: Sequence[slice], length: int
) -> torch.Tensor:
    """Return the slices of all ranks as one vector."""
    step = slices[0].stop
    total = own.new_empty(step * world.size)
    row = total[step * world.rank : step * (world.rank + 1)]
    row[: own.numel()].copy_(own)
    if _has_collectives(world):
        world.process_group._allgather_base(_bytes(total), _bytes(row)).wait()
    else:
        communicate(
            world,
            [(total[slices[world.rank]], peer) for peer in _peers(world)],
            [(total[slices[peer]], peer) for peer in _peers(world)],
        )
    return total[:length]


def _has_collectives(world: World) -> bool:
    """Whether the backend sends memory of this device, and no sockets do."""
    return not world.stages_messages and world.sockets is None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _peers(world: World) -> list[int]:
    return [(world.rank + offset) % world.size for offset in range(1, world.size)]


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
    staged_sent = [
        (_host_buffer(tensor).copy_(tensor, non_blocking=True), peer) for tensor, peer in sent
    ]
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
