"""Batch norm inside of a divided call: statistics of the whole batch.

Ioffe & Szegedy, "Batch Normalization" (2015). Moments of ranks are combined as in Chan, Golub &
LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

Decisions: docs/decisions/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from samestep.reduce.fast import Sums
from samestep.view.crossings import totals
from samestep.view.draws import Arguments, Draws, Options, Rule
from samestep.view.region import Region


class _Moments(NamedTuple):
    """Statistics per channel over all slices."""

    # Values per channel: a number, or a tensor on an accelerator, so that the host does not wait.
    count: Any
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
    others: tuple[Any, ...] = (weight, bias, training, momentum, eps)
    running = (running_mean, running_var)
    if not training:
        return functional.batch_norm(input, *running, *others)
    if region.local_batch_norm:
        return _with_own_statistics(region, input, running, *others)
    update = None
    if id(running_mean) not in region.shared_statistics:
        update = partial(_update, running_mean, running_var, momentum)
    outputs: Tensor = region.exchange.join(
        partial(_normalize, eps=eps), (input, weight, bias, update)
    )
    return outputs


def _with_own_statistics(
    region: Region, input: Tensor, running: Sequence[Tensor | None], *others: Any
) -> Tensor:
    """Normalize by the own rows. Running statistics become means of the slices, by their rows."""
    # Copies: all slices of this rank begin with the same statistics.
    own = [None if values is None else values.clone() for values in running]
    outputs = torch.empty_like(input)
    if input.numel():
        mean, variance = own
        outputs = functional.batch_norm(input, mean, variance, *others)

    def sum_without_graph(sums: Sums, parts: Sequence[Tensor]) -> list[Tensor]:
        return [sums.sum(parts)] * len(parts)

    for whole, values in zip(running, own, strict=True):
        if whole is not None and values is not None:
            share = values.double() * (region.own / region.rows)
            whole.data.copy_(region.exchange.join(sum_without_graph, share))
    return outputs


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))


# Of one slice: inputs, weight and bias, and the update of its running statistics.
_Slice = tuple[Tensor, Tensor | None, Tensor | None, Callable[[_Moments], None] | None]


def _normalize(sums: Sums, slices: Sequence[_Slice], *, eps: float) -> list[Tensor]:
    """Return the outputs of each own slice, in one node."""
    moments = _fast_moments([inputs for inputs, *_ in slices], sums)
    # On CPUs only: a read of the number would wait for an accelerator.
    if isinstance(moments.count, float) and moments.count < 2:
        # The error of torch's own layer.
        text = "Expected more than 1 value per channel when training, got input size"
        raise ValueError(f"{text} {slices[0][0].size()}")
    # Before the node: a checkpoint's recomputation can end as soon as the node has its tensors.
    for *_, update in slices:
        if update is not None:
            update(moments)
    tensors = [tensor for *own, _ in slices for tensor in own]
    return list(_Normalize.apply(moments, eps, sums, *tensors))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _fast_moments(slices: Sequence[Tensor], sums: Sums) -> _Moments:
    """Return moments without a graph: one sum, in float64, which holds squares of float32 means.

    For float64 there are two sums, so that large means do not cancel.
    """
    kind = torch.promote_types(slices[0].dtype, torch.float32)
    channels = slices[0].shape[1]
    counts = [inputs.numel() // channels for inputs in slices]
    own = [_own_moments(inputs, kind, count) for inputs, count in zip(slices, counts, strict=True)]
    means = torch.stack([mean for mean, _ in own]).double()
    squares = torch.stack([variance for _, variance in own]).double().addcmul_(means, means)
    # One message with the number of values, which may differ between ranks.
    messages = torch.cat([means, squares, means.new_ones(len(own), 1)], dim=1)
    pairs = zip(messages.unbind(), counts, strict=True)
    total = sums.sum([message.mul_(count) for message, count in pairs])
    number = _number(total[-1])
    whole, spread, _ = total.div_(number).split([channels, channels, 1])
    if kind == torch.float64:
        spreads = [
            (variance + (mean - whole).square()) * count
            for (mean, variance), count in zip(own, counts, strict=True)
        ]
        spread = sums.sum(spreads).div_(number)
    else:
        # Rounding can leave a difference below zero.
        spread.addcmul_(whole, whole, value=-1).clamp_(min=0)
    return _Moments(number, whole.to(kind), spread.to(kind))


def _number(value: Tensor) -> Any:
    if value.device.type == "cpu":
        return value.item()
    # A copy: the caller divides the memory of this number in place.
    return value.detach().clone()


def _own_moments(inputs: Tensor, kind: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    if not count:
        zeros = inputs.new_zeros(inputs.shape[1], dtype=kind)
        return zeros, zeros
    data = inputs if inputs.is_cuda else inputs.to(kind)  # CPUs return the precision
    if data.is_cuda or data.dim() == 2 or not data.is_contiguous() or data[0, 0].numel() < 64:
        # The kernel of torch's own layer.
        return torch.batch_norm_update_stats(data, None, None, 0.0)
    # That kernel takes four times as long for channels one after another on a CPU.
    mean = _sum_channels(data) / count
    ones = torch.ones_like(mean)
    # Not the function of torch.nn, which refuses an eps of zero in some versions.
    centred = torch.batch_norm(
        data, None, None, mean, ones, False, 0.0, 0.0, torch.backends.cudnn.enabled
    )
    return mean, _sum_channels(centred.square_()) / count


def _sum_channels(values: Tensor) -> Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def _differentiable_moments(slices: Sequence[Tensor], sums: Sums) -> list[_Moments]:
    """Return the moments for use in each slice that is computed here, with a graph."""
    data = [inputs.to(torch.promote_types(inputs.dtype, torch.float32)) for inputs in slices]
    firsts = []
    for values in data:
        own = _sum_channels(values).double()
        count = own.new_full((1,), values.numel() // values.shape[1])
        firsts.append(torch.cat([own, count]))
    all_totals = totals(sums, firsts)
    means = [
        (total[:-1] / total[-1]).to(values.dtype)
        for total, values in zip(all_totals, data, strict=True)
    ]
    seconds = [
        _sum_channels((values - _along_channels(mean, values)).square()).double()
        for values, mean in zip(data, means, strict=True)
    ]
    return [
        _Moments(_number(total[-1]), mean, (squares / total[-1]).to(mean.dtype))
        for total, mean, squares in zip(all_totals, means, totals(sums, seconds), strict=True)
    ]


@torch.no_grad()
def _update(
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, moments: _Moments
) -> None:
    # As torch's kernels, without a new version: a graph of an earlier whole call may hold the
    # statistics.
    if running_mean is not None:
        running_mean.data.lerp_(moments.mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        # As in torch: unbiased here, biased in the forward.
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        running_var.data.lerp_(unbiased.to(running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """Normalize slices by moments of the whole batch; the backward differentiates these, too."""

    @staticmethod
    def forward(
        ctx: Any, moments: _Moments, eps: float, sums: Sums, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors, moments.mean, moments.variance)
        ctx.count = moments.count
        ctx.eps = eps
        ctx.sums = sums
        ctx.types = [None if tensor is None else tensor.dtype for tensor in tensors]
        outputs = []
        for inputs, *affine in _by_slice(tensors):
            if inputs.numel() == 0:
                outputs.append(torch.empty_like(inputs))
                continue
            scale, shift = (
                None if values is None else values.to(moments.mean.dtype) for values in affine
            )
            # In evaluation mode, torch's kernel takes the moments as they are.
            outputs.append(
                functional.batch_norm(
                    inputs, moments.mean, moments.variance, scale, shift, False, 0.0, eps
                )
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compute = _fast_gradients
        if torch.is_grad_enabled():  # `create_graph`: the gradients are differentiated again
            compute = _differentiable_gradients
        collected = [gradient for own in compute(ctx, gradients) for gradient in own]
        needed = ctx.needs_input_grad[3:]
        results: list[Tensor | None] = [None, None, None]
        for gradient, is_needed, dtype in zip(collected, needed, ctx.types, strict=True):
            result = None
            if is_needed and gradient is not None:
                # Gradients of weights have the precision of the moments, at least float32.
                result = gradient.to(dtype)
            results.append(result)
        return tuple(results)


def _by_slice(tensors: Sequence[Any]) -> list[Any]:
    return [tensors[start : start + 3] for start in range(0, len(tensors), 3)]


def _fast_gradients(
    ctx: Any, gradients: Sequence[Tensor]
) -> list[tuple[Tensor | None, Tensor, Tensor]]:
    *tensors, mean, variance = ctx.saved_tensors
    moments = _Moments(ctx.count, mean, variance)
    scale = torch.rsqrt(variance + ctx.eps)
    slices = []
    for (inputs, weight, _), gradient in zip(_by_slice(tensors), gradients, strict=True):
        data, slope = _operands(inputs, gradient, mean.dtype)
        by_weight = by_bias = torch.zeros_like(mean)
        if data.numel():
            by_weight, by_bias = _affine_gradients(data, slope, moments, scale, ctx.eps)
        slices.append((data, slope, weight, by_weight, by_bias))
    # Equal in all slices of all ranks, so that none waits alone in the sum below.
    if not ctx.needs_input_grad[3]:
        return [(None, by_weight, by_bias) for *_, by_weight, by_bias in slices]
    weights = torch.stack([by_weight for *_, by_weight, _ in slices])
    biases = torch.stack([by_bias for *_, by_bias in slices])
    total = ctx.sums.sum(torch.cat([weights, biases], dim=1).double().unbind()).view(2, -1)
    results: list[tuple[Tensor | None, Tensor, Tensor]] = []
    for data, slope, weight, by_weight, by_bias in slices:
        by_inputs = torch.zeros_like(data)
        if data.numel():
            by_inputs = _input_gradients(data, slope, weight, moments, scale, total, ctx.eps)
        results.append((by_inputs, by_weight, by_bias))
    return results


def _operands(inputs: Tensor, gradient: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both as the kernels read them: those of GPUs read halves, and prefer equal strides."""
    if not inputs.is_cuda:
        return inputs.to(kind), gradient.to(kind)
    if gradient.stride() != inputs.stride():
        gradient = torch.empty_like(inputs).copy_(gradient)
    return inputs, gradient


