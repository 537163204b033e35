"""Tensors of which a rank has a part while the model runs: they are dropped from as if whole, and never leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.errors import InputError
from samestep.parallel.drawing import draws

_RULE = "what a `column` leaves divided goes through functions of single elements to a `row`"
_DO = "set strategy.plan: column_gathered for the products before"


def watch(model: nn.Module) -> None:
    """Have a model, whose products are divided, drop elements as one process does, and give nothing divided away."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.forward = partial(_dropped, module, module.forward)  # type: ignore[method-assign]
    model.forward = partial(watched, model.forward)


def _dropped(module: nn.Dropout, forward: Callable[[Any], Any], given: torch.Tensor) -> torch.Tensor:
    """Dropout with the mask of the whole tensor, of which a rank takes its part."""
    if not isinstance(given, DTensor) or not module.training or module.p == 0:
        kept: torch.Tensor = forward(given)
        return kept
    return given * whole_mask(given, module.p)


def whole_mask(given: DTensor, probability: float) -> DTensor:
    """A rank's part of what dropout multiplies a tensor with, drawn for the whole of it."""
    # Laid out as the whole would be: masks are drawn in the order of memory.
    ones = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device).fill_(1)
    mask = functional.dropout(ones, probability)
    for axis, placement in enumerate(given.placements):
        if isinstance(placement, Shard):
            mask = mask.chunk(given.device_mesh.size(axis), placement.dim)[given.device_mesh.get_local_rank(axis)]
    return DTensor.from_local(mask, given.device_mesh, given.placements, run_check=False)


def watched(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What `forward` returns.

    Raises:
        InputError: it draws for a part of a tensor, lets one meet a whole tensor, or returns one.
    """
    try:
        with _NothingDrawn():
            outputs = forward(*arguments, **named)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise InputError(f"a divided tensor meets a whole one: {str(error).split(',')[0]}", _RULE, _DO) from error
    if any(isinstance(tensor, DTensor) for tensor in _tensors(outputs)):
        raise InputError("the model returns a divided tensor", _RULE, _DO)
    return outputs


class _NothingDrawn(TorchFunctionMode):
    """Refuses functions that would draw for a part of a tensor what they would not for the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if draws(func, args, options) and any(isinstance(given, DTensor) for given in (*args, *options.values())):
            raise InputError(
                f"{func.__name__} is called with a divided tensor",
                rule="on a part it draws other numbers than on the whole; torch.nn.Dropout does not",
                do=_DO,
            )
        return func(*args, **options)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
