"""Mean losses inside of a divided call.

Most of torch's losses have equally many values in each row: the means of the ranks' own rows, averaged with the numbers
of own rows as weights, are then the mean of the whole batch, and no rule is needed. The losses here divide by a count
or a sum of weights that differs from row to row (ignored targets, weights of classes or values). Their value inside of
a divided call is the mean over the whole batch, on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Signature, signature
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from samestep.view.operations import Operations, Rule

_HALVES = (torch.float16, torch.bfloat16)


@cache
def _signature(function: Callable[..., Any]) -> Signature:
    return signature(function)


def _named(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and with the old forms of `reduction` resolved."""
    bound = _signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    named = dict(bound.arguments)
    average, reduce = named.pop("size_average", None), named.pop("reduce", None)
    if average is not None or reduce is not None:
        named["reduction"] = "none"
        if reduce is None or reduce:
            named["reduction"] = "sum"
            if average is None or average:
                named["reduction"] = "mean"
    return named


def _mean(operations: Operations, function: Callable[..., Any], named: dict[str, Any], count: torch.Tensor) -> Any:
    """Return the mean over the whole batch from sums of the own rows, which are taken in single precision at least."""
    kind = named["input"].dtype
    if kind in _HALVES:  # a sum of many rows does not fit into half precision
        for name, value in named.items():
            if isinstance(value, torch.Tensor) and value.dtype == kind:
                named[name] = value.float()
    value = function(**{**named, "reduction": "sum"})
    assert operations.region is not None
    total = operations.region.exchange.total(torch.stack([value, count.to(value.dtype)]))
    mean = total[0] / total[1]
    if kind in _HALVES and value.dtype == torch.float32 and not torch.is_autocast_enabled(value.device.type):
        return mean.to(kind)
    return mean


def _class_loss(operations: Operations, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Rule of losses with classes as targets: divides by the weights of the classes of all targets not ignored."""
    if operations.region is None:
        return function(*arguments, **options)
    named = _named(function, arguments, options)
    target, weight = named["target"], named["weight"]
    if named["reduction"] != "mean" or target.is_floating_point():  # probabilities: every row counts once
        return function(*arguments, **options)
    ignored = named["ignore_index"]
    if ignored is None:
        ignored = -100
    counted = target != ignored
    if weight is None:
        return _mean(operations, function, named, counted.sum())
    weights = weight.detach()[target.where(counted, 0)].where(counted, 0)
    kind = torch.promote_types(weights.dtype, torch.float32)
    return _mean(operations, function, named, weights.sum(dtype=kind))


def _weighted_loss(operations: Operations, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Rule of losses that divide by the sum of the weights of all values."""
    if operations.region is None:
        return function(*arguments, **options)
    named = _named(function, arguments, options)
    weight = named.get("weight")
    if named["reduction"] != "mean" or weight is None:
        return function(*arguments, **options)
    return _mean(operations, function, named, weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32)))


def _l1_loss(operations: Operations, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Rule of `l1_loss`, which hands all but its weight over to function modes (torch 2.13): the frame has it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("weight") is not None:
        options = {**options, "weight": frame.f_locals["weight"]}
    return _weighted_loss(operations, function, arguments, options)


LOSS_RULES: dict[Callable[..., Any], Rule] = {
    functional.cross_entropy: _class_loss,
    functional.nll_loss: _class_loss,
    functional.mse_loss: _weighted_loss,
    functional.l1_loss: _l1_loss,
}
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    LOSS_RULES[functional.linear_cross_entropy] = _class_loss
