"""Nested data of microbatches: rows of samples, joined and split, or packed as JSON and bytes and sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from samestep.data.batch import map_tensors, tensors_of
from samestep.data.structure import TensorSpec, build, describe
from samestep.distributed.world import World, all_gather
from samestep.engine.tensor_bits import bytes_of
from samestep.errors import InputError
from samestep.reduce.tree import communicate


def has_rows(data: Any, size: int) -> bool:
    """Return whether every value in nested data is a tensor with rows for `size` samples, one or more per sample."""
    if isinstance(data, torch.Tensor):
        return data.dim() > 0 and data.shape[0] > 0 and data.shape[0] % size == 0
    if isinstance(data, Mapping | list | tuple) and not isinstance(data, PackedSequence):  # rows are time steps
        return all(has_rows(value, size) for value in (data.values() if isinstance(data, Mapping) else data))
    return False


def rows(data: Any, size: int, start: int, stop: int) -> Any:
    """Return the rows of the samples `[start, stop)` of `size` samples."""
    return map_tensors(data, lambda tensor: tensor[start * len(tensor) // size : stop * len(tensor) // size])


class Packed(NamedTuple):
    """Data of a microbatch as JSON and bytes."""

    structure: Any
    tensors: list[TensorSpec]
    strides: list[list[int]]  # of each tensor: kernels of another memory layout can round differently
    data: torch.Tensor  # the elements of all tensors and of gaps between them, as bytes


def pack(data: Any, device: torch.device) -> Packed:
    """Return nested data as JSON and bytes on `device`."""
    tensors: list[TensorSpec] = []
    structure = describe(data, "data", tensors)
    is_known = all(spec.dtype for spec in tensors)
    values = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors_of(data)] if is_known else []
    pieces = [value.as_strided((_extent(value.shape, value.stride()),), (1,)) for value in values]
    sent = [bytes_of(piece).to(device) for piece in pieces]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return Packed(structure, tensors, [list(value.stride()) for value in values], torch.cat([empty, *sent]))


def unpack(packed: Packed) -> Any:
    """Return nested data with tensors of their own, in the memory layout of the packed ones."""
    extents = [_extent(spec.shape, stride) for spec, stride in zip(packed.tensors, packed.strides, strict=True)]
    sizes = [extent * spec.kind.itemsize for extent, spec in zip(extents, packed.tensors, strict=True)]
    tensors = [
        # Clones are aligned for every type.
        piece.clone().view(spec.kind).as_strided(spec.shape, stride).requires_grad_(spec.requires_grad)
        for piece, spec, stride in zip(packed.data.split(sizes), packed.tensors, packed.strides, strict=True)
    ]
    return build(packed.structure, iter(tensors))


def send_to_next(packed: Packed, world: World) -> Packed:
    """Send packed data to the next rank, and return those of the previous rank; a collective.

    Raises:
        InputError: the data of a rank have a value that cannot be sent; on every rank.
    """
    rows: list[Any] = all_gather([*packed[:-1], len(packed.data)], world)
    for path, dtype, *_ in (spec for row in rows for spec in row[1]):
        if not dtype:
            raise InputError(
                f"{path}, which cannot be sent to another rank",
                expected="tensors, numbers, text and None in tuples, lists and dicts",
                fix="return such values from the dataset and the collate function, or leave out witness_every",
                code="E_INCOMPATIBLE",
            )
    if world.size == 1:
        return packed
    previous, following = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    structure, specs, strides, length = rows[previous]
    data = torch.empty(length, dtype=torch.uint8, device=world.device)
    sent = [(packed.data, following)] if len(packed.data) else []
    received = [(data, previous)] if length else []
    world.run_collective(lambda: communicate(world, sent, received), "the exchange of data with the next rank")
    return Packed(structure, [TensorSpec(*spec) for spec in specs], strides, data)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements between the first and the last element in memory, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0


def why_not_joined(values: Sequence[Any], sizes: Sequence[int]) -> str | None:
    """Return the reason for which the data of microbatches of `sizes` samples cannot be joined; None if it can."""
    columns = list(zip(*map(tensors_of, values), strict=False))
    if not columns or not all(has_rows(value, size) for value, size in zip(values, sizes, strict=True)):
        return "are not tensors with rows for each sample"
    structures = [describe(value, "", []) for value in values]
    for tensors in columns:
        forms = {
            (tensor.shape[1:], tensor.dtype, len(tensor) // size) for tensor, size in zip(tensors, sizes, strict=True)
        }
        if len(forms) > 1:
            return "have different shapes in microbatches"
    return None if all(other == structures[0] for other in structures) else "have different structures in microbatches"


def join(values: Sequence[Any]) -> Any:
    """Return the rows of all `values`, for which `why_not_joined` has no reason."""
    columns = zip(*map(tensors_of, values), strict=True)
    return _with_tensors(values[0], (torch.cat(column) for column in columns))


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the rows of each microbatch of `sizes` samples as views; the inverse of `join`."""
    samples = sum(sizes)
    columns = [tensor.split([len(tensor) // samples * size for size in sizes]) for tensor in tensors_of(value)]
    return [_with_tensors(value, iter([column[number] for column in columns])) for number in range(len(sizes))]


def _with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return map_tensors(value, lambda _: next(tensors))
