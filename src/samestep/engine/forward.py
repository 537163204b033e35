"""Forward of one shard: random state, precision, model, loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from samestep.config import StepRules
from samestep.data.batch import Shard
from samestep.engine.loss import Loss, LossFunction, as_loss
from samestep.runtime.random_state import Purpose, derive_seed, seed_generators

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Computes outputs and loss of a shard under the recipe's rules."""

    def __init__(self, loss: LossFunction, rules: StepRules, device: torch.device) -> None:
        self._loss, self._rules, self._device = loss, rules, device

    def __call__(self, module: torch.nn.Module, shard: Shard, purpose: Purpose, position: int) -> tuple[Any, Loss]:
        """Outputs and loss of `shard` by `module`; its random state is a function of (seed, position, shard).

        Raises:
            TypeError: the batch is not a pair, or the loss function returned something else than a loss.
        """
        inputs, targets = _pair(shard.data)
        seed_generators(derive_seed(purpose, self._rules.seed, position, shard.number), self._device)
        with self._autocast():
            outputs = _call(module, inputs)
            return outputs, as_loss(self._loss(outputs, targets), shard.size)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = _AUTOCAST[self._rules.precision]
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None)


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, list | tuple) or len(data) != 2:
        raise TypeError(
            f"a collated shard is a {type(data).__name__}; it must be a pair (inputs, targets): "
            "let the dataset return pairs, or give the loader a collate function that does"
        )
    return data[0], data[1]


def _call(module: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)
