"""Batch norm by the statistics of the whole global batch, on any device.

The mathematics is that of Ioffe & Szegedy, "Batch Normalization" (2015); moments of shards are put together as in
Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samestep.engine.lockstep import Track
from samestep.engine.meeting import Message
from samestep.errors import InputError

_PLACE = "_samestep_place"


@dataclass(frozen=True)
class Place:
    """A norm layer in the computation of one shard.

    Attributes:
        number: which of the model's norm layers, in the order of its modules.
        name: the model's name for it.
        track: where the shard waits for the others.
    """

    number: int
    name: str
    track: Track


@dataclass(frozen=True)
class Moments:
    """Statistics a channel over all shards, in the precision in which they are used."""

    mean: torch.Tensor
    variance: torch.Tensor
    unbiased: torch.Tensor


def norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norm layers of a model by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def join_layers(model: nn.Module, track: Track) -> None:
    """Have the norm layers of `model`, a replica, use statistics of all the shards that `track` meets.

    Raises:
        InputError: the forward of a layer was replaced.
    """
    for number, (name, layer) in enumerate(norm_layers(model).items()):
        if "forward" in vars(layer):
            raise _own_way(name, layer)
        kind: Any = type(layer)
        layer.__class__ = _joined(kind)
        vars(layer)[_PLACE] = Place(number, name, track)


def joint_batch_norm(
    place: Place,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` in training, with the statistics of all shards that meet at `place`."""
    kind = _statistics_type(input)
    with torch.no_grad():
        count, values = _moments(input, kind)
        combine = partial(_combined, place.name, kind)
        moments: Moments = place.track.meet(Message(place.number, "forward", count, values, combine))
        for running, now in ((running_mean, moments.mean), (running_var, moments.unbiased)):
            if running is not None:
                running.copy_(momentum * now.to(running.dtype) + (1 - momentum) * running)
    outputs: torch.Tensor = _Normalize.apply(input, weight, bias, moments, eps, place)  # type: ignore[no-untyped-call]
    return outputs


class _JoinedCall(TorchFunctionMode):
    """While a norm layer runs, its batch statistics become joint ones; momentum and counters stay the layer's."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is not functional.batch_norm:
            return func(*args, **options)
        self.met = True
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = dict(zip(names, args, strict=False)) | options
        if not given.get("training", False):
            return func(**given)
        del given["training"]
        return joint_batch_norm(self._place, **given)


@cache
def _joined(kind: Any) -> Any:
    """The class of norm layers that meet; a class, since a function put into the layer would make it a cycle."""
    # SyncBatchNorm's own forward refuses CPUs, and would communicate by itself.
    base: Any = _BatchNorm if kind.forward is nn.SyncBatchNorm.forward else kind

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        place: Place = vars(self)[_PLACE]
        if input.shape[1] != self.num_features:
            raise InputError(
                f"the norm layer {place.name!r} of {self.num_features} channels got {input.shape[1]}",
                rule="batch norm has one mean and variance a channel",
                do="build it with the number of channels that it gets",
            )
        with _JoinedCall(place) as call:
            outputs: torch.Tensor = base.forward(self, input)
        if self.training and not call.met:
            raise _own_way(place.name, self)
        return outputs

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _own_way(name: str, layer: nn.Module) -> InputError:
    return InputError(
        f"the norm layer {name!r} ({type(layer).__name__}) normalises in a way of its own",
        rule="under batch_norm: sync a norm layer calls torch.nn.functional.batch_norm",
        do="use torch.nn.BatchNorm1d, 2d or 3d, or set batch_norm: shard",
    )


class _Normalize(torch.autograd.Function):
    """Normalises one shard by moments that depend on all shards; backward meets the other shards again."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        place: Place,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.moments, ctx.eps, ctx.place = moments, eps, place
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
        dot, total = _gradient_sums(data, slope, moments, eps)
        by_weight = dot.to(weight.dtype) if ctx.needs_input_grad[1] else None
        by_bias = total.to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, by_bias, None, None, None
        count = data.numel() // data.shape[1]
        values = torch.cat([dot, total]).double()
        message = Message(ctx.place.number, "backward", count, values, partial(_mean_slopes, kind))
        mean_dot, mean_slope = ctx.place.track.meet(message)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)); batch norm by given moments makes the last two.
        by_input = functional.batch_norm(
            data, moments.mean, moments.variance, -mean_dot, -mean_slope, False, 0.0, eps
        ).add_(slope)
        scale = torch.rsqrt(moments.variance + eps)
        scale = scale if weight is None else scale * weight.to(kind)
        by_input.mul_(_along_channels(scale, data))
        return by_input.to(inputs.dtype), by_weight, by_bias, None, None, None


def _statistics_type(inputs: torch.Tensor) -> torch.dtype:
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def _moments(inputs: torch.Tensor, kind: torch.dtype) -> tuple[int, torch.Tensor]:
    """Values a channel, and their means and sums of squared distances from them, side by side."""
    data = inputs.to(kind)
    count = data.numel() // data.shape[1]
    if count == 0:
        return 0, torch.zeros(2 * data.shape[1], dtype=torch.float64, device=data.device)
    others = [dim for dim in range(data.dim()) if dim != 1]
    mean = data.mean(others)
    centred = data - _along_channels(mean, data)
    return count, torch.cat([mean, centred.square_().sum(others)]).double()


def _combined(name: str, kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> Moments:
    means, squares = values.chunk(2, dim=1)
    count = counts.sum()
    if count <= 1:
        raise InputError(
            f"the norm layer {name!r} gets one value a channel from the whole global batch",
            rule="batch statistics need at least two values a channel",
            do="set a larger batch_size, or one that leaves no single sample for the last batch",
        )
    mean = (counts * means).sum(dim=0) / count
    squares = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
    return Moments(mean.to(kind), (squares / count).to(kind), (squares / (count - 1)).to(kind))


def _gradient_sums(
    data: torch.Tensor, slope: torch.Tensor, moments: Moments, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A channel's sums of dy * xhat and of dy: what torch's backward by given moments calls the affine gradients."""
    ones = torch.ones_like(moments.mean)
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        slope, data, ones, moments.mean, moments.variance, None, None, False, eps, [False, True, True]
    )
    return dot, total


def _mean_slopes(kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dot, total = (values.sum(dim=0) / counts.sum()).to(kind).chunk(2)
    return dot, total


def _along_channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))
