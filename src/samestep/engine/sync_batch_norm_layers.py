"""Batch norm layers with statistics of the whole global batch, on any device.

Ioffe & Szegedy, "Batch Normalization" (2015). Moments of microbatches are combined as in Chan, Golub & LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samestep.engine.statistics_exchange import Exchanging, Message
from samestep.errors import InputError

_POSITION = "_samestep_position"


class LayerPosition(NamedTuple):
    """Norm layer in the computation of one microbatch."""

    number: int  # among the model's norm layers
    name: str
    microbatch: Exchanging


class Moments(NamedTuple):
    """Statistics per channel over all microbatches, in the precision of their use."""

    mean: torch.Tensor
    variance: torch.Tensor
    unbiased: torch.Tensor


def norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers of a model by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


@contextmanager
def synchronized_layers(model: nn.Module, microbatch: Exchanging) -> Iterator[None]:
    """Make the norm layers of `model` use statistics of all microbatches; `microbatch` is that of the model.

    Raises:
        InputError: the forward of a layer was replaced.
    """
    layers = norm_layers(model)
    kinds: dict[str, Any] = {name: type(layer) for name, layer in layers.items()}
    try:
        for number, (name, layer) in enumerate(layers.items()):
            if "forward" in vars(layer):
                raise _unsupported_layer(name, layer)
            layer.__class__ = _synchronized_class(kinds[name])
            vars(layer)[_POSITION] = LayerPosition(number, name, microbatch)
        yield
    finally:
        for name, layer in layers.items():
            layer.__class__ = kinds[name]
            vars(layer).pop(_POSITION, None)


def sync_batch_norm(
    position: LayerPosition,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` with statistics of all microbatches in training."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    kind = torch.float64 if input.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        count, values = _moments(input, kind)
        combine = partial(_combine_moments, kind)
        moments: Moments = position.microbatch.exchange(Message(position.number, "forward", count, values, combine))
        for running, now in ((running_mean, moments.mean), (running_var, moments.unbiased)):
            if running is not None:
                running.copy_(momentum * now.to(running.dtype) + (1 - momentum) * running)
    outputs: torch.Tensor = _Normalize.apply(input, weight, bias, moments, eps, position)  # type: ignore[no-untyped-call]
    return outputs


class _SyncBatchNormMode(TorchFunctionMode):
    """Replace the batch statistics of a norm layer's forward; momentum and counters stay the layer's."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self._position = position
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        return sync_batch_norm(self._position, *args, **(kwargs or {}))


@cache
def _synchronized_class(kind: Any) -> Any:
    """Return the synchronized subclass of a norm layer's class.

    A subclass, because a function assigned to the layer would create a reference cycle.
    """
    # SyncBatchNorm's forward raises on CPUs, and communicates by itself.
    base: Any = _BatchNorm if kind.forward is nn.SyncBatchNorm.forward else kind

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        position: LayerPosition = vars(self)[_POSITION]
        if input.shape[1] != self.num_features:
            raise InputError(
                f"the norm layer {position.name!r} of {self.num_features} channels received {input.shape[1]}",
                expected="batch norm has one mean and variance per channel",
                fix="construct the layer with the number of channels of its input",
                code="E_NORM_LAYER",
            )
        with _SyncBatchNormMode(position) as mode:
            outputs: torch.Tensor = base.forward(self, input)
        if self.training and not mode.called:
            raise _unsupported_layer(position.name, self)
        return outputs

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _unsupported_layer(name: str, layer: nn.Module) -> InputError:
    return InputError(
        f"the norm layer {name!r} ({type(layer).__name__}) does not call torch's batch norm",
        expected="under batch_norm: sync norm layers call torch.nn.functional.batch_norm",
        fix="use torch.nn.BatchNorm1d, 2d or 3d, or set batch_norm: microbatch",
        code="E_NORM_LAYER",
    )


class _Normalize(torch.autograd.Function):
    """Normalise one microbatch by the moments of all microbatches; the backward exchanges sums of gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        position: LayerPosition,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.moments, ctx.eps, ctx.position = moments, eps, position
        ctx.bias_type = None if bias is None else bias.dtype
        kind = moments.mean.dtype
        scale, shift = (None if affine is None else affine.to(kind) for affine in (weight, bias))
        return functional.batch_norm(inputs, moments.mean, moments.variance, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        moments, eps, kind = ctx.moments, ctx.eps, ctx.moments.mean.dtype
        data, slope = inputs.to(kind), gradient.to(kind)
        # Sums of dy * xhat and of dy per channel: the affine gradients of torch's backward with fixed moments.
        mean, variance, ones = moments.mean, moments.variance, torch.ones_like(moments.mean)
        none = mean.new_empty(0)  # CUDA's kernel without a gradient of the inputs refuses None; both are not read
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            slope, data, ones, mean, variance, none, none, False, eps, [False, True, True]
        )
        by_weight = dot.to(weight.dtype) if ctx.needs_input_grad[1] else None
        by_bias = total.to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, by_bias, None, None, None
        count = data.numel() // data.shape[1]
        values = torch.cat([dot, total]).double()
        message = Message(ctx.position.number, "backward", count, values, partial(_mean_slopes, kind))
        mean_dot, mean_slope = ctx.position.microbatch.exchange(message)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)); batch norm with fixed moments computes the last two
        # terms.
        by_input = functional.batch_norm(data, mean, variance, -mean_dot, -mean_slope, False, 0.0, eps).add_(slope)
        scale = torch.rsqrt(variance + eps)
        scale = scale if weight is None else scale * weight.to(kind)
        by_input.mul_(_along_channels(scale, data))
        return by_input.to(inputs.dtype), by_weight, by_bias, None, None, None


def _moments(inputs: torch.Tensor, kind: torch.dtype) -> tuple[int, torch.Tensor]:
    """Return the number of values per channel, and means and sums of squared deviations, concatenated."""
    data = inputs.to(kind)
    count = data.numel() // data.shape[1]
    if count == 0:
        return 0, torch.zeros(2 * data.shape[1], dtype=torch.float64, device=data.device)
    others = [dim for dim in range(data.dim()) if dim != 1]
    mean = data.mean(others)
    centred = data - _along_channels(mean, data)
    return count, torch.cat([mean, centred.square_().sum(others)]).double()


def _combine_moments(kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> Moments:
    means, squares = values.chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    squares = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
    return Moments(mean.to(kind), (squares / count).to(kind), (squares / (count - 1)).to(kind))


def _mean_slopes(kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dot, total = (values.sum(dim=0) / counts.sum()).to(kind).chunk(2)
    return dot, total


def _along_channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))
