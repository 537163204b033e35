"""The `fast` reduction, in order of computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samestep.config import Reduction as ReductionName
from samestep.config.strategy import Hook
from samestep.distributed.world import World
from samestep.strategies.buckets import flatten, unflatten
from samestep.strategies.compression import PowerSGD, compressed_all_reduce
from samestep.strategies.reduction import ExactReduction, MicrobatchTree, Parameter, Reduction, Tensors, fast_all_reduce

# Sums the flat gradients of some parameters over ranks, in place.
AllReduce = Callable[[Sequence[Parameter], torch.Tensor], torch.Tensor]


def build_reduction(
    name: ReductionName, world: World, parameters: Sequence[Parameter], hook: Hook = "none"
) -> Reduction:
    """Return the reduction of a recipe. With gradient compression between ranks, no order of summation is exact."""
    if name == "fast" or (hook != "none" and world.size > 1):
        return FastReduction(world, parameters, hook)
    return ExactReduction(world, parameters)


class FastReduction(Reduction):
    """Sum in order of computation: over a rank's microbatches, then over ranks by the backend or `hook`."""

    def __init__(self, world: World, parameters: Sequence[Parameter], hook: Hook = "none") -> None:
        super().__init__(world, parameters)
        self._all_reduce = _build_all_reduce(world, parameters, hook)

    def accumulate(self, tree: MicrobatchTree, microbatch: int) -> None:
        gradients = self._take_gradients()
        self._add_sums(self._parameters, gradients)
        self._sums = {(0, tree.microbatches): gradients}

    def reduce_bucket(
        self, tree: MicrobatchTree, last: int, parameters: Sequence[Parameter], flat: torch.Tensor
    ) -> torch.Tensor:
        if self._sums:
            self._add_sums(parameters, unflatten(flat, parameters))
        return self._all_reduce(parameters, flat)

    def reduce_accumulated(self, tree: MicrobatchTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        sums = [self._select(node, parameters) for node in self._sums]
        gradients = sums[0] if sums else [torch.zeros_like(parameter) for parameter in parameters]
        return self._all_reduce(parameters, flatten(gradients, parameters))

    def _add_sums(self, parameters: Sequence[Parameter], gradients: Tensors) -> None:
        for node in self._sums:
            torch._foreach_add_(gradients, self._select(node, parameters))


def _build_all_reduce(world: World, parameters: Sequence[Parameter], hook: Hook) -> AllReduce:
    if hook == "none" or world.size == 1:
        return lambda _, total: fast_all_reduce(world, total)
    if hook == "powersgd":
        return PowerSGD(world, parameters)
    dtype = torch.float16 if hook == "fp16" else torch.bfloat16
    return lambda _, total: compressed_all_reduce(world, total, dtype)
