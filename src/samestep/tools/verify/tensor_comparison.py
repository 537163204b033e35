"""Comparison of tensors: digests of all bits, distances from a reference, and rounded elements."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from samestep.strategies.dtensors import Division
from samestep.view.rows_tensor import gathered

# Smallest scale of a distance, relative to the largest tensor of the same kind. The gradient of a
# bias before batch norm, for example, is zero except for rounding.
_MIN_SCALE = 1e-2
# Objects that enter a digest by their text.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph; a collective that completes it if ranks have parts."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return Division.of(tensor).full_tensor(local.detach())
    return gathered(tensor.detach())


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of dtype, shape and every bit of a tensor; a collective if it is divided."""
    # A contiguous copy, so that strides do not matter; viewed as bytes, since NumPy has no
    # bfloat16.
    flat = full(tensor).to("cpu").contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    result = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    result.update(raw.numpy().data)
    # 64 bits: records stay small, and the tensors of a trial are no more than some thousands.
    return result.hexdigest()[:16]


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested lists, tuples and mappings with their paths, such as `1.mask`."""
    if is_dataclass(data) and not isinstance(data, type):
        data = {field.name: getattr(data, field.name) for field in fields(data)}
    elif isinstance(data, list | tuple):
        data = dict(enumerate(data))
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, ".".join(filter(None, (path, str(key)))))
    else:
        yield path, data


def digest_any(data: Any) -> str:
    """Return a hash of nested data, with other objects than tensors and plain values by class."""
    result = hashlib.sha256()
    for path, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            text = digest(leaf)
        elif isinstance(leaf, _PLAIN):
            text = repr(leaf)
        else:
            text = type(leaf).__qualname__
        result.update(f"{path}={text};".encode())
    return result.hexdigest()[:16]


def digest_rows(data: Any, rows: int) -> list[str]:
    """Return one hash per sample, of the first tensor with one row per sample, if there is one."""
    for _, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return [digest(row) for row in leaf]
    return []


def distance(value: torch.Tensor, reference: torch.Tensor, min_scale: float = 0.0) -> float:
    """Return the largest difference of two elements, relative to the largest one of `reference`.

    The scale is per tensor and not per element, and at least `min_scale`: elements that cancel to
    almost zero have no accuracy. The result is infinity if shapes, dtypes or the positions of
    non-finite elements differ.
    """
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    one = reference.detach().cpu().double()
    other = value.detach().cpu().double()
    if bool((torch.isfinite(one) != torch.isfinite(other)).any()):
        return float("inf")
    largest = float((other - one).nan_to_num(posinf=0.0).abs().max())
    scale = max(min_scale, max_abs(reference))
    if largest == 0.0:
        return 0.0
    if scale:
        return largest / scale
    return float("inf")


def max_abs(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of an element; 0 if no element is finite."""
    if tensor.numel():
        return float(tensor.detach().cpu().double().abs().nan_to_num(posinf=0.0).max())
    return 0.0


class StepTensors:
    """Tensors of a step by kind (arguments, outputs, gradients, state, optimizer) and name.

    They are written to the folder of the trial, or their distances from those of the trial in the
    folder `reference` are measured. Only rank 0 `keeps` them; others take part in collectives.
    """

    def __init__(self, folder: Path, reference: Path | None, *, keeps: bool = True) -> None:
        self._folder = folder / "tensors"
        self._reference = reference
        self._keeps = keeps
        self._tensors: dict[str, torch.Tensor] = {}
        # Elements with a gradient that was accurate to rounding only, by name.
        self._rounded: dict[str, torch.Tensor] = {}

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Copy the tensors in nested data."""
        for name, value in values.items():
            for path, leaf in leaves(value):
                if isinstance(leaf, torch.Tensor):
                    # On all ranks, since this is a collective.
                    whole = full(leaf).resolve_conj()
                    if whole.is_complex():  # safetensors has pairs of real numbers
                        whole = torch.view_as_real(whole)
                    if self._keeps:
                        key = "/".join(filter(None, (kind, name, path)))
                        # Cloned: on CPUs, the step changes tensors in place.
                        self._tensors[key] = whole.cpu().contiguous().clone()

    def end_step(self, step: int) -> dict[str, dict[str, float]]:
        """Write the tensors, or return their distances by kind and name, if not zero.

        A gradient that is zero in exact arithmetic, such as that of the bias of an attention key,
        is rounding, which optimizers such as Adam scale to a full step. Elements with small
        gradients that have less than half of their digits in common do not count in the state; the
        kind `rounding` has the distances with them.
        """
        tensors = self._tensors
        self._tensors = {}
        if not self._keeps:
            return {}
        if self._reference is None:
            self._folder.mkdir(exist_ok=True)
            save_file(tensors, self._folder / f"{step}.safetensors")
            return {}
        file = self._reference / "tensors" / f"{step}.safetensors"
        reference: dict[str, torch.Tensor] = {}
        if file.exists():
            reference = load_file(file)
        self._find_rounded(tensors, reference)
        return self._distances(tensors, reference)

    def _find_rounded(
        self, tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> None:
        expected = {key: value for key, value in reference.items() if key.startswith("gradients/")}
        small = _MIN_SCALE * max(map(max_abs, expected.values()), default=0.0)
        for key, value in expected.items():
            gradient = tensors.get(key)
            if gradient is not None and value.shape == gradient.shape:
                size = value.double().abs()
                difference = (gradient.double() - value.double()).abs()
                accuracy = torch.finfo(gradient.dtype).eps ** 0.5
                rounded = (size < small) & (difference > accuracy * size)
                name = key.partition("/")[2]
                # For all later steps, too: weights and optimizer keep the difference.
                self._rounded[name] = self._rounded.get(name, False) | rounded

    def _distances(
        self, tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> dict[str, dict[str, float]]:
        largest: dict[str, float] = {}
        for key, tensor in reference.items():
            kind = key.partition("/")[0]
            largest[kind] = max(largest.get(kind, 0.0), max_abs(tensor))
        result: dict[str, dict[str, float]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            distances = result.setdefault(kind, {})
            expected = reference.get(key)
            if expected is None:
                distances[name] = float("inf")
            elif digest(tensor) != digest(expected):
                scale = _MIN_SCALE * largest[kind]
                distances[name] = size = distance(tensor, expected, scale)
                rounded = self._rounded.get(name.partition("/")[0])
                if rounded is None or not rounded.shape == tensor.shape == expected.shape:
                    continue
                if kind in ("state", "optimizer") and bool(rounded.any()):
                    result.setdefault("rounding", {})[name] = size
                    kept = torch.where(rounded, expected, tensor)
                    distances[name] = distance(kept, expected, scale)
        return result
