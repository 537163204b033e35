"""Batch norm and instance norm inside of a divided call: statistics of the whole batch.

Ioffe & Szegedy, "Batch Normalization" (2015). Moments of ranks are combined as in Chan, Golub & LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.region import Exchange, Region

if TYPE_CHECKING:
    from samestep.view.operations import Operations, Rule


class _Moments(NamedTuple):
    """Statistics per channel over all ranks. Those of differentiable formulas have a graph."""

    count: Any  # values per channel: a number, or a tensor on an accelerator, so that the host does not wait
    mean: Tensor
    variance: Tensor  # biased


def _batch_norm(
    region: Region,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `torch.nn.functional.batch_norm`; in training with the statistics of the whole batch."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    exchange = region.exchange
    if region.local_batch_norm:
        own = partial(functional.batch_norm, weight=weight, bias=bias, training=True, momentum=momentum, eps=eps)
        return _with_own_statistics(own, region, input, (running_mean, running_var))
    if exchange.joins_graph:
        moments = _differentiable_moments(input, exchange)
    else:
        moments = _fast_moments(input, exchange)
    if isinstance(moments.count, float) and moments.count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    _update(running_mean, running_var, moments, momentum)
    if exchange.joins_graph:
        outputs = _normalized(input, moments, eps)
        outputs = outputs if weight is None else outputs * _along_channels(weight, outputs)
        return (outputs if bias is None else outputs + _along_channels(bias, outputs)).to(input.dtype)
    return _Normalize.apply(input, weight, bias, moments, eps, exchange)  # type: ignore[no-any-return,no-untyped-call]


def _instance_norm(
    region: Region,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *others: Any,
    **options: Any,
) -> Tensor:
    """Compute `torch.nn.functional.instance_norm`; running statistics are the means over all rows."""
    function: Callable[..., Tensor] = functional.instance_norm
    uses_input = options.get("use_input_stats", [*others[2:3], True][0])
    if not uses_input or running_mean is None:
        return function(input, running_mean, running_var, *others, **options)
    return _with_own_statistics(partial(function, **options), region, input, (running_mean, running_var), *others)


def _with_own_statistics(
    function: Callable[..., Tensor], region: Region, input: Tensor, running: Sequence[Tensor | None], *others: Any
) -> Tensor:
    """Normalize by the own rows. Running statistics become the means of all ranks', weighted by their rows."""
    own = [None if values is None else values.clone() for values in running]
    outputs = function(input, *own, *others) if input.numel() else torch.empty_like(input)
    for whole, values in zip(running, own, strict=True):
        if whole is not None and values is not None:
            share = values.double() * (region.own / region.rows)
            exchange = region.exchange
            whole.data.copy_(exchange.total(share) if exchange.joins_graph else exchange.sum(share))
    return outputs


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))


@torch.no_grad()
def _fast_moments(inputs: Tensor, exchange: Exchange) -> _Moments:
    """Return moments without a graph: one exchange, in float64, which holds squares of float32 means.

    For float64 there are two exchanges, so that large means do not cancel.
    """
    kind = torch.promote_types(inputs.dtype, torch.float32)
    channels = inputs.shape[1]
    count = inputs.numel() // channels
    mean = variance = inputs.new_zeros(channels, dtype=kind)
    if count:
        mean, variance = _own_moments(inputs if inputs.is_cuda else inputs.to(kind), count)  # CPUs return the precision
    message = torch.cat([mean, variance, mean.new_ones(1)]).double()
    first, second, _ = message.split([channels, channels, 1])
    second.addcmul_(first, first)
    total = exchange.sum(message.mul_(count))
    number = _number(total[-1])
    whole, spread, _ = total.div_(number).split([channels, channels, 1])
    if kind == torch.float64:
        spread = exchange.sum((variance + (mean - whole).square()) * count).div_(number)
    else:
        spread.addcmul_(whole, whole, value=-1).clamp_(min=0)
    return _Moments(number, whole.to(kind), spread.to(kind))


def _number(value: Tensor) -> Any:
    return value.item() if value.device.type == "cpu" else value.detach().clone()


