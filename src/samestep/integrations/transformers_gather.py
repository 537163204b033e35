"""Values of all microbatches on every rank: predictions and labels of evaluations, and the metrics of TRL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import torch

from samestep.data.batch import map_tensors
from samestep.distributed.world import World, all_gather
from samestep.engine.gather import LocalOutputs, OutputRow, gather_outputs, gather_rows
from samestep.integrations.torch_loader import integration_error

_PADDING = -100  # that of Transformers
_COLLECTIVES = ("gather", "gather_for_metrics", "reduce")


def join_predictions(computed: Sequence[LocalOutputs], world: World) -> tuple[Any, Any]:
    """Return predictions and labels of a global batch on every rank, in the order of the samples; a collective.

    Tensors have one row per sample, and dimension 1 is padded with -100 to the largest width of all microbatches. A
    tensor without dimensions, such as a second loss, becomes one value per microbatch.
    """
    rows = _rows(computed, world)
    specs = list(zip(*(row.tensors for row in rows), strict=True))
    widths = [max(spec.shape[1] if len(spec.shape) > 1 else 0 for spec in column) for column in specs]
    own = [_with_rows(entry, widths) for entry in computed]
    gathered = gather_outputs(own, world)
    pair = gathered.outputs, gathered.targets
    starts = [0, *accumulate(row.size for row in rows)][:-1]
    is_scalar = iter([column[0].is_scalar for column in specs])
    outputs, targets = map_tensors(pair, lambda tensor: tensor[starts] if next(is_scalar) else tensor)
    return outputs, targets


def _rows(computed: Sequence[LocalOutputs], world: World) -> list[OutputRow]:
    """Return the descriptions of the microbatches of all ranks in order; a collective."""
    rows = sorted(chain(*gather_rows(computed, world, ("predictions", "labels"))), key=lambda row: row.number)
    kinds = [_kinds(row) for row in rows]
    for row, own in zip(rows, kinds, strict=True):
        for tensor in row.tensors:
            if not tensor.dtype or (tensor.shape and tensor.shape[0] != row.size):
                shape = f" of the shape {tuple(tensor.shape)}" if tensor.dtype else ""
                raise integration_error(
                    f"{tensor.path}{shape} in a microbatch of {row.size} samples, without a row for each",
                    "evaluate(ignore_keys=[...]), or model.config.keys_to_ignore_at_inference during training",
                )
        if own != kinds[0]:
            raise integration_error(
                f"microbatch {rows[0].number} has {kinds[0]}, microbatch {row.number} has {own}",
                "return the same outputs for all samples, or leave them out by ignore_keys=[...]",
            )
    return rows


def _kinds(row: OutputRow) -> list[str]:
    """Return name, type and number of dimensions of each tensor."""
    return [f"{tensor.path} ({tensor.dtype}, {len(tensor.shape)} dimensions)" for tensor in row.tensors]


def _with_rows(entry: LocalOutputs, widths: Sequence[int]) -> LocalOutputs:
    """Pad dimension 1 of each tensor to its width, and repeat tensors without dimensions once per sample."""
    left = iter(widths)

    def with_rows(tensor: torch.Tensor) -> torch.Tensor:
        width = next(left)
        if tensor.dim() < 2:
            return tensor if tensor.dim() else tensor.repeat(entry.microbatch.size)
        if tensor.shape[1] == width:
            return tensor
        rest = tensor.new_full((len(tensor), width - tensor.shape[1], *tensor.shape[2:]), _PADDING)
        return torch.cat([tensor, rest], dim=1)

    return LocalOutputs(entry.microbatch, *map_tensors((entry.outputs, entry.targets), with_rows))


class MicrobatchMetrics:
    """Metrics that a trainer of TRL collects in `compute_loss`, combined over the microbatches of all ranks.

    Trainers of TRL gather each value over ranks in `compute_loss`, and append it to `_metrics[mode][name]`. Ranks have
    different numbers of microbatches, so each value is that of one microbatch at first, and the lists are gathered
    after the last one, in the order of the microbatches. Other trainers have no such lists: collectives are refused.
    """

    def __init__(self, trainer: Any, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._rows: list[tuple[int, str, float]] = []
        self._tokens = 0

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Surround the loss of one microbatch."""
        trainer, is_collecting = self._trainer, hasattr(self._trainer, "_metrics")
        for name in _COLLECTIVES:
            setattr(trainer.accelerator, name, own_values if is_collecting else _refuse(name))
        before = trainer._total_train_tokens if is_collecting else 0
        try:
            yield
        finally:
            for name in _COLLECTIVES:
                delattr(trainer.accelerator, name)
        if is_collecting:
            self._tokens += trainer._total_train_tokens - before
            trainer._total_train_tokens = before
            self._rows += [(number, name, values.pop()) for name, values in self._lists().items() if values]

    def share(self) -> None:
        """Give the values of all microbatches to every rank; a collective."""
        if not hasattr(self._trainer, "_metrics"):
            return
        rows, lists = all_gather([[self._tokens], self._rows], self._world), self._lists()
        self._tokens, self._rows = 0, []
        self._trainer._total_train_tokens += sum(tokens for ((tokens,), _) in rows)
        for _, name, value in sorted((row for _, own in rows for row in own), key=lambda row: row[0]):
            lists[name].append(value)
        if "num_tokens" in lists:
            lists["num_tokens"] = [self._trainer._total_train_tokens]

    def _lists(self) -> Any:
        return self._trainer._metrics["train" if self._trainer.model.training else "eval"]


def own_values(value: Any, *_: Any, **__: Any) -> Any:
    """Return the values of this rank, in place of a collective."""
    return value


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise integration_error(
            f"accelerator.{name} in the loss of a microbatch",
            "values of one microbatch; log them in a callback, or compute them in compute_metrics",
        )

    return refuse
