"""Slices of divided matrix products, and sums of partial products in one binary tree over slices.

The number of slices belongs to the mathematics. The ranks of a tensor axis own consecutive slices, each computes its
own with the shapes and strides of one process, and sums over slices have the operands of one process: results do not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.strategies.reduction import MicrobatchTree, communicate, tree_all_reduce

_ALIGNMENT = 64  # bytes, as of new memory on CPUs; matrix products can depend on it

Parts = tuple[torch.Tensor, ...]


class Slicing:
    """Division of dimensions into `count` slices, and the slices of this rank.

    Args:
        count: number of slices; a multiple of the number of ranks.
        world: ranks of the tensor axis.

    Attributes:
        owned: slices of this rank.
    """

    def __init__(self, count: int, world: World) -> None:
        self.count, self._world = count, world
        self.owned = owned_microbatches(count, world.size, world.rank)
        self._tree = MicrobatchTree(count, count)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slicing:
        return self  # a copy of a model, such as for an average, has the same ranks

    def divide(self, tensor: torch.Tensor, dim: int) -> Parts:
        """Return this rank's slices of a full tensor, contiguous."""
        parts = tensor.chunk(self.count, dim)
        return tuple(aligned(parts[number]) for number in self.owned)

    def divide_local(self, tensor: torch.Tensor, dim: int) -> Parts:
        """Return the slices of a tensor that consists of this rank's slices, contiguous."""
        return tuple(aligned(part) for part in tensor.chunk(len(self.owned), dim))

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the full tensor from the slices of all ranks. A collective."""
        local = torch.cat(list(parts), dim).contiguous()
        world = self._world
        if world.size == 1:
            return local
        parts_of_ranks = [local if rank == world.rank else torch.empty_like(local) for rank in range(world.size)]
        peers = [(world.rank + offset) % world.size for offset in range(1, world.size)]
        sent, received = [(local, peer) for peer in peers], [(parts_of_ranks[peer], peer) for peer in peers]
        world.run_collective(lambda: communicate(world, sent, received), "an all-gather of slices")
        return torch.cat(parts_of_ranks, dim)

    def add(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the values of all slices in tree order, from this rank's. A collective."""
        values = {(number, number + 1): part for number, part in zip(self.owned, parts, strict=True)}
        sums: dict[tuple[int, int], torch.Tensor] = {}
        for node in self._tree.cover(self._world.rank, self._world.shares):
            sums |= self._tree.merge(node, values, torch.add)
        subtree_sums = [total.contiguous() for total in sums.values()]
        if self._world.size == 1:
            return subtree_sums[0]
        # Cloned: the collective adds in place, and a value of one slice belongs to the caller.
        flat = [total.flatten().clone() if total is parts[0] else total.view(-1) for total in subtree_sums]
        return tree_all_reduce(self._world, self._tree, flat, flat[0]).view(parts[0].shape)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, copied if it is not contiguous or not aligned: bits of products can depend on both."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def spread(tensor: torch.Tensor, slicing: Slicing) -> Parts:
    """Return a full tensor once per slice of this rank; gradients of all slices are added."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return (tensor,) * len(slicing.owned)
    parts: Parts = _Spread.apply(tensor, slicing)  # type: ignore[no-untyped-call]
    return parts


def add(parts: Sequence[torch.Tensor], slicing: Slicing) -> torch.Tensor:
    """Return the sum of the values of all slices, on every rank."""
    total: torch.Tensor = _Add.apply(slicing, *parts)  # type: ignore[no-untyped-call]
    return total


def divide(tensor: torch.Tensor, slicing: Slicing, dim: int) -> Parts:
    """Return this rank's slices of a full tensor; gradients of all slices are joined."""
    parts: Parts = _Divide.apply(tensor, slicing, dim)  # type: ignore[no-untyped-call]
    return parts


def join(parts: Sequence[torch.Tensor], slicing: Slicing, dim: int) -> torch.Tensor:
    """Return the full tensor from the slices of all ranks, on every rank."""
    full: torch.Tensor = _Join.apply(slicing, dim, *parts)  # type: ignore[no-untyped-call]
    return full


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slicing: Slicing) -> Parts:
        ctx.slicing = slicing
        return tuple(tensor.view_as(tensor) for _ in slicing.owned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.slicing.add(gradients), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slicing: Slicing, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        return slicing.add(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *(gradient,) * ctx.count


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slicing: Slicing, dim: int) -> Parts:
        ctx.slicing, ctx.dim = slicing, dim
        return slicing.divide(tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.slicing.join(gradients, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slicing: Slicing, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.slicing, ctx.dim = slicing, dim
        return slicing.join(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, *ctx.slicing.divide(gradient, ctx.dim)
