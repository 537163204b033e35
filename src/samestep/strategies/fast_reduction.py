"""The `fast` reduction, in order of computation, and compression of gradients between ranks: PowerSGD and 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from samestep.config import Reduction as ReductionName
from samestep.config.strategy import Hook
from samestep.distributed.world import World
from samestep.strategies.reduction import (
    ExactReduction,
    MicrobatchTree,
    Parameter,
    Reduction,
    Tensors,
    fast_all_reduce,
    flatten,
    unflatten,
)

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


_RANK = 4
_MIN_RATIO = 2  # matrices with a lower compression ratio are not compressed
_MAX_EXPONENT = 15  # of fp16 sums: the largest fp16 number is just below 2 to the 16
_SCALE_EXPONENTS = (-126, 126)  # of powers of two in float32


class PowerSGD:
    """Approximate all-reduce of a low-rank factorization of each matrix.

    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
    (2019). Implemented here because torch's hook averages, sums in its own threads and uses the process's random
    generator.

    Each rank adds the approximation error to its gradient of the next step. Errors and right factors differ between
    ranks and are not part of a checkpoint.
    """

    def __init__(self, world: World, parameters: Sequence[Parameter]) -> None:
        self._world = world
        self._seeds = {parameter: number for number, parameter in enumerate(parameters)}
        self._errors: dict[Parameter, torch.Tensor] = {}
        self._rights: dict[Parameter, torch.Tensor] = {}

    def __call__(self, parameters: Sequence[Parameter], total: torch.Tensor) -> torch.Tensor:
        """Replace the gradients of `parameters` in the flat tensor `total` by their approximate sum over ranks."""
        gradients = dict(zip(parameters, unflatten(total, parameters), strict=True))
        compressed = [parameter for parameter in parameters if is_compressible(parameter)]
        matrices = {p: gradients[p].reshape(p.shape[0], -1) + self._errors.get(p, 0) for p in compressed}
        uncompressed = [gradients[parameter] for parameter in parameters if parameter not in matrices]
        sums = self._all_reduce([*(matrices[p] @ self._right(p) for p in compressed), *uncompressed])
        for gradient, value in zip(uncompressed, sums[len(compressed) :], strict=True):
            gradient.copy_(value)
        lefts = [torch.linalg.qr(left).Q for left in sums[: len(compressed)]]
        own_rights = [matrices[p].T @ left for p, left in zip(compressed, lefts, strict=True)]
        rights = self._all_reduce([right.clone() for right in own_rights])
        # Sums are equal on every rank: either all ranks update their state, or none does.
        is_finite = torch.stack([value.isfinite().all() for value in [*sums, *rights]]).all()
        for p, left, own, right in zip(compressed, lefts, own_rights, rights, strict=True):
            gradients[p].copy_((left @ right.T).view(p.shape))
            error = self._errors.get(p, torch.zeros_like(matrices[p]))
            self._errors[p] = torch.where(is_finite, matrices[p] - left @ own.T, error)
            self._rights[p] = torch.where(is_finite, right, self._right(p))
        return total

    def _all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum of each tensor over ranks; one message for all tensors."""
        if not tensors:
            return []
        message = flatten(tensors, tensors)
        self._world.all_reduce(message)
        return unflatten(message, tensors)

    def _right(self, parameter: Parameter) -> torch.Tensor:
        if parameter not in self._rights:
            # A separate generator, with equal seeds on every rank: the model's random draws do not change.
            generator = torch.Generator().manual_seed(self._seeds[parameter])
            columns = parameter.numel() // parameter.shape[0]
            values = torch.randn(columns, _RANK, generator=generator, dtype=torch.float64)
            self._rights[parameter] = values.to(parameter)
        return self._rights[parameter]


def is_compressible(parameter: torch.Tensor) -> bool:
    """Return whether PowerSGD factorizes the gradient of a parameter."""
    if parameter.dim() < 2 or parameter.numel() == 0 or parameter.element_size() < 4:
        return False
    rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    return _MIN_RATIO * _RANK * (rows + columns) < rows * columns


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
