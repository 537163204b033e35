"""Tensors of a step on a rank, and their distances from those of another trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from samestep.tools.verify.digest import digest, leaves
from samestep.tools.verify.trials import Trial

# Smallest scale of a distance, relative to the largest tensor of the same kind. The gradient of a bias before batch
# norm, for example, is zero except for rounding.
_MIN_SCALE = 1e-2


def distance(value: torch.Tensor, reference: torch.Tensor, min_scale: float = 0.0) -> float:
    """Return the largest difference of two elements, relative to the largest element of `reference`.

    The scale is per tensor and not per element: elements that cancel to almost zero have no accuracy.

    Args:
        value: tensor to compare.
        reference: tensor with the scale.
        min_scale: lower bound of the scale.

    Returns:
        Infinity if shapes, dtypes or the positions of non-finite elements differ.
    """
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    one, other = reference.detach().cpu().double(), value.detach().cpu().double()
    if bool((torch.isfinite(one) != torch.isfinite(other)).any()):
        return float("inf")
    largest = float((other - one).nan_to_num(posinf=0.0).abs().max())
    scale = max(min_scale, max_abs(reference))
    if largest == 0.0:
        return 0.0
    return largest / scale if scale else float("inf")


def max_abs(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of an element; 0 if no element is finite."""
    return float(tensor.detach().cpu().double().abs().nan_to_num(posinf=0.0).max()) if tensor.numel() else 0.0


class StepTensors:
    """Tensors of one step on one rank, by kind (outputs, gradients, state, optimizer) and name.

    Only rank 0 keeps tensors that are equal on all ranks; each rank keeps its own outputs.
    """

    def __init__(self, trial: Trial, rank: int) -> None:
        self._trial, self._rank = trial, rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._rounded: dict[str, torch.Tensor] = {}  # elements whose gradient was accurate to rounding only, by name

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Copy the tensors in nested data, if the trial writes or compares tensors."""
        is_needed = self._trial.writes_tensors or self._trial.reference is not None
        if not is_needed or (self._rank > 0 and kind != "outputs"):
            return
        for name, value in values.items():
            for path, leaf in leaves(value):
                if isinstance(leaf, torch.Tensor):
                    key = f"{kind}/{name}/{path}" if path else f"{kind}/{name}"
                    self._tensors[key] = leaf.detach().cpu().contiguous().clone()

    def end_step(self, step: int) -> dict[str, dict[str, float]]:
        """Write the tensors, or return their distances from the reference by kind and name, if not zero.

        A gradient that is zero in exact arithmetic, such as that of the bias of an attention key, is rounding, which
        optimizers such as Adam scale to a full step. Under a tolerance, elements whose gradients are within the
        tolerance of the largest one, but not of their own size, do not count in the state; the kind `rounding` has the
        distances with them.
        """
        tensors, self._tensors = self._tensors, {}
        if self._trial.writes_tensors:
            folder = self._trial.folder / "tensors"
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / f"{step}-{self._rank}.safetensors")
        if self._trial.reference is None:
            return {}
        reference: dict[str, torch.Tensor] = {}
        for file in sorted((self._trial.reference / "tensors").glob(f"{step}-*.safetensors")):
            reference |= load_file(file)
        if self._trial.tolerance is not None:
            self._find_rounded(tensors, reference, self._trial.tolerance)
        return self._distances(tensors, reference)

    def _find_rounded(
        self, tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], tolerance: float
    ) -> None:
        for key, gradient in tensors.items():
            kind, _, name = key.partition("/")
            expected = reference.get(key)
            if kind == "gradients" and expected is not None and expected.shape == gradient.shape:
                rounded = (gradient.double() - expected.double()).abs() > tolerance * expected.double().abs()
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
            distances, expected = result.setdefault(kind, {}), reference.get(key)
            if expected is None:
                distances[name] = float("inf")
            elif digest(tensor) != digest(expected):
                min_scale = _MIN_SCALE * largest[kind]
                distances[name] = size = distance(tensor, expected, min_scale)
                rounded = self._rounded.get(name.partition("/")[0])
                if rounded is None or not rounded.shape == tensor.shape == expected.shape:
                    continue
                if kind in ("state", "optimizer") and size > (self._trial.tolerance or 0.0):
                    result.setdefault("rounding", {})[name] = size
                    distances[name] = distance(torch.where(rounded, expected, tensor), expected, min_scale)
        return result
