"""Predictions and labels of a global batch from those of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from samestep.data.batch import map_tensors
from samestep.data.structure import TensorSpec, describe
from samestep.distributed.world import World, all_gather
from samestep.engine.gather import LocalOutputs, gather_outputs
from samestep.integrations.torch_loader import integration_error

_PADDING = -100  # that of Transformers


class _Row(NamedTuple):
    """Number and samples of a microbatch, with its tensors in order."""

    number: int
    size: int
    tensors: list[TensorSpec]

    @property
    def kinds(self) -> list[str]:
        """Name, type and number of dimensions of each tensor."""
        return [f"{tensor.path} ({tensor.dtype}, {len(tensor.shape)} dimensions)" for tensor in self.tensors]


def join_predictions(computed: Sequence[LocalOutputs], world: World) -> tuple[Any, Any]:
    """Return predictions and labels of a global batch on every rank, in the order of the samples; a collective.

    Tensors have one row per sample, and dimension 1 is padded with -100 to the largest width of all microbatches. A
    tensor without dimensions, such as a second loss, becomes one value per microbatch.

    Raises:
        InputError: a tensor has no row per sample, or microbatches have different tensors; on every rank.
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


def _rows(computed: Sequence[LocalOutputs], world: World) -> list[_Row]:
    """Return the descriptions of the microbatches of all ranks in order; a collective."""
    own = []
    for entry in computed:
        tensors: list[TensorSpec] = []
        describe(entry.outputs, "predictions", tensors)
        describe(entry.targets, "labels", tensors)
        own.append(_Row(entry.microbatch.number, entry.microbatch.size, tensors))
    gathered = [row for rank in all_gather(own, world) for row in rank]
    rows = sorted(_Row(number, size, [TensorSpec(*spec) for spec in specs]) for number, size, specs in gathered)
    for row in rows:
        for tensor in row.tensors:
            if not tensor.dtype or (tensor.shape and tensor.shape[0] != row.size):
                shape = f" of the shape {tuple(tensor.shape)}" if tensor.dtype else ""
                raise integration_error(
                    f"{tensor.path}{shape} in a microbatch of {row.size} samples",
                    "predictions and labels with one row per sample, or without dimensions",
                    "leave the output of the model out, by its name in evaluate(ignore_keys=[...]), or in "
                    "model.config.keys_to_ignore_at_inference during training",
                )
        if row.kinds != rows[0].kinds:
            raise integration_error(
                f"microbatch {rows[0].number} has {rows[0].kinds}, microbatch {row.number} has {row.kinds}",
                "the same predictions and labels in all microbatches",
                "return the same outputs for all samples, or leave them out by ignore_keys=[...]",
            )
    return rows


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
