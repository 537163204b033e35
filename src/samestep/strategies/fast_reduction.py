"""The `fast` reduction, in order of computation, and compression of gradients to 16 bits between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from samestep.config import Reduction as ReductionName
from samestep.config.strategy import Hook
from samestep.distributed.world import World
from samestep.reduce.tree import MicrobatchTree, fast_all_reduce
from samestep.strategies.reduction import ExactReduction, Parameter, Reduction, Tensors, flatten, unflatten

# Sums flat gradients over ranks, in place.
AllReduce = Callable[[torch.Tensor], torch.Tensor]


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
        self._all_reduce = _build_all_reduce(world, hook)

    def accumulate(self, tree: MicrobatchTree, microbatch: int) -> None:
        gradients = self._take_gradients()
        self._add_sums(self._parameters, gradients)
        self._sums = {(0, tree.microbatches): gradients}

    def reduce_bucket(
        self, tree: MicrobatchTree, last: int, parameters: Sequence[Parameter], flat: torch.Tensor
    ) -> torch.Tensor:
        if self._sums:
            self._add_sums(parameters, unflatten(flat, parameters))
        return self._all_reduce(flat)

    def reduce_accumulated(self, tree: MicrobatchTree, parameters: Sequence[Parameter]) -> torch.Tensor:
        sums = [self._select(node, parameters) for node in self._sums]
        gradients = sums[0] if sums else [torch.zeros_like(parameter) for parameter in parameters]
        return self._all_reduce(flatten(gradients, parameters))

    def _add_sums(self, parameters: Sequence[Parameter], gradients: Tensors) -> None:
        for node in self._sums:
            torch._foreach_add_(gradients, self._select(node, parameters))


def _build_all_reduce(world: World, hook: Hook) -> AllReduce:
    if hook == "none" or world.size == 1:
        return lambda total: fast_all_reduce(world, total)
    dtype = torch.float16 if hook == "fp16" else torch.bfloat16
    return lambda total: compressed_all_reduce(world, total, dtype)


_MAX_EXPONENT = 15  # of fp16 sums: the largest fp16 number is just below 2 to the 16
_SCALE_EXPONENTS = (-126, 126)  # of powers of two in float32


def compressed_all_reduce(world: World, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum `total` over ranks in place, with every element rounded to a 16-bit `dtype` for communication.

    The exponent range of fp16 is small: gradients are scaled by a power of two such that the sum of the largest does
    not overflow and as few small ones as possible are lost. Ranks agree on the scale in a message of one number.
    """
    if total.element_size() <= dtype.itemsize or total.numel() == 0:
        return fast_all_reduce(world, total)
    if dtype == torch.float16:
        scale = _common_scale(world, total)
        total.copy_(fast_all_reduce(world, (total * scale).to(dtype)))
        return total.div_(scale)
    return total.copy_(fast_all_reduce(world, total.to(dtype)))


def _common_scale(world: World, total: torch.Tensor) -> torch.Tensor:
    # A maximum over ranks may lose NaN, but not infinity.
    peak = total.abs().amax().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    world.run_collective(lambda: dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=world.group), "an all-reduce")
    exponent = torch.frexp(peak * world.size).exponent
    scale = torch.ldexp(torch.ones_like(peak), (_MAX_EXPONENT - exponent).clamp(*_SCALE_EXPONENTS))
    return torch.where(peak.isfinite() & (peak > 0), scale, 1.0).to(total.dtype)
