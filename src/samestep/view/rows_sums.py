"""Rules of Rows for sums over the rows, and for torch's losses: parts of the own rows, added over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.crossings import RowBounds, crossing
from samestep.view.rows_dimensions import along, argument_of, is_inner, largest, views
from samestep.view.rows_elementwise import as_rows, entered, leading, named, own_part
from samestep.view.rows_tensor import Rows, Rule, cut_own, enter_own, own_rows, set_operation

Function = Callable[..., Any]
_HALVES = (torch.float16, torch.bfloat16)


def total(part: Tensor, bounds: RowBounds, count: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the sum of a part over ranks, differentiable, and that of a count, in one message.

    Args:
        part: own part of a sum.
        bounds: rows that the ranks hold.
        count: a number.
    """
    counts: list[Tensor] = []

    def add(value: Tensor) -> Tensor:
        if count is None:
            return bounds.ranks.sum([value])
        both = bounds.ranks.sum([torch.stack([value.double(), count.double()])])
        counts.append(both[1].to(value.dtype))
        return both[0].to(value.dtype)

    if part.requires_grad and torch.is_grad_enabled():
        summed = crossing([part], lambda value: [add(value)], lambda gradient: [enter_own(gradient, bounds)])[0]
    else:
        summed = add(part)
    return summed, counts[0] if counts else None


