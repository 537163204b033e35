"""Functions that draw a number an element: on a part of a tensor they draw others than on the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_DRAWING = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.rrelu, functional.gumbel_softmax),
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_),
    *(torch.Tensor.geometric_, torch.Tensor.multinomial),
}
# Those that draw with a probability, and may not: the places of the probability and of whether they do at all.
_MAYBE: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d), (1, 2)),
    **dict.fromkeys((functional.alpha_dropout, functional.feature_alpha_dropout), (1, 2)),
    torch.dropout: (1, 2),
    functional.scaled_dot_product_attention: (4, None),
}


def draws(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a call of a function of torch would draw."""
    if function not in _MAYBE:
        return function in _DRAWING
    probability, training = _MAYBE[function]
    is_fused = function is functional.scaled_dot_product_attention
    chance = _given(arguments, named, probability, ("p", "dropout_p"), 0.0 if is_fused else 0.5)
    return chance != 0 and bool(training is None or _given(arguments, named, training, ("training", "train"), True))


def _given(arguments: tuple[Any, ...], named: dict[str, Any], place: int, names: tuple[str, ...], default: Any) -> Any:
    if len(arguments) > place:
        return arguments[place]
    return next((named[name] for name in names if name in named), default)
