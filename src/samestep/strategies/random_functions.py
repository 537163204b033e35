"""Random functions of torch, and dropout of a part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

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


def is_random(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a torch function draws random numbers."""
    if function not in _DROPOUTS:
        return function in _RANDOM

    def argument(position: int, names: tuple[str, str], default: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(names[0], kwargs.get(names[1], default))

    probability, training = _DROPOUTS[function]
    p = argument(probability, ("p", "dropout_p"), 0.0 if training is None else 0.5)
    return p != 0 and bool(training is None or argument(training, ("training", "train"), True))


def dropout_mask(shape: Sequence[int], probability: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the scaled dropout mask of a full tensor."""
    return functional.dropout(torch.ones(tuple(shape), dtype=dtype, device=device), probability)
