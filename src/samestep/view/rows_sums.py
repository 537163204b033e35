"""Rules of Rows for sums over the rows, and for torch's losses: parts of the own rows, added over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.crossings import leave
from samestep.view.losses import CLASS_LOSSES, arguments_of, divisor, mean
from samestep.view.rows_rules import (
    as_rows,
    extremes,
    inner,
    is_inner,
    leading,
    named,
    of_own,
    own_part,
    values_at,
)
from samestep.view.rows_tensor import Rows, Rule, cut_own, is_apart, on_all_rows, set_operation

Function = Callable[..., Any]


def total(function: Function, part: Tensor, rows: Rows) -> Tensor:
    """Return the sum of the parts of all ranks for a function of Rows."""
    set_operation(rows, function)
    return leave([part], rows._rows_bounds.ranks)


def _share(rows: Rows) -> float:
    """Return the part of the own rows in all of them: the weight of their mean."""
    return rows._rows_own.shape[0] / rows._rows_bounds.rows


def added(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`sum` and `mean`."""
    rows: Any = arguments[0] if arguments else None
    if not is_apart(rows) or "out" in options:
        return NotImplemented
    part = of_own(function, rows, arguments, options)
    if is_inner(values_at(arguments, options, 1, 2, "dim", "axis"), rows._rows_own.dim()):
        return as_rows(part, rows)
    if function in (torch.mean, Tensor.mean):
        part = part * _share(rows)
    return total(function, part, rows)


def counted(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`any`, `all` and `count_nonzero` of all elements."""
    rows: Any = arguments[0] if arguments else None
    if len(arguments) != 1 or options or not is_apart(rows):
        return inner()(function, arguments, options)
    own = function(rows._rows_own)
    number = total(function, own.long(), rows)
    if function in (torch.count_nonzero, Tensor.count_nonzero):
        return number
    needed = 1
    if function in (torch.all, Tensor.all):
        needed = rows._rows_bounds.ranks.size
    return (number >= needed).to(own.dtype)


def extreme(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`max` and `min`; the gradient of that of all elements needs all of them."""
    rows: Any = arguments[0] if arguments else None
    if len(arguments) != 1 or options or not is_apart(rows):
        return extremes(function, arguments, options)
    if rows._rows_own.requires_grad and torch.is_grad_enabled():
        return NotImplemented
    set_operation(rows, function)
    ranks = rows._rows_bounds.ranks
    places = [(rank, rank + 1) for rank in range(ranks.size)]
    return function(ranks.gather_rows([function(rows._rows_own).reshape(1)], places, 1))


def loss(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Losses whose rows have equally many values, or a divisor of the mean that `losses.divisor` knows."""
    values = arguments_of(function, arguments, options)
    target = values["target"]
    has_classes = function in CLASS_LOSSES
    lead = leading([value for name, value in values.items() if name != "target" or not has_classes])
    if lead is None or (has_classes and not _is_beside(target, lead)):
        return on_all_rows(function, (), values)
    own = {name: own_part(value, lead) for name, value in values.items()}
    if has_classes and not is_apart(target):
        own["target"] = cut_own(target, lead._rows_bounds)
    reduction = own["reduction"]
    if reduction == "none":
        return as_rows(function(**own), lead)
    if reduction == "mean":
        count = divisor(function, own)
        if count is not None:
            return mean(function, own, count, lambda part: total(function, part, lead))
    part = function(**own)
    if reduction != "sum":
        part = part * _share(lead)
    return total(function, part, lead)


def _is_beside(target: Any, lead: Rows) -> bool:
    """Whether targets of classes have the rows of inputs with a dimension of classes."""
    if lead._rows_own.dim() < 2 or not isinstance(target, Tensor) or target.dim() == 0:
        return False
    if is_apart(target):
        return target._rows_bounds.is_equal(lead._rows_bounds)
    return target.shape[0] == lead._rows_bounds.rows


_LOSSES = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss
    hinge_embedding_loss binary_cross_entropy binary_cross_entropy_with_logits"""
SUM_RULES: dict[Any, Rule] = {
    **named("sum mean", added),
    **named("any all count_nonzero", counted),
    **named("max min", extreme),
    **{getattr(functional, name): loss for name in _LOSSES.split()},
}
