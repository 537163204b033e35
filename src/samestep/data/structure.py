"""Nested data as a structure in JSON and a list of tensors, to send the data between ranks without pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor


class TensorSpec(NamedTuple):
    """Description of a tensor in nested data."""

    path: str  # such as `outputs['image']`
    dtype: str  # empty for a value that is neither a tensor nor JSON
    shape: list[int]
    requires_grad: bool = False

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor has no dimensions."""
        return not self.shape

    @property
    def nbytes(self) -> int:
        """Size of all elements."""
        return torch.Size(self.shape).numel() * self.kind.itemsize

    @property
    def kind(self) -> torch.dtype:
        """The type of the elements."""
        kind: torch.dtype = getattr(torch, self.dtype)
        return kind


def describe(value: Any, path: str, tensors: list[TensorSpec]) -> Any:
    """Return the structure of nested data as JSON, and append its tensors to `tensors`.

    Supported are tensors, numbers, text and None in tuples, lists and mappings. Another value is a tensor without a
    dtype, whose path has the type of the value.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not isinstance(value, DTensor):
        dtype = str(value.dtype).removeprefix("torch.")
        tensors.append(TensorSpec(path, dtype, list(value.shape), value.requires_grad))
        return "tensor"
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"mapping": [[key, describe(item, f"{path}[{key!r}]", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [describe(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]
        return {type(value).__name__: items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    tensors.append(TensorSpec(f"{path} is a {type(value).__name__}", "", []))
    return "unknown"


def build(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return nested data from its structure and the tensors in order."""
    if structure == "tensor":
        return next(tensors)
    ((kind, contents),) = structure.items()
    if kind == "mapping":
        return {key: build(item, tensors) for key, item in contents}
    if kind == "value":
        return contents
    items = [build(item, tensors) for item in contents]
    return tuple(items) if kind == "tuple" else items
