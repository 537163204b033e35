"""Weights of a model: from files, equal on all ranks, frozen.

A file that is damaged or does not fit the model raises `DataError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from samestep.checkpoint.checksum import checksum
from samestep.distributed.status import odd_ranks, ranks_text
from samestep.distributed.world import World, all_gather
from samestep.errors import DataError
from samestep.strategies.divided_parameters import full_state_dict
from samestep.zoo.options import require_path
from samestep.zoo.paddle import read_pdparams

# Keys of checkpoints that contain the weights, in order of precedence.
_KEYS = ("state_dict", "model_state_dict", "model")
# Prefixes that DDP, torch.compile and Lightning add to every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoadedWeights:
    """Result of loading a file of weights."""

    taken: tuple[str, ...]  # names of the loaded tensors
    left_out: tuple[str, ...]  # one line per tensor of the model or the file without a counterpart
    unwrapped: tuple[str, ...]  # one line per removed key or prefix

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        total = f"pretrained: {len(self.taken)} tensors taken, {len(self.left_out)} left out"
        unwrapped = (f"pretrained: {line}" for line in self.unwrapped)
        return (*unwrapped, total, *(f"  left out {line}" for line in self.left_out))


def load_matching(model: torch.nn.Module, file: Path, prefix: str = "") -> LoadedWeights:
    """Load the tensors of `file` that match the model in name and shape; a head of another task is left out.

    The names in the model are those in the file after `prefix`, such as `encoder.`.
    """
    own = model.state_dict()
    tensors, removed = _unwrap(_read(file), own, file)
    if prefix:
        tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    taken = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    left_out = [_shapes(name, own, tensors) for name in own if name not in taken]
    left_out += [f"{name}: only in the file" for name in tensors if name not in own]
    if not taken:
        raise _weights_error(
            f"no tensor of {file} has the name and shape of a tensor of the model",
            expected="the tensor names of the model",
            fix=f"--set model.pretrained_prefix=PREFIX, or rename them: the model has {', '.join(list(own)[:2])}",
        )
    model.load_state_dict({name: tensors[name] for name in taken}, strict=False)
    return LoadedWeights(tuple(taken), tuple(left_out), removed)


def load_all(model: torch.nn.Module, file: Path) -> None:
    """Load every tensor of the model from `file`."""
    own = full_state_dict(model)
    tensors, _ = _unwrap(_read(file), own, file)
    problems = {
        "missing": [name for name in own if name not in tensors],
        "of another shape": [
            _shapes(name, own, tensors)
            for name in own
            if name in tensors and tensors[name].shape != own[name].shape
        ],
        "only in the file": [name for name in tensors if name not in own],
    }
    counts = [
        f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names
    ]
    if counts:
        raise _weights_error(
            f"the tensors of {file} differ from those of the model: {'; '.join(counts)}",
            expected="all tensors of the model with their names and shapes",
            fix="correct model.options (num_classes?), or train from the matching tensors: --set model.pretrained=FILE",
        )
    model.load_state_dict(tensors)


def check_same_weights(model: torch.nn.Module, world: World) -> None:
    """Check that all ranks have the same weights. A collective operation.

    Each rank reads the file of weights, so that no rank waits for a broadcast.
    """
    checksums = dict(enumerate(all_gather(checksum(model.state_dict()), world)))
    if len(set(checksums.values())) > 1:
        raise _weights_error(
            f"{ranks_text(odd_ranks(checksums) or list(checksums))} read other weights than the rest",
            expected="the same file in model.pretrained on every rank",
            fix="compare the files on all machines: sha256sum",
        )


def _unwrap(
    content: object, own: Mapping[str, torch.Tensor], file: Path
) -> tuple[Tensors, tuple[str, ...]]:
    """Return the weights of a file by their names in the model, and one line per removed key or prefix.

    A prefix is removed only if no name of the model starts with the prefix.
    """
    removed: list[str] = []
    if isinstance(content, Mapping):
        key = next((key for key in _KEYS if isinstance(content.get(key), Mapping)), None)
        if key is not None:
            others = ", ".join(str(name) for name in content if name != key)
            removed.append(f"weights under {key!r}" + (f"; ignored: {others}" if others else ""))
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        problem = f"{file} contains no plain weights"
        raise _weights_error(
            problem, expected="a mapping of names to tensors", fix="save a state_dict"
        )
    tensors: Tensors = dict(content)
    while prefix := next((prefix for prefix in _PREFIXES if _is_added(prefix, tensors, own)), None):
        names = [name for name in tensors if name.startswith(prefix)]
        for name in names:
            if name.removeprefix(prefix) in tensors:
                raise _weights_error(
                    f"{file} has both {name} and {name.removeprefix(prefix)}",
                    expected=f"one tensor per name without {prefix!r}",
                    fix="save one of the tensors: safetensors.torch.save_file",
                )
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        removed.append(f"{prefix!r} removed from {len(names)} names")
    return tensors, tuple(removed)


def _is_added(
    prefix: str, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> bool:
    return any(name.startswith(prefix) for name in tensors) and not any(
        name.startswith(prefix) for name in own
    )


def _shapes(name: str, own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    there = tuple(tensors[name].shape) if name in tensors else "not"
    return f"{name}: {tuple(own[name].shape)} here, {there} in the file"


def _weights_error(problem: str, expected: str, fix: str) -> DataError:
    return DataError(problem, expected=expected, fix=fix, code="E_WEIGHTS")


def _read(file: Path) -> Any:
    require_path(file, "file", "a file of weights")
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        if file.suffix == ".pdparams":
            return read_pdparams(file).tensors
        return torch.load(file, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # damaged files raise exceptions of many types
        raise DataError(
            f"{file} cannot be read as weights: {error}",
            expected="safetensors, a torch file of plain tensors, or a .pdparams file of PaddleViT's ViT",
            fix="save the weights again with safetensors.torch.save_file(model.state_dict(), ...)",
            code="E_UNREADABLE",
        ) from error