def _own_moments(data: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return means and variances of the own values."""
    if data.is_cuda or data.dim() == 2 or not data.is_contiguous() or data[0, 0].numel() < 64:
        return torch.batch_norm_update_stats(data, None, None, 0.0)  # the kernel of torch's own layer
    # That kernel takes four times as long for channels one after another on a CPU.
    mean = _sum_channels(data) / count
    centred = functional.batch_norm(data, mean, torch.ones_like(mean), eps=0.0)
    return mean, _sum_channels(centred.square_()) / count


def _sum_channels(values: Tensor) -> Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def _differentiable_moments(inputs: Tensor, exchange: Exchange) -> _Moments:
    data = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    sums = _sum_channels(data).double()
    total = exchange.total(torch.cat([sums, sums.new_full((1,), data.numel() // data.shape[1])]))
    mean = (total[:-1] / total[-1]).to(data.dtype)
    squares = exchange.total(_sum_channels((data - _along_channels(mean, data)).square()).double())
    return _Moments(_number(total[-1]), mean, (squares / total[-1]).to(data.dtype))


@torch.no_grad()
def _update(running_mean: Tensor | None, running_var: Tensor | None, moments: _Moments, momentum: float) -> None:
    # As torch's kernels, without a new version: a graph of an earlier whole call may hold the statistics.
    if running_mean is not None:
        running_mean.data.lerp_(moments.mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        running_var.data.lerp_(unbiased.to(running_var.dtype), momentum)


def _normalized(inputs: Tensor, moments: _Moments, eps: float) -> Tensor:
    scale = torch.rsqrt(moments.variance + eps)
    return (inputs.to(scale.dtype) - _along_channels(moments.mean, inputs)) * _along_channels(scale, inputs)


class _Normalize(torch.autograd.Function):
    """Normalize the own rows by given moments of the whole batch; the backward differentiates the moments, too."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
        exchange: Any,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, moments.mean, moments.variance)
        ctx.count, ctx.eps, ctx.exchange = moments.count, eps, exchange
        ctx.weight_type, ctx.bias_type = (None if values is None else values.dtype for values in (weight, bias))
        if inputs.numel() == 0:
            return torch.empty_like(inputs)
        scale, shift = (None if values is None else values.to(moments.mean.dtype) for values in (weight, bias))
        return functional.batch_norm(inputs, moments.mean, moments.variance, scale, shift, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # `create_graph`: the gradients are differentiated again
            by_inputs, by_weight, by_bias = _differentiable_gradients(ctx, gradient)
        else:
            by_inputs, by_weight, by_bias = _fast_gradients(ctx, gradient)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight_gradient = by_weight.to(ctx.weight_type) if needs_weight else None
        bias_gradient = by_bias.to(ctx.bias_type) if needs_bias else None
        return by_inputs, weight_gradient, bias_gradient, None, None, None


def _fast_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    inputs, weight, mean, variance = ctx.saved_tensors
    kind = mean.dtype
    data, slope = inputs.to(kind), gradient.to(kind)
    by_weight = by_bias = torch.zeros_like(mean)
    if data.numel():  # sums of dy * xhat and of dy: the affine gradients of torch's backward in evaluation
        none = mean.new_empty(0)  # not read, nor is the weight; CUDA's kernel refuses None
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            slope, data, mean, mean, variance, none, none, False, ctx.eps, [False, True, True]
        )
    if not ctx.needs_input_grad[0]:
        return None, by_weight, by_bias
    sums = ctx.exchange.sum(torch.cat([by_weight, by_bias]).double()).div_(ctx.count).to(kind)
    if data.numel() == 0:
        return torch.zeros_like(inputs), by_weight, by_bias
    # dx = w / sigma * (dy - xhat * mean(dy * xhat) - mean(dy)); the kernel of batch norm computes the last two terms.
    scale = torch.rsqrt(variance + ctx.eps)
    if weight is not None:
        scale.mul_(weight)
    dot, total = (sums.view(2, -1) * scale).neg_().unbind()
    by_inputs = functional.batch_norm(data, mean, variance, dot, total, False, 0.0, ctx.eps)
    by_inputs.addcmul_(slope, _along_channels(scale, data))
    return by_inputs.to(inputs.dtype), by_weight, by_bias


def _differentiable_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    inputs, weight, *_ = ctx.saved_tensors
    moments = _differentiable_moments(inputs, ctx.exchange)
    normalized = _normalized(inputs, moments, ctx.eps)
    slope = gradient.to(normalized.dtype)
    by_weight, by_bias = _sum_channels(slope * normalized), _sum_channels(slope)
    if not ctx.needs_input_grad[0]:
        return None, by_weight, by_bias
    sums = ctx.exchange.total(torch.cat([by_weight, by_bias]).double()) / moments.count
    dot, total = (_along_channels(part, slope) for part in sums.to(slope.dtype).chunk(2))
    scale = _along_channels(torch.rsqrt(moments.variance + ctx.eps), slope)
    by_inputs = (slope - normalized * dot - total) * scale
    if weight is not None:
        by_inputs = by_inputs * _along_channels(weight, slope)
    return by_inputs.to(inputs.dtype), by_weight, by_bias


def _rule(compute: Callable[..., Tensor]) -> Rule:
    def rule(operations: Operations, function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if operations.region is None:
            return function(*arguments, **options)
        return compute(operations.region, *arguments, **options)

    return rule


BATCH_NORM_RULES: dict[Callable[..., Any], Rule] = {
    functional.batch_norm: _rule(_batch_norm),
    torch.batch_norm: _rule(lambda region, x, w, b, mean, var, *o: _batch_norm(region, x, mean, var, w, b, *o[:3])),
    functional.instance_norm: _rule(_instance_norm),
}
