"""Weights that a model starts from, and parameters that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file

from samestep.errors import DataError, RecipeError


@dataclass(frozen=True)
class Matched:
    """What of a file of weights was taken.

    Attributes:
        taken: names of tensors that are now the file's.
        left_out: one line for every tensor of the model or the file that has no counterpart.
    """

    taken: tuple[str, ...]
    left_out: tuple[str, ...]


def take_matching(model: torch.nn.Module, file: Path) -> Matched:
    """Set the tensors of `model` whose name and shape are in `file`.

    Raises:
        DataError: the file is not there, is not weights, or nothing in it matches.
    """
    given = _read(file)
    own = model.state_dict()
    taken = [name for name in own if name in given and given[name].shape == own[name].shape]
    left_out = [
        f"{name}: {tuple(own[name].shape)} here, "
        + (f"{tuple(given[name].shape)} in the file" if name in given else "not in the file")
        for name in own
        if name not in taken
    ]
    left_out += [f"{name}: only in the file" for name in given if name not in own]
    if not taken:
        raise DataError(
            f"no tensor of {file} has the name and shape of one of the model's",
            rule="names of weights are the model's own",
            do="look at the first names: " + ", ".join([*list(given)[:2], "against", *list(own)[:2]]),
        )
    model.load_state_dict({name: given[name] for name in taken}, strict=False)
    return Matched(tuple(taken), tuple(left_out))


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Take the gradient from parameters whose name matches one of `patterns`; their names.

    Raises:
        RecipeError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=2, cutoff=0.3)
            raise RecipeError(
                f"model.freeze: {pattern!r} matches no parameter",
                rule="shell patterns of parameter names, such as layer1.*",
                do=f"names like {', '.join(close or names[:2])}",
            )
    frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(frozen) == len(names):
        raise RecipeError(
            "model.freeze matches every parameter", rule="something is left to train", do="freeze fewer of them"
        )
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def _read(file: Path) -> dict[str, torch.Tensor]:
    if not file.is_file():
        raise DataError(f"there is no file {file}", rule="model.pretrained is a file of weights", do="look at the path")
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of damaged files raise of many kinds, each of them means this
        raise DataError(
            f"{file} cannot be read as weights: {error}",
            rule="safetensors, or a torch file of plain tensors",
            do="save it again with safetensors.torch.save_file(model.state_dict(), ...)",
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DataError(f"{file} holds no plain weights", rule="a mapping of names to tensors", do="save a state_dict")
    return found