def added(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`sum` and `mean`."""
    if not arguments or options.get("out") is not None:
        return NotImplemented
    rows = arguments[0]
    dimension = argument_of(arguments, options, 1, "dim", "axis")
    if is_inner(dimension, rows._rows_own.dim()):
        return views(function, arguments, options)
    if dimension is not None and (isinstance(dimension, bool) or not isinstance(dimension, int | tuple | list)):
        return NotImplemented
    dtype = options.get("dtype") or rows._rows_own.dtype
    is_mean = function in (torch.mean, Tensor.mean)
    if is_mean and not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented
    set_operation(rows, function.__name__)
    others = dict(options)
    if dtype in _HALVES:
        others["dtype"] = torch.float32
    part = torch.sum(own_rows(rows), *arguments[1:], **others)
    summed, _ = total(part, rows._rows_bounds)
    if is_mean:
        sizes = (rows._rows_bounds.rows, *rows._rows_own.shape[1:])
        summed = summed / math.prod(sizes[one] for one in _reduced(dimension, len(sizes)))
    return summed.to(dtype) if dtype in _HALVES else summed


def _reduced(dimension: Any, count: int) -> list[int]:
    if dimension is None or (isinstance(dimension, tuple | list) and not dimension):
        return list(range(count))
    return [one % count for one in (dimension if isinstance(dimension, tuple | list) else (dimension,))]


def counted(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`any`, `all` and `count_nonzero` of all elements."""
    if len(arguments) != 1 or options:
        return along()(function, arguments, options)
    rows = arguments[0]
    set_operation(rows, function.__name__)
    own = function(own_rows(rows))
    summed = rows._rows_bounds.ranks.sum([own.long()])
    if function in (torch.count_nonzero, Tensor.count_nonzero):
        return summed
    needed = 1 if function in (torch.any, Tensor.any) else rows._rows_bounds.ranks.size
    return (summed >= needed).to(own.dtype)


def extreme(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`max` and `min`; the gradient of that of all elements needs all of them."""
    if len(arguments) != 1 or options:
        return largest(function, arguments, options)
    rows = arguments[0]
    own = own_rows(rows)
    ranks = rows._rows_bounds.ranks
    if (own.requires_grad and torch.is_grad_enabled()) or own.numel() == 0:
        return NotImplemented
    set_operation(rows, function.__name__)
    every = torch.zeros(ranks.size, dtype=own.dtype, device=own.device)
    every[ranks.rank] = function(own)
    # Bits are added to zeros, so that special values stay.
    bits = every.view(torch.uint8).to(torch.int32)
    return function(ranks.sum([bits]).to(torch.uint8).view(own.dtype))


def bincount(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Counts of integers, of which at least `minlength` are given."""
    rows = arguments[0]
    if len(arguments) != 1 or options.keys() - {"minlength"} or not options.get("minlength"):
        return NotImplemented
    set_operation(rows, function.__name__)
    bounds = rows._rows_bounds
    own = function(own_rows(rows), **options)
    length = int(extreme(torch.max, (Rows(own.new_full((bounds.stop - bounds.start,), len(own)), bounds),), {}))
    return bounds.ranks.sum([functional.pad(own, (0, length - len(own)))])


# --- losses ---------------------------------------------------------------------------------------

Count = Callable[[Sequence[Tensor], Mapping[str, Any], int], Tensor | int]


def _elements(operands: Sequence[Tensor], options: Mapping[str, Any], rows: int) -> int:
    """Return the number of elements; `operands` are own rows."""
    return rows * math.prod(operands[0].shape[1:])


def _samples(operands: Sequence[Tensor], options: Mapping[str, Any], rows: int) -> int:
    return rows


def _targets(operands: Sequence[Tensor], options: Mapping[str, Any], rows: int) -> Tensor | int:
    """Return the own number of targets that are not ignored, or the sum of their weights."""
    _, target = operands
    weight = options.get("weight")
    if target.is_floating_point():
        return rows * math.prod(target.shape[2:])
    is_kept = target != options.get("ignore_index", -100)
    if weight is None:
        return torch.sum(is_kept)
    return torch.sum(weight.detach()[target[is_kept]])


def loss(tensors: int, count: Count, weights: Sequence[str] = (), *, is_broadcast: bool = False) -> Rule:
    """Return the rule of a loss.

    Args:
        tensors: number of its operands with rows.
        count: divisor of the mean; a tensor is the own part of it.
        weights: names of further tensors, for classes.
        is_broadcast: further tensors `weight` and `pos_weight` are broadcast to the operands.
    """

    def rule(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        operands = arguments[:tensors]
        if len(arguments) == tensors + 1 and weights:
            options = {**options, "weight": arguments[tensors]}
            arguments = operands
        lead = _lead_of_loss(arguments, options, tensors)
        reduction = options.get("reduction", "mean")
        if lead is None or reduction not in ("mean", "sum", "none", "batchmean"):
            return NotImplemented
        bounds = lead._rows_bounds
        own = [own_rows(one) if type(one) is Rows else cut_own(one, bounds) for one in operands]
        if count is _elements and any(operand.shape != own[0].shape for operand in own):
            return NotImplemented
        others = dict(options)
        for name in ("weight", "pos_weight"):
            value = options.get(name)
            if isinstance(value, Tensor):
                if is_broadcast and leading((lead, value)) is None:
                    return NotImplemented
                others[name] = own_part(value, lead) if is_broadcast else entered(value, bounds)
        if reduction == "none":
            return as_rows(function(*own, **others), bounds)
        set_operation(lead, function.__name__)
        return _reduced_loss(function, own, others, bounds, count if reduction == "mean" else None)

    return rule


def _lead_of_loss(arguments: Sequence[Any], options: Mapping[str, Any], tensors: int) -> Rows | None:
    """Return the first Rows if the operands have rows alike, and nothing else does."""
    if len(arguments) != tensors or options.get("size_average") is not None or options.get("reduce") is not None:
        return None
    lead: Rows | None = None
    for operand in arguments:
        if type(operand) is Rows:
            if lead is None:
                lead = operand
            elif not operand._rows_bounds.is_equal(lead._rows_bounds):
                return None
    if lead is None:
        return None
    rows = lead._rows_bounds.rows
    for operand in arguments:
        if type(operand) is Rows:
            continue
        if not isinstance(operand, Tensor) or operand.dim() == 0 or operand.shape[0] != rows:
            return None
    return lead


def _reduced_loss(
    function: Function, own: Sequence[Tensor], options: dict[str, Any], bounds: RowBounds, count: Count | None
) -> Tensor:
    dtype = own[0].dtype
    number: Tensor | int | None = None
    reduction = options.get("reduction", "mean")
    if count is not None:
        number = count(own, options, bounds.rows)
    elif reduction == "batchmean":
        number = bounds.rows
    is_half = dtype in _HALVES
    options["reduction"] = "none" if is_half else "sum"  # a sum of halves may overflow where their mean does not
    part = function(*own, **options)
    if is_half:
        dtype = part.dtype
        part = part.sum(dtype=torch.float32)
    if isinstance(number, Tensor):
        summed, number = total(part, bounds, number)
    else:
        summed, _ = total(part, bounds)
    if number is not None:
        summed = summed / number
    return summed.to(dtype) if is_half else summed


_ELEMENT_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss"
SUM_RULES: dict[Any, Rule] = {
    **named("sum mean", added),
    **named("any all count_nonzero", counted),
    **named("max min", extreme),
    **named("bincount", bincount),
}
LOSS_RULES: dict[Any, Rule] = {
    functional.cross_entropy: loss(2, _targets, ("weight",)),
    functional.nll_loss: loss(2, _targets, ("weight",)),
    functional.binary_cross_entropy: loss(2, _elements, is_broadcast=True),
    functional.binary_cross_entropy_with_logits: loss(2, _elements, is_broadcast=True),
    **{getattr(functional, name): loss(2, _elements) for name in _ELEMENT_LOSSES.split()},
    functional.hinge_embedding_loss: loss(2, _elements),
    functional.margin_ranking_loss: loss(3, _elements),
    functional.triplet_margin_loss: loss(3, _samples),
    functional.cosine_embedding_loss: loss(3, _samples),
    functional.multi_margin_loss: loss(2, _samples, ("weight",)),
    functional.multilabel_margin_loss: loss(2, _samples),
    functional.multilabel_soft_margin_loss: loss(2, _samples, ("weight",)),
}
