"""Gradients that travel in 16 bits: half the bytes, and equal to rounding of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from samestep.parallel.exchange import plain_sum
from samestep.runtime.world import World

_LARGEST = 15  # the exponent below which sums stay: the largest number of fp16 is just below 2 to the 16
_EXPONENTS = (-126, 126)  # of the powers of two that 32 bits hold


def rounded_sum(world: World, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The backend's all-reduce of `total`, in place, with every number rounded to `dtype` on its way.

    fp16 has few exponents: gradients are scaled by a power of two such that the sum of the largest does not overflow,
    and as few as possible of the small ones are lost. The ranks agree on it in a message of one number.
    """
    if total.element_size() <= dtype.itemsize or total.numel() == 0:
        return plain_sum(world, total)
    if dtype == torch.float16:
        scale = _common_scale(world, total)
        total.copy_(plain_sum(world, (total * scale).to(dtype)))
        return total.div_(scale)
    return total.copy_(plain_sum(world, total.to(dtype)))


def _common_scale(world: World, total: torch.Tensor) -> torch.Tensor:
    # A maximum over ranks may lose what is not a number, but not what is infinite.
    peak = total.abs().amax().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    world.guarded(lambda: dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=world.group), "an all-reduce")
    exponent = torch.frexp(peak * world.size).exponent
    scale = torch.ldexp(torch.ones_like(peak), (_LARGEST - exponent).clamp(*_EXPONENTS))
    return torch.where(peak.isfinite() & (peak > 0), scale, 1.0).to(total.dtype)
