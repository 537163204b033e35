"""Outputs and targets of all microbatches of a global batch, on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from samestep.data.batch import Microbatch, tensors_of
from samestep.data.structure import TensorSpec, build, describe
from samestep.distributed.world import World, all_gather
from samestep.engine.tensor_bits import bytes_of
from samestep.errors import InputError

Roots = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors at which a backward begins, and their gradients
_MAX_TEXT = 200  # characters of a structure in an error
_gather_error = partial(InputError, code="E_SHAPE")


class LocalOutputs(NamedTuple):
    """A microbatch after its forward, without a loss of its own."""

    microbatch: Microbatch
    outputs: Any
    targets: Any


class GlobalOutputs(NamedTuple):
    """Outputs and targets of a global batch, the rows of all samples in order, without the graphs of microbatches."""

    bounds: dict[int, tuple[int, int]]  # samples of each microbatch that has any, ascending
    outputs: Any
    targets: Any

    @property
    def samples(self) -> int:
        """Number of samples."""
        return max((stop for _, stop in self.bounds.values()), default=0)


class OutputRow(NamedTuple):
    """Description of one microbatch: number, samples, structure of `(outputs, targets)`, and tensors in order."""

    number: int
    size: int  # 0 for a filler: compared, but not joined
    structure: Any
    tensors: list[TensorSpec]

    @classmethod
    def of(cls, computed: LocalOutputs, names: Sequence[str]) -> OutputRow:
        microbatch, tensors = computed.microbatch, list[TensorSpec]()
        size = 0 if microbatch.is_filler else microbatch.size
        structure = [describe(value, name, tensors) for name, value in zip(names, computed[1:], strict=True)]
        return cls(microbatch.number, size, structure, tensors)

    @classmethod
    def from_json(cls, number: int, size: int, structure: Any, tensors: list[list[Any]]) -> OutputRow:
        return cls(number, size, structure, [TensorSpec(*entry) for entry in tensors])

    def require_rows(self) -> None:
        """Refuse values of unknown types, and tensors without one row per sample."""
        for tensor in self.tensors:
            if not tensor.dtype:
                raise _gather_error(
                    tensor.path,
                    "tensors, numbers, text and None in tuples, lists and dicts, for a loss of the whole batch",
                    'return a dict of tensors from the model, and {"outputs": ..., "targets": ...} without a loss from '
                    "a forward function",
                )
            if self.size and not tensor.is_scalar and tensor.shape[0] != self.size:
                raise _gather_error(
                    f"{tensor.path} has the shape {tuple(tensor.shape)} in microbatch {self.number}, which has "
                    f"{self.size} samples",
                    "one row per sample, because the rows of all microbatches are joined in the order of the samples; "
                    "or a tensor without dimensions, such as a learned scale",
                    "return views of the same samples as separate outputs (first, second), with the samples in "
                    "dimension 0",
                )


def gather_rows(
    computed: Sequence[LocalOutputs], world: World, names: Sequence[str] = LocalOutputs._fields[1:]
) -> list[list[OutputRow]]:
    """Return the descriptions of the microbatches of each rank; a collective. `names` are those of the two values."""
    own = [OutputRow.of(entry, names) for entry in computed]
    return [[OutputRow.from_json(*row) for row in rows] for rows in all_gather(own, world)]


def gather_outputs(computed: Sequence[LocalOutputs], world: World) -> GlobalOutputs:
    """Return the outputs and targets of the microbatches of all ranks on every rank; a collective.

    Tensors are nested in tuples, lists and mappings, and have one row per sample. Tensors without dimensions, such as a
    learned scale, and values that are no tensors, are equal in all microbatches.

    Raises:
        InputError: outputs or targets cannot be joined; on every rank.
    """
    by_rank = gather_rows(computed, world)
    rows = list(chain(*by_rank))
    for row in rows:
        row.require_rows()
        _require_same_structure(rows[0], row)
    tensors = _all_gather_tensors(computed, by_rank, world)
    filled = sorted((row.number, row, tensors[row.number]) for row in rows if row.size)
    ends = [0, *accumulate(row.size for _, row, _ in filled)]
    bounds = {number: bound for (number, *_), bound in zip(filled, pairwise(ends), strict=True)}
    if not filled:
        return GlobalOutputs(bounds, None, None)
    joined = []
    for column, tensor in enumerate(rows[0].tensors):
        value = _join(tensor, [row_tensors[column] for *_, row_tensors in filled])
        joined.append(value.requires_grad_(any(row.tensors[column].requires_grad for row in rows)))
    outputs, targets = build({"tuple": rows[0].structure}, iter(joined))
    return GlobalOutputs(bounds, outputs, targets)


def _require_same_structure(first: OutputRow, row: OutputRow) -> None:
    """Refuse a microbatch whose outputs or targets differ from those of another one in more than rows."""
    for one, other in zip(first.tensors, row.tensors, strict=False):
        if (one.path, one.dtype, one.shape[1:], one.is_scalar) != (
            other.path,
            other.dtype,
            other.shape[1:],
            other.is_scalar,
        ):
            values = [f"{t.path} of {t.dtype} and shape {tuple(t.shape)}" for t in (one, other)]
            break
    else:
        values = [json.dumps(structure) for structure in (first.structure, row.structure)]
        if values[0] == values[1]:
            return
        values = [f"outputs and targets {value[:_MAX_TEXT]}" for value in values]
    raise _gather_error(
        f"microbatch {first.number} has {values[0]}, microbatch {row.number} has {values[1]}",
        "outputs and targets of all microbatches that differ only in rows",
        "pad to one size, and return tensors with one row per sample for values that depend on the samples",
    )


def _join(tensor: TensorSpec, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all microbatches, or the value that is equal in all of them."""
    if not tensor.is_scalar:
        return torch.cat(list(values))
    bits = torch.stack([bytes_of(value) for value in values])
    if bool((bits != bits[0]).any()):
        raise _gather_error(
            f"{tensor.path} is {values[0].item():.6g} in one microbatch and has another value in others",
            "a tensor without dimensions, such as a learned scale, is equal in all microbatches",
            "return one value per sample",
        )
    return values[0]