def _affine_gradients(
    data: Tensor, slope: Tensor, moments: _Moments, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of dy * xhat and of dy over the own values; `scale` is 1 / sigma."""
    if data.is_cuda:  # a kernel of torch's SyncBatchNorm
        _, _, by_weight, by_bias = torch.batch_norm_backward_reduce(
            slope, data, moments.mean, scale, torch.ones_like(scale), False, True, True
        )
        return by_weight, by_bias
    # The affine gradients of torch's backward in evaluation, which does not read the weight.
    none = scale.new_empty(0)
    statistics = (moments.mean, moments.mean, moments.variance, none, none)
    _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
        slope, data, *statistics, False, eps, [False, True, True]
    )
    return by_weight, by_bias


def _input_gradients(
    data: Tensor,
    slope: Tensor,
    weight: Tensor | None,
    moments: _Moments,
    scale: Tensor,
    total: Tensor,
    eps: float,
) -> Tensor:
    """Return dx = w / sigma * (dy - xhat * mean(dy * xhat) - mean(dy)).

    `total` has the sums of dy * xhat and of dy over all slices.
    """
    kind = moments.mean.dtype
    if data.is_cuda:  # a kernel of torch's SyncBatchNorm
        factor = torch.ones_like(scale) if weight is None else weight.to(kind)
        dot, shift = total.to(kind).unbind()
        # The kernel adds the counts of a tensor, one of each rank in SyncBatchNorm, and takes the
        # sum of dy * (x - mean) instead of dy * xhat.
        count = moments.count.to(torch.int32).view(1)
        by_inputs: Tensor = torch.batch_norm_backward_elemt(
            slope, data, moments.mean, scale, factor, shift, dot / scale, count
        )
        return by_inputs
    if weight is not None:
        scale = (scale * weight).to(kind)
    # A forward of batch norm computes the last two terms.
    dot, shift = (total.div(moments.count).to(kind) * scale).neg_().unbind()
    by_inputs = functional.batch_norm(
        data, moments.mean, moments.variance, dot, shift, False, 0.0, eps
    )
    return by_inputs.addcmul_(slope, _along_channels(scale, data))


def _differentiable_gradients(
    ctx: Any, gradients: Sequence[Tensor]
) -> list[tuple[Tensor | None, Tensor, Tensor]]:
    *tensors, _, _ = ctx.saved_tensors
    slices = _by_slice(tensors)
    every = _differentiable_moments([inputs for inputs, _, _ in slices], ctx.sums)
    parts = []
    for (inputs, weight, _), gradient, moments in zip(slices, gradients, every, strict=True):
        scale = _along_channels(torch.rsqrt(moments.variance + ctx.eps), inputs)
        normalized = (inputs.to(scale.dtype) - _along_channels(moments.mean, inputs)) * scale
        slope = gradient.to(normalized.dtype)
        by_weight = _sum_channels(slope * normalized)
        parts.append((weight, scale, normalized, slope, by_weight, _sum_channels(slope)))
    if not ctx.needs_input_grad[3]:
        return [(None, by_weight, by_bias) for *_, by_weight, by_bias in parts]
    own_sums = [torch.cat([by_weight, by_bias]).double() for *_, by_weight, by_bias in parts]
    results: list[tuple[Tensor | None, Tensor, Tensor]] = []
    for part, total in zip(parts, totals(ctx.sums, own_sums), strict=True):
        weight, scale, normalized, slope, by_weight, by_bias = part
        mean_of = (total / every[0].count).to(slope.dtype)
        dot, shift = (_along_channels(part, slope) for part in mean_of.chunk(2))
        by_inputs = (slope - normalized * dot - shift) * scale
        if weight is not None:
            by_inputs = by_inputs * _along_channels(weight, slope)
        results.append((by_inputs, by_weight, by_bias))
    return results


def _rule(compute: Callable[..., Tensor]) -> Rule:
    def rule(operations: Draws, function: Any, arguments: Arguments, options: Options) -> Any:
        if operations.region is None:
            return function(*arguments, **options)
        return compute(operations.region, *arguments, **options)

    return rule


BATCH_NORM_RULES: dict[Callable[..., Any], Rule] = {
    functional.batch_norm: _rule(_batch_norm),
    torch.batch_norm: _rule(
        # Another order of arguments; the last one, for cuDNN, is left out.
        lambda region, x, w, b, mean, var, *o: _batch_norm(region, x, mean, var, w, b, *o[:3])
    ),
}
