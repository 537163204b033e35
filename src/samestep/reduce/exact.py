"""The `exact` reduction: sums over microbatches in one tree, with the same bits on all rank counts.

Floating-point addition is commutative but not associative: a sum has the same bits on any number of
ranks only if the same pairs are added. The sum over `[lo, hi)` is the sum over the first half plus
that over the second half, `mid = lo + (hi - lo) // 2`. A rank adds the subtrees of its own
microbatches; ranks then communicate to add the rest of the tree.

Decisions: docs/decisions/numerics.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.local_sockets import Messages
from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.reduce.fast import Node

Additions = tuple[tuple[Node, tuple[Node, Node]], ...]  # sums with their operands
T = TypeVar("T")

# Up to this size, the number of messages costs more than their length (measured on loopback with 4
# ranks).
_SMALL_BYTES = 2**16
# Elements; NCCL copies memory that is not aligned to 16 bytes byte by byte (its issue 413).
_ALIGNMENT = 32


class MicrobatchTree(NamedTuple):  # hashed several times per microbatch
    """Tree over the microbatches of one global batch."""

    microbatches: int

    @lru_cache(maxsize=4096)  # noqa: B019  # a run has few trees, and each is one number
    def cover(self, rank: int, ranks: int) -> tuple[Node, ...]:
        """Return the largest subtrees that a rank owns completely, in order."""
        owned = owned_microbatches(self.microbatches, ranks, rank)

        def descend(node: Node) -> tuple[Node, ...]:
            lo, hi = node
            if hi <= owned.start or lo >= owned.stop:
                return ()
            if owned.start <= lo and hi <= owned.stop:
                return (node,)
            left, right = _children(node)
            return descend(left) + descend(right)

        return descend((0, self.microbatches))

    def merge(
        self, node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]
    ) -> dict[Node, T]:
        """Return the values below `node`, with all pairs added of which both operands are there."""
        results, additions = self._plan(node, tuple(values))
        sums = dict(values)
        for total, (left, right) in additions:
            sums[total] = add(sums.pop(left), sums.pop(right))
        return {result: sums[result] for result in results}

    @lru_cache(maxsize=4096)  # noqa: B019  # many times faster than the recursion, in every step
    def _plan(self, node: Node, available: tuple[Node, ...]) -> tuple[tuple[Node, ...], Additions]:
        """Return the nodes that `merge` returns from some values, and its additions in order."""
        lo, hi = node
        if node in available:
            return (node,), ()
        inner = tuple((first, end) for first, end in available if lo <= first and end <= hi)
        if not inner:
            return (), ()
        left, right = _children(node)
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


def _children(node: Node) -> tuple[Node, Node]:
    lo, hi = node
    mid = lo + (hi - lo) // 2
    return (lo, mid), (mid, hi)


class ExactReduction:
    """`Reduction` in the order of a `MicrobatchTree`: each microbatch is one slice of a batch.

    Args:
        world: the ranks.
        microbatches: number of microbatches; at least the number of ranks.
    """

    def __init__(self, world: World, microbatches: int) -> None:
        self.own = owned_microbatches(microbatches, world.size, world.rank)
        self._world = world
        self._tree = MicrobatchTree(microbatches)
        self._cover = self._tree.cover(world.rank, world.size)
        self._stream: Any = None  # of sums of gradients, which overlap with the backward
        if is_accelerator(world.device) and world.size > 1:
            self._stream = accelerator_module().Stream(world.device)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all microbatches, in the order of the tree."""
        flat = [part.detach().resolve_conj().resolve_neg().contiguous().view(-1) for part in parts]
        leaves = {(number, number + 1): part for number, part in zip(self.own, flat, strict=True)}
        subtrees = self._merged(leaves, torch.add)  # new tensors: the parts are not written
        # Parts without a partner belong to the caller, and the all-reduce overwrites its operands.
        for node in subtrees.keys() & leaves.keys():
            subtrees[node] = leaves[node].clone()
        total = tree_all_reduce(self._world, self._tree, list(subtrees.values()))
        # `data`: a view could not be written in place, as `loss *= ...` does.
        return total.view(parts[0].shape).data

    def merge(self, sums: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Return the sums with all pairs of subtrees added of which both are there."""
        return self._merged(sums, torch.Tensor.add_)

    def _merged(
        self,
        sums: Mapping[Node, torch.Tensor],
        add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[Node, torch.Tensor]:
        merged: dict[Node, torch.Tensor] = {}
        for node in self._cover:
            merged |= self._tree.merge(node, sums, add)
        return merged

    def start(self, sums: Mapping[Node, torch.Tensor]) -> Any:
        """Start to sum over ranks on accelerators; on CPUs a thread would slow the backward."""
        subtrees = list(sums.values())
        if self._stream is None:
            return tree_all_reduce(self._world, self._tree, subtrees)
        accelerator = accelerator_module()
        # After the gradients, which the current stream computes.
        self._stream.wait_stream(accelerator.current_stream(self._world.device))
        with accelerator.stream(self._stream):
            total = tree_all_reduce(self._world, self._tree, subtrees)
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
    if world.size == 1:
        return first
    length = first.numel()
    slices = [slice(0, length)] * world.size
    is_small = first.nbytes <= _SMALL_BYTES
    if not is_small:  # all but the last ones have an equal length
        step = -(-length // (world.size * _ALIGNMENT)) * _ALIGNMENT
        starts = [min(rank * step, length) for rank in range(world.size + 1)]
        slices = [slice(*starts[rank : rank + 2]) for rank in range(world.size)]

    def exchange() -> torch.Tensor:
        values: dict[Node, torch.Tensor] = {}
        covers = [tree.cover(rank, world.size) for rank in range(world.size)]
        rows = _own_slices(world, covers, subtree_sums, slices)
        for cover, vectors in zip(covers, rows, strict=True):
            values |= zip(cover, vectors, strict=True)
        total = tree.sum(values, lambda left, right: right.add_(left))
        if is_small:
            return total
        return _all_slices(world, total, slices, length)

    return world.run_collective(exchange, "a tree all-reduce")


def _own_slices(
    world: World,
    covers: Sequence[Sequence[Node]],
    subtree_sums: Sequence[torch.Tensor],
    slices: Sequence[slice],
) -> Sequence[Sequence[torch.Tensor]]:
    """Return the slice of this rank of all subtree sums of each rank."""
    own = [vector[slices[world.rank]] for vector in subtree_sums]
    first = subtree_sums[0]
    if world.stages_messages or world.sockets is not None:
        received = [list(own[0].new_empty(len(cover), own[0].numel())) for cover in covers]
        received[world.rank] = own
        peers = _peers(world)
        communicate(
            world,
            [(vector[slices[peer]], peer) for peer in peers for vector in subtree_sums],
            [(row, peer) for peer in peers for row in received[peer]],
        )
        return received
    sent = first
    if len(subtree_sums) > 1 or slices[0] == slices[-1]:
        # Otherwise the slices lie one after another in memory.
        sent = torch.cat([vector[part] for part in slices for vector in subtree_sums])
    every = sent.new_empty(sum(map(len, covers)) * own[0].numel())
    # As bytes: backends do not send tensors of every dtype.
    counts = [len(cover) * own[0].nbytes for cover in covers]
    width = len(subtree_sums) * first.element_size()
    sizes = [width * (part.stop - part.start) for part in slices]
    group = world.process_group
    group.alltoall_base(every.view(torch.uint8), sent.view(torch.uint8), counts, sizes).wait()
    rows = iter(every.view(-1, own[0].numel()))
    return [[next(rows) for _ in cover] for cover in covers]


def _all_slices(
    world: World, own: torch.Tensor, slices: Sequence[slice], length: int
) -> torch.Tensor:
    step = slices[0].stop
    # Longer than the vector: the last slices are shorter, and an all-gather needs equal ones.
    total = own.new_empty(step * world.size)
    row = total[step * world.rank : step * (world.rank + 1)]
    row[: own.numel()].copy_(own)
    if world.stages_messages or world.sockets is not None:
        peers = _peers(world)
        communicate(
            world,
            [(total[slices[world.rank]], peer) for peer in peers],
            [(total[slices[peer]], peer) for peer in peers],
        )
    else:
        world.process_group._allgather_base(total.view(torch.uint8), row.view(torch.uint8)).wait()
    return total[:length]


def _peers(world: World) -> list[int]:
    # From the next rank on: no rank receives from all others at once.
    return [(world.rank + offset) % world.size for offset in range(1, world.size)]


def communicate(world: World, sent: Messages, received: Messages) -> None:
    """Send and receive tensors; each comes with the rank of the peer."""
    if world.stages_messages:
        _communicate_staged(world, sent, received)
    elif world.sockets is not None:
        world.sockets.exchange(sent, received)
    else:
        _exchange(world, sent, received)


def gather_equal(
    world: World, own: torch.Tensor, ranks: Sequence[int], name: str
) -> list[torch.Tensor]:
    """Return tensors of one size of some ranks, by rank; each of them, this one too, calls this."""
    own = own.contiguous()
    tensors = {rank: torch.empty_like(own) for rank in ranks if rank != world.rank}
    sent = [(own, rank) for rank in tensors]
    received = [(tensor, rank) for rank, tensor in tensors.items()]
    world.run_collective(lambda: communicate(world, sent, received), name)
    tensors[world.rank] = own
    return [tensors[rank] for rank in ranks]


def _communicate_staged(world: World, sent: Messages, received: Messages) -> None:
    """Send and receive copies in pinned host memory, in the order of the device's stream."""
    pinned = is_accelerator(world.device)

    def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    staged_sent = [(host_buffer(one).copy_(one, non_blocking=True), peer) for one, peer in sent]
    staged_received = [(host_buffer(tensor), peer) for tensor, peer in received]
    if pinned:
        # gloo reads host memory at once, not in the order of the stream.
        accelerator_module().current_stream(world.device).synchronize()
    _exchange(world, staged_sent, staged_received)
    for (tensor, _), (copy, _) in zip(received, staged_received, strict=True):
        # Torch keeps the pinned memory until the copy has ended.
        tensor.copy_(copy, non_blocking=True)


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
