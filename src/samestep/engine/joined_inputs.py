"""Nested data of several microbatches as one, with the rows of all samples in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from samestep.data.batch import map_tensors, tensors_of
from samestep.data.structure import describe
from samestep.engine.loss import has_rows


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
