"""Checks and random draws for models with divided activations.

Dropout of a divided tensor uses the local part of the mask of the full tensor, so that results do not depend on the
number of ranks. Other random functions of a divided tensor, and divided model outputs, are errors.
"""

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

# Random functions without a drop probability.
_RANDOM = {
    *(functional.rrelu, functional.gumbel_softmax),
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_),
    *(torch.Tensor.geometric_, torch.Tensor.multinomial),
}
# Functions with a drop probability: positions of the probability and of the `training` argument.
_DROPOUTS: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d), (1, 2)),
    **dict.fromkeys((functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout), (1, 2)),
    functional.scaled_dot_product_attention: (4, None),
}
_EXPECTED = "the divided result of a `column` module passes through elementwise functions to a `row` module"
_FIX = "set strategy.plan: column_gathered for the modules before the operation"
_divided_error = partial(InputError, fix=_FIX, code="E_DIVIDED_TENSOR")


def is_random(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a torch function draws random numbers."""
    if function not in _DROPOUTS:
        return function in _RANDOM

    def argument(position: int, names: tuple[str, str], default: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(names[0], kwargs.get(names[1], default))

    probability, training = _DROPOUTS[function]
    p = argument(probability, ("p", "dropout_p"), 0.0 if training is None else 0.5)
    return p != 0 and bool(training is None or argument(training, ("training", "train"), True))


def install_checks(model: nn.Module) -> None:
    """Replace forward of `model` and of its dropout modules with versions that handle divided tensors."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.forward = partial(_dropout, module, module.forward)  # type: ignore[method-assign]
    model.forward = partial(checked_forward, model.forward)


def _dropout(module: nn.Dropout, forward: Callable[[Any], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    if not isinstance(inputs, DTensor) or not module.training or module.p == 0:
        return forward(inputs)
    return inputs * dropout_mask(inputs, module.p)


def dropout_mask(tensor: DTensor, probability: float) -> DTensor:
    """Return the local part of the scaled dropout mask of a full tensor."""
    # Strides of the full tensor: masks are drawn in memory order.
    ones = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).fill_(1)
    mask = functional.dropout(ones, probability)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            mask = mask.chunk(tensor.device_mesh.size(axis), placement.dim)[tensor.device_mesh.get_local_rank(axis)]
    return DTensor.from_local(mask, tensor.device_mesh, tensor.placements, run_check=False)


def checked_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`.

    Raises:
        InputError: `forward` draws random numbers for a divided tensor, combines one with a plain tensor, or returns
            one.
    """
    try:
        with _RandomFunctionCheck():
            outputs = forward(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        problem = f"an operation mixes a divided tensor with a plain one: {str(error).split(',')[0]}"
        raise _divided_error(problem, _EXPECTED) from error
    if any(isinstance(tensor, DTensor) for tensor in _tensors(outputs)):
        raise _divided_error("the model returns a divided tensor", _EXPECTED)
    return outputs


class _RandomFunctionCheck(TorchFunctionMode):
    """Error for random functions of divided tensors: ranks would draw other numbers than one process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            raise _divided_error(
                f"{func.__name__} is called with a divided tensor",
                expected="of random functions, only torch.nn.Dropout supports divided tensors",
            )
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
