"""The tensors of a step: written by one trial, measured against by others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from samestep.tools.verify.digest import digest, distance, largest_element, leaves
from samestep.tools.verify.plan import Trial

# The gradient of a bias before batch norm is zero, and what is computed for it nothing but rounding: a tensor so much
# smaller than the largest of its kind is measured as if it were this part of that.
_LEAST = 1e-2
KINDS = ("outputs", "gradients", "state", "optimizer")


class Values:
    """What a rank computed in one step, by kind and name.

    Rank 0 stands for all where ranks hold the same; outputs are each rank's own.
    """

    def __init__(self, trial: Trial, rank: int) -> None:
        self._trial, self._rank = trial, rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_wanted = trial.values or trial.reference is not None

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take tensors, or trees of them, as they are now."""
        if self._is_wanted and (self._rank == 0 or kind == "outputs"):
            for name, value in values.items():
                for path, leaf in leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        key = f"{kind}/{name}" + (f"/{path}" if path else "")
                        self._tensors[key] = leaf.detach().cpu().contiguous().clone()

    def settle(self, step: int) -> dict[str, dict[str, float]]:
        """Write the step's tensors, or give their distances from the reference's by kind and name, if not 0."""
        tensors, self._tensors = self._tensors, {}
        if self._trial.values:
            folder = self._trial.folder / "values"
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / f"{step}-{self._rank}.safetensors")
        if self._trial.reference is None:
            return {}
        return _distances(tensors, _read(self._trial.reference / "values", step))


def state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: parameters, and buffers that are saved."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                found[f"{path}.{key}" if path else key] = buffer
    return found


def _read(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(f"{step}-*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _distances(tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    largest: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for key, tensor in reference.items():
        kind = key.partition("/")[0]
        largest[kind] = max(largest[kind], largest_element(tensor))
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if key not in reference:
            found[kind][name] = float("inf")
        elif digest(tensor) != digest(reference[key]):
            found[kind][name] = distance(tensor, reference[key], _LEAST * largest[kind])
    return found
