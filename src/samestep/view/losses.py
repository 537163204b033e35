"""Mean losses inside of a divided call.

Most of torch's losses have equally many values in each row: the means of the ranks' own rows,
averaged with the numbers of own rows as weights, are then the mean of the whole batch, and no rule
is needed. The losses here divide by a count or a sum of weights that differs from row to row
(ignored targets, weights of classes or values). Their value inside of a divided call is the mean
over the whole batch, on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch.nn import functional

from samestep.view.crossings import totals
from samestep.view.draws import Draws, Rule

_HALVES = (torch.float16, torch.bfloat16)
_signature = cache(signature)


def arguments_of(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a loss by name, with old forms of `reduction` resolved."""
    bound = _signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    named = bound.arguments
    average = named.pop("size_average", None)
    reduce = named.pop("reduce", None)
    if average is not None or reduce is not None:
        named["reduction"] = "none"
        if reduce is None or reduce:
            named["reduction"] = "sum"
            if average is None or average:
                named["reduction"] = "mean"
    if function is functional.l1_loss:
        # It hands all but its weight over to function modes and subclasses of tensors (torch 2.13):
        # its frame has it.
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not functional.l1_loss.__code__:
            frame = frame.f_back
        if frame is not None:
            named["weight"] = frame.f_locals.get("weight", named.get("weight"))
    return named


def divisor(function: Callable[..., Any], named: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the own part of the number by which a mean divides; None if it is that of each row."""
    target = named["target"]
    weight = named.get("weight")
    if function in CLASS_LOSSES and not target.is_floating_point():  # no probabilities
        ignored = named["ignore_index"]
        counted = target != (-100 if ignored is None else ignored)
        if weight is None:
            return torch.sum(counted)
        # An ignored target, as -100, is no index.
        weight = weight.detach()[target.where(counted, 0)].where(counted, 0)
    elif weight is None or function not in WEIGHTED_LOSSES:
        return None
    total: torch.Tensor = weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    return total


def mean(
    function: Callable[..., Any],
    named: dict[str, Any],
    count: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the mean over the whole batch from sums of the own rows.

    Args:
        function: the loss.
        named: its arguments.
        count: own part of the divisor.
        total: returns the sum of all parts of a tensor.
    """
    kind = named["input"].dtype
    floating = {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    # A sum of many rows does not fit into half precision.
    if kind in _HALVES and all(value.dtype == kind for value in floating.values()):
        named |= {name: value.float() for name, value in floating.items()}
    value: torch.Tensor = function(**{**named, "reduction": "sum"})
    # One message for both sums.
    parts = total(torch.stack([value, count.to(value.dtype)]))
    result = parts[0] / parts[1]
    is_wider = kind in _HALVES and value.dtype == torch.float32
    if is_wider and not torch.is_autocast_enabled(value.device.type):
        return result.to(kind)
    return result


def _loss(operations: Draws, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    named = arguments_of(function, arguments, options)
    region = operations.region
    count = None
    if named["reduction"] == "mean":
        count = divisor(function, named)
    if region is None or count is None:
        return function(**named)
    return mean(function, named, count, partial(region.exchange.join, totals))


# Divide by the weights of the classes of all targets that are not ignored.
CLASS_LOSSES: set[Callable[..., Any]] = {functional.cross_entropy, functional.nll_loss}
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    CLASS_LOSSES.add(functional.linear_cross_entropy)
# Divide by the sum of the weights of all values.
WEIGHTED_LOSSES: set[Callable[..., Any]] = {functional.mse_loss, functional.l1_loss}
LOSS_RULES: dict[Callable[..., Any], Rule] = dict.fromkeys(CLASS_LOSSES | WEIGHTED_LOSSES, _loss)
