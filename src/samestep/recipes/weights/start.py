"""Weights that a model starts from, and parameters that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from samestep.config.patterns import chosen
from samestep.engine.checksum import checksum
from samestep.errors import DataError, RecipeError
from samestep.recipes.weights.paddle import read_pdparams
from samestep.recipes.weights.wrapped import unwrapped
from samestep.runtime.gather import all_gather
from samestep.runtime.majority import odd_ranks, ranks_text
from samestep.runtime.world import World


@dataclass(frozen=True)
class Matched:
    """What of a file of weights was taken.

    Attributes:
        taken: names of tensors that are now the file's.
        left_out: one line for every tensor of the model or the file that has no counterpart.
        taken_off: one line for everything that was wrapped around the file's weights.
    """

    taken: tuple[str, ...]
    left_out: tuple[str, ...]
    taken_off: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """All of it, as a person should be told."""
        total = f"pretrained: {len(self.taken)} tensors taken, {len(self.left_out)} left out"
        wrapped = (f"pretrained: {line}" for line in self.taken_off)
        return (*wrapped, total, *(f"  left out {line}" for line in self.left_out))


def take_matching(model: torch.nn.Module, file: Path) -> Matched:
    """Set the tensors of `model` whose name and shape are in `file`; the head of another task is left out so.

    Raises:
        DataError: the file is not there, is not weights, or nothing in it matches.
    """
    own = model.state_dict()
    given, taken_off = unwrapped(_read(file), own, file)
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
    return Matched(tuple(taken), tuple(left_out), taken_off)


def require_same_weights(model: torch.nn.Module, world: World) -> None:
    """See that all ranks begin with the same bits; all of them call it.

    Each rank reads the file by itself, so no rank waits for a copy; that they have read the same is seen here.

    Raises:
        DataError: they have not; on every rank, with the same words.
    """
    found = dict(enumerate(all_gather(checksum(model.state_dict().values()), world)))
    if len(set(found.values())) > 1:
        odd = odd_ranks(found) or list(found)
        raise DataError(
            f"{ranks_text(odd)} read other weights than the rest",
            rule="model.pretrained is the same file for every rank",
            do="compare the files on all machines: sha256sum",
        )


def take_all(model: torch.nn.Module, file: Path) -> None:
    """Set every tensor of `model` to the file's.

    Raises:
        DataError: the file is not there, is not weights, or is not those of the whole model and of nothing else.
    """
    own = model.state_dict()
    given, _ = unwrapped(_read(file), own, file)
    missing = [name for name in own if name not in given]
    reshaped = [
        f"{name}: {tuple(own[name].shape)} here, {tuple(given[name].shape)} in the file"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    unknown = [name for name in given if name not in own]
    if missing or reshaped or unknown:
        parts = {"missing": missing, "of another shape": reshaped, "only in the file": unknown}
        told = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in parts.items() if names]
        raise DataError(
            f"{file} is not this model's: {'; '.join(told)}",
            rule="all tensors match in name and shape; half a model is not evaluated",
            do="correct the model's options (num_classes?), or train from what matches: --set model.pretrained=FILE",
        )
    model.load_state_dict(given)


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Take the gradient from parameters whose name matches one of `patterns`; their names.

    Raises:
        RecipeError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = chosen(names, patterns, key="model.freeze", what="parameter", example="layer1.*")
    if len(frozen) == len(names):
        raise RecipeError(
            "model.freeze matches every parameter", rule="something is left to train", do="freeze fewer of them"
        )
    parameters = dict(model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def _read(file: Path) -> Any:
    if not file.is_file():
        raise DataError(f"there is no file {file}", rule="model.pretrained is a file of weights", do="look at the path")
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        if file.suffix == ".pdparams":
            return read_pdparams(file).tensors
        return torch.load(file, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # readers of damaged files raise of many kinds, each of them means this
        raise DataError(
            f"{file} cannot be read as weights: {error}",
            rule="safetensors, a torch file of plain tensors, or a .pdparams file of PaddleViT's ViT",
            do="save it again with safetensors.torch.save_file(model.state_dict(), ...)",
        ) from error