def _all_gather_tensors(
    computed: Sequence[LocalOutputs], by_rank: Sequence[Sequence[OutputRow]], world: World
) -> dict[int, list[torch.Tensor]]:
    """Return the tensors of each microbatch with samples, on the device of this rank; a collective."""
    if world.size == 1:  # without the bytes of a message
        return {
            row.number: [
                tensor.detach().to(world.device).contiguous() for tensor in tensors_of((entry.outputs, entry.targets))
            ]
            for entry, row in zip(computed, by_rank[0], strict=True)
            if row.size
        }
    own = [
        bytes_of(tensor.detach()).to(world.device)
        for entry, row in zip(computed, by_rank[world.rank], strict=True)
        if row.size
        for tensor in tensors_of((entry.outputs, entry.targets))
    ]
    lengths = [sum(tensor.nbytes for row in rows if row.size for tensor in row.tensors) for rows in by_rank]
    sent = torch.zeros(max(lengths), dtype=torch.uint8, device=world.device)
    if own:
        sent[: lengths[world.rank]] = torch.cat(own)
    received = [torch.empty_like(sent) for _ in by_rank]
    world.run_collective(lambda: dist.all_gather(received, sent, group=world.group), "an all-gather of outputs")
    result = {}
    for data, rows in zip(received, by_rank, strict=True):
        filled = [row for row in rows if row.size]
        sizes = [tensor.nbytes for row in filled for tensor in row.tensors]
        pieces = iter(data[: sum(sizes)].split(sizes))
        for row in filled:
            # Clones are aligned for every type.
            result[row.number] = [next(pieces).clone().view(t.kind).view(t.shape) for t in row.tensors]
    return result
