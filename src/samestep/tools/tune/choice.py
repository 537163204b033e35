"""What was chosen for a recipe on a machine: written once, found again by whoever trains it there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.config import Recipe
from samestep.recipes.parse import differences, recipe_data
from samestep.record.events import several_lines
from samestep.runtime.processors import read_processors
from samestep.tools.bench.machine import processor
from samestep.tools.doctor.nvidia import read_nvidia
from samestep.tools.tune.setting import Choice

FOLDER, FILE = "tunings", "tune.json"
# What of a recipe decides how long shards and steps take; not how many steps there are, or what they lead to.
_PARTS = ("data", "model", "loss", "batch_size", "shards", "strategy")
_RULES = ("batch_norm", "precision", "threads", "tf32", "channels_last", "compile", "recompute")


@dataclass(frozen=True)
class Place:
    """For what a choice is made.

    Attributes:
        name: of the recipe, as it was given; None where that is not known.
        recipe: what of it decides how long things take.
        machine: as `machine` describes it.
    """

    name: str | None
    recipe: dict[str, Any]
    processes: int
    machine: dict[str, Any]

    @classmethod
    def of(cls, name: str | None, recipe: Recipe, processes: int, machine: dict[str, Any]) -> Place:
        """The place of a recipe on so many ranks of a machine."""
        data = recipe_data(recipe)
        parts = {key: data[key] for key in _PARTS}
        return cls(name, {**parts, "step": {key: data["step"][key] for key in _RULES}}, processes, machine)

    @property
    def key(self) -> str:
        """A short name that another place does not have."""
        said = json.dumps([self.recipe, self.processes, self.machine], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    def folder(self, runs: Path) -> Path:
        """Where the choice is kept."""
        return runs / FOLDER / f"{self.name}-{self.processes}-{self.key}"

    def as_data(self) -> dict[str, Any]:
        """As it is written beside a choice."""
        return {"name": self.name, "recipe": self.recipe, "processes": self.processes, "machine": self.machine}


def machine(device: str) -> dict[str, Any]:
    """What of this machine decides how long things take.

    Args:
        device: what ranks are told to compute on; with `cpu` its GPUs do not matter.
    """
    gpus = [] if device == "cpu" else [card.name for card in read_nvidia().cards]
    return {"processor": processor(), "cores": read_processors().usable, "gpus": gpus}


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write what was found, whole or not at all; the file."""
    path = folder / FILE
    aside = path.with_suffix(".part")
    aside.write_text(several_lines(data), encoding="utf-8")
    os.replace(aside, path)
    return path


def is_any(runs: Path) -> bool:
    """Whether anything was ever tuned for this folder of runs."""
    return any((runs / FOLDER).glob(f"*/{FILE}"))


def find(runs: Path, place: Place) -> tuple[Choice | None, list[str]]:
    """The choice for a place, and what is to be told of files that cannot be used."""
    told: list[str] = []
    for path in sorted((runs / FOLDER).glob(f"*/{FILE}")):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            of, choice = said["place"], Choice(said["choice"]["workers"], said["choice"]["prefetch"], str(path))
            is_here = (of["processes"], of["machine"]) == (place.processes, place.machine)
            changed = differences(of["recipe"], place.recipe)
            if not (type(choice.workers) is type(choice.prefetch) is int and choice.workers >= 0 < choice.prefetch):
                raise ValueError(f"workers {choice.workers}, prefetch {choice.prefetch}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            told.append(f"{path} is not used: it cannot be read ({type(error).__name__}: {error})")
            continue
        if is_here and not changed:
            return choice, told
        if is_here and of["name"] == place.name:
            told.append(f"{path} is not used: it was found for another recipe ({'; '.join(changed[:3])})")
    return None, told
