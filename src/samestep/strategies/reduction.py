"""Reduction of the gradients of microbatches: flat buckets, the interface, and the `exact` reduction in tree order.

A rank computes its microbatches one after another. Gradients of all but the last are accumulated locally; those of the
last are added to them and reduced over ranks during its backward: one communication per step, for any number of
microbatches per rank.

A bucket is the gradients of some parameters as one flat tensor, each in the memory order of its parameter. This is the
order of DDP's buckets (torch's "gradient layout contract"): for a channels-last parameter it differs from the order of
the shape.

Decisions: docs/decisions/numerics.md
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World
from samestep.reduce.tree import MicrobatchTree, Node, tree_all_reduce

_BUCKET_ELEMENTS = 4 * 2**20  # of a message outside of DDP

Parameter = torch.nn.Parameter
Tensors = list[torch.Tensor]


def flatten(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors with the shapes of `parameters` as one flat tensor."""
    return torch.cat([_in_memory_order(t, p) for t, p in zip(tensors, parameters, strict=True)])


def unflatten(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of `flat` with the shapes and strides of `parameters`."""
    values = flat.split([parameter.numel() for parameter in parameters])
    # Strides of a copy: those of the parameter, unless it has holes or overlaps.
    copies = [torch.empty_like(parameter, device="meta") for parameter in parameters]
    return [
        value.as_strided(copy.size(), copy.stride(), value.storage_offset())
        for value, copy in zip(values, copies, strict=True)
    ]


def _in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.is_contiguous():
        return tensor.reshape(-1)
    copy = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
    return copy.as_strided((copy.numel(),), (1,), copy.storage_offset())


def reduce_gradients(parameters: Iterable[Parameter], reduce: Callable[[list[Parameter]], torch.Tensor]) -> None:
    """Set `.grad` of each parameter, bucket by bucket; `reduce` returns the flat sum of the gradients of a bucket."""
    for bucket in _buckets(parameters):
        for parameter, gradient in zip(bucket, unflatten(reduce(bucket), bucket), strict=True):
            parameter.grad = gradient


def _buckets(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Split parameters, in order, into buckets of one dtype and device, so that no message is as large as the model."""
    bucket: list[Parameter] = []
    for parameter in parameters:
        is_full = sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET_ELEMENTS
        if bucket and (is_full or (parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class Reduction(ABC):
    """Sum over microbatches. `tests/conformance/test_reductions.py` checks every implementation.

    Args:
        world: ranks that share the microbatches.
        parameters: trained parameters of the model.
    """

    def __init__(self, world: World, parameters: Sequence[Parameter]) -> None:
        self._world, self._parameters = world, list(parameters)
        _ = world.sockets  # connects all ranks now: later accesses are in another thread
        if world.size > 1 and is_accelerator(world.device):
            # NCCL connects a group in its first operation, for which it waits for all ranks. In an exchange, a rank
            # without samples may have no message.
            world.all_reduce(torch.zeros(1, device=world.device))
        self._position = {parameter: i for i, parameter in enumerate(parameters)}
        self._sums: dict[Node, Tensors] = {}

    @abstractmethod
    def accumulate(self, tree: MicrobatchTree, microbatch: int) -> None:
        """Move the gradients of a microbatch from `.grad` to the sums of this rank."""

    @abstractmethod
    def reduce_bucket(
        self, tree: MicrobatchTree, last: int, parameters: Sequence[Parameter], flat: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the gradients of some parameters over all microbatches and ranks, written to `flat`.

        `flat` are the gradients of `last`, the last microbatch of this rank, in the memory order of the parameters.
        """

    @abstractmethod
    def reduce_accumulated(self, tree: MicrobatchTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        """Return the sum of the accumulated gradients over ranks, as a new flat tensor.

        For batches in which some rank has no samples.
        """

    def reduce_local(self, tree: MicrobatchTree, last: int) -> None:
        """Set `.grad` to the sum over all microbatches, if this rank owns all of them."""
        self.accumulate(tree, last)
        self.set_gradients()

    def set_gradients(self) -> None:
        """Set `.grad` to the accumulated sum over all microbatches."""
        (gradients,) = self._sums.values()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def reduce_vector(self, tree: MicrobatchTree, vectors: Mapping[Node, torch.Tensor], length: int) -> torch.Tensor:
        """Return the sum of float64 vectors of `length`, of microbatches or subtrees, over all ranks.

        In tree order under either reduction: for short vectors, faster than the backend's all-reduce.
        """
        values = {node: [vector] for node, vector in vectors.items()}
        subtree_sums = [vector for (vector,) in self._merge(tree, values, _add_to_right).values()]
        total = subtree_sums[0] if subtree_sums else torch.zeros(length, dtype=torch.float64, device=self._world.device)
        return tree_all_reduce(self._world, tree, subtree_sums, total)

    def set_total(self, tree: MicrobatchTree) -> None:
        """Set `.grad` to the sum of the accumulated gradients over all ranks, and drop them."""
        if self._world.size == 1:
            self.set_gradients()
        else:
            reduce_gradients(self._parameters, partial(self.reduce_accumulated, tree))
        self.clear()

    def clear(self) -> None:
        """Drop accumulated gradients."""
        self._sums = {}

    def _merge(
        self, tree: MicrobatchTree, values: Mapping[Node, Tensors], add: Callable[[Tensors, Tensors], Tensors]
    ) -> dict[Node, Tensors]:
        """Add all pairs of subtrees of this rank of which both operands are available."""
        merged: dict[Node, Tensors] = {}
        for node in tree.cover(self._world.rank, self._world.shares):
            merged |= tree.merge(node, values, add)
        return merged

    def _take_gradients(self) -> Tensors:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def _select(self, node: Node, parameters: Sequence[Parameter]) -> Tensors:
        gradients = self._sums[node]
        return [gradients[self._position[parameter]] for parameter in parameters]


class ExactReduction(Reduction):
    """Sum in one fixed tree over microbatches: the bits do not depend on the number of ranks."""

    def accumulate(self, tree: MicrobatchTree, microbatch: int) -> None:
        # Early addition bounds the memory to one set of gradients per level of the tree. Earlier sums come last: a
        # filler, which has the number of a microbatch, must not replace its gradients.
        leaf, gradients = (microbatch, microbatch + 1), self._take_gradients()
        self._sums = self._merge(tree, {leaf: gradients, **self._sums}, _add_to_left)

    def reduce_bucket(
        self, tree: MicrobatchTree, last: int, parameters: Sequence[Parameter], flat: torch.Tensor
    ) -> torch.Tensor:
        if not self._sums:  # the rank has one microbatch
            return tree_all_reduce(self._world, tree, [flat], flat)
        gradients = unflatten(flat, parameters)
        sums = {node: self._select(node, parameters) for node in self._sums}
        *others, own = self._merge(tree, {**sums, (last, last + 1): gradients}, _add_to_right).values()
        assert own is gradients, "the last microbatch is the right-most, and sums go to the right-hand operand"
        return tree_all_reduce(self._world, tree, [*(flatten(other, parameters) for other in others), flat], flat)

    def reduce_accumulated(self, tree: MicrobatchTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        subtree_sums = [flatten(self._select(node, parameters), parameters) for node in self._sums]
        total = subtree_sums[0] if subtree_sums else flatten([torch.zeros_like(p) for p in parameters], parameters)
        return tree_all_reduce(self._world, tree, subtree_sums, total)


def _add_to_right(left: Tensors, right: Tensors) -> Tensors:
    torch._foreach_add_(right, left)
    return right


def _add_to_left(left: Tensors, right: Tensors) -> Tensors:
    # Addition is commutative: the bits are the same. The right-hand operand is newer, so its memory is in the cache of
    # the processor, for the next gradients.
    torch._foreach_add_(left, right)
    return left
