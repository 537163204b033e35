"""Weights as trainers wrap them: under a key of a larger file, or with something put before every name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from samestep.errors import DataError

# Where trainers put the weights in a file that holds more; the first of these that is there counts.
_KEYS = ("state_dict", "model_state_dict", "model")
# What DDP, torch.compile and Lightning put before every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")

Tensors = dict[str, torch.Tensor]


def unwrapped(found: object, own: Mapping[str, torch.Tensor], file: Path) -> tuple[Tensors, tuple[str, ...]]:
    """The weights in what a file holds, by the names that they have by themselves, and a line for what was taken off.

    A prefix is taken off only where no name of `own`, the model's, begins with it.

    Raises:
        DataError: there are no plain weights in it, or two for one name.
    """
    removed: list[str] = []
    if isinstance(found, Mapping):
        key = next((key for key in _KEYS if isinstance(found.get(key), Mapping)), None)
        if key is not None:
            others = ", ".join(str(name) for name in found if name != key)
            removed.append(f"weights under {key!r}" + (f"; not looked at: {others}" if others else ""))
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DataError(f"{file} holds no plain weights", rule="a mapping of names to tensors", do="save a state_dict")
    given: Tensors = dict(found)
    while prefix := next((prefix for prefix in _PREFIXES if _is_put_before(prefix, given, own)), None):
        names = [name for name in given if name.startswith(prefix)]
        _require_one_each(prefix, names, given, file)
        given = {name.removeprefix(prefix): tensor for name, tensor in given.items()}
        removed.append(f"{prefix!r} taken off {len(names)} names")
    return given, tuple(removed)


def _is_put_before(prefix: str, given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> bool:
    return any(name.startswith(prefix) for name in given) and not any(name.startswith(prefix) for name in own)


def _require_one_each(prefix: str, names: list[str], given: Mapping[str, torch.Tensor], file: Path) -> None:
    for name in names:
        if name.removeprefix(prefix) in given:
            raise DataError(
                f"{file} has both {name} and {name.removeprefix(prefix)}",
                rule=f"one tensor a name, once {prefix!r} is taken off",
                do="save those that are meant: safetensors.torch.save_file",
            )
