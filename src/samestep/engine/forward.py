"""Forward of one shard: random state, precision, model, loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from samestep.config import Precision, StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.data.transfer import beside_of
from samestep.engine.loss import Loss, LossFunction
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.plain_loss import in_parts
from samestep.engine.switches import laid_out
from samestep.errors import RunError
from samestep.runtime.random_state import Purpose, derive_seed, seed_device, seed_generators
from samestep.runtime.world import World

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Computes outputs and loss of a shard under the recipe's rules."""

    def __init__(self, loss: LossFunction | MultiLoss, rules: StepRules, device: torch.device) -> None:
        self._loss, self._rules, self._device = in_parts(loss), rules, device
        self._totals: list[float] = []
        self._batch_size = 0

    def begin_step(self, batch: GlobalBatch, world: World) -> None:
        """Learn what a loss of several parts needs to know of the global batch; every rank calls it."""
        self._totals = self._loss.totals(batch, lambda shard: _pair(shard.data)[1], world)
        self._batch_size = batch.size

    def __call__(
        self, module: torch.nn.Module, shard: Shard, purpose: Purpose, position: int, *, beside: bool = False
    ) -> tuple[Any, Loss]:
        """Outputs and loss of `shard` by `module`; its random state is a function of (seed, position, shard).

        Args:
            beside: other shards are computed at the same time, so what all of them would draw from is left alone.

        Raises:
            TypeError: the batch is not a pair, or the loss function returned something else than a loss.
        """
        outputs, losses = self.parts(module, shard, purpose, position, beside=beside)
        return outputs, self._loss.joined(losses, self._totals, self._batch_size, shard.size)

    def parts(
        self, module: torch.nn.Module, shard: Shard, purpose: Purpose, position: int, *, beside: bool = False
    ) -> tuple[Any, list[Loss]]:
        """Outputs of `shard` and the loss of each part; a plain loss is one part."""
        inputs, targets = _pair(shard.data)
        seed = seed_device if beside else seed_generators
        seed(derive_seed(purpose, self._rules.seed, position, shard.number), self._device)
        with autocast(self._rules.precision, self._device):
            outputs = call_model(module, laid_out(inputs, self._rules))
            losses = self._loss.losses(outputs, beside_of(targets, outputs), shard.size)
        # What fills an empty place takes part in everything, and counts for nothing.
        return outputs, losses if shard.size else [Loss(loss.sum * 0.0, 0.0) for loss in losses]

    def arguments(self, shard: Shard) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with for `shard`."""
        return as_arguments(laid_out(_pair(shard.data)[0], self._rules))

    @contextmanager
    def stage(self, shard: Shard, purpose: Purpose, position: int, stage: int) -> Iterator[None]:
        """While one stage of a model computes `shard`; its random state is a function of these and the seed."""
        seed_generators(derive_seed(purpose, self._rules.seed, position, shard.number, stage), self._device)
        with autocast(self._rules.precision, self._device):
            yield

    def losses(self, shard: Shard, outputs: Any) -> list[Loss]:
        """The loss of each part, from what the last stage made of `shard`."""
        losses = self._loss.losses(outputs, _pair(shard.data)[1], shard.size)
        return losses if shard.size else [Loss(loss.sum * 0.0, 0.0) for loss in losses]

    def joined(self, shard: Shard, losses: Sequence[Loss]) -> Loss:
        """What a step makes of the losses of a shard's parts."""
        return self._loss.joined(losses, self._totals, self._batch_size, shard.size)

    @property
    def part_count(self) -> int:
        """How many parts the loss has."""
        return len(self._loss.parts)

    def values(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        """`loss`, and each of several parts, from the sums and counts of a whole dataset.

        Raises:
            RunError: nothing was counted.
        """
        if not any(count for _, count in sums):
            raise RunError("the loss counted nothing in evaluation", do="look at ignored targets")
        return self._loss.values(sums)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The precision that a recipe asks for while the block runs."""
    dtype = _AUTOCAST[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, list | tuple) or len(data) != 2:
        raise TypeError(
            f"a collated shard is a {type(data).__name__}; it must be a pair (inputs, targets): "
            "let the dataset return pairs, or give the loader a collate function that does"
        )
    return data[0], data[1]


def call_model(module: torch.nn.Module, inputs: Any) -> Any:
    """What `module` makes of inputs; a mapping or a tuple is unpacked into its arguments."""
    positional, named = as_arguments(inputs)
    return module(*positional, **named)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the arguments of a forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
