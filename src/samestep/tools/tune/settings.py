"""Loader settings, which change no result: candidates of `samestep tune`, and the files with the chosen ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import replacing
from samestep.config import DEFAULT_PREFETCH, Recipe
from samestep.distributed.resources import read_processors
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import differences, recipe_data
from samestep.tools.timing import processor_name
from samestep.units import plural

WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
PREFETCH = (2, 4, 8)
THREADS, CHANNELS_LAST, COMPILE, GRAPHS = "threads", "channels-last", "compile", "cuda-graphs"
STEP_OPTIONS = (THREADS, CHANNELS_LAST, COMPILE, GRAPHS)  # options of a step; all except graphs change bits
FOLDER, FILE = "tunings", "tune.json"
# Keys of a recipe that determine the time of a microbatch and of a step.
_RECIPE_KEYS = ("data", "model", "loss", "batch_size", "microbatches", "strategy")
_STEP_KEYS = (
    "batch_norm",
    "precision",
    "threads",
    "tf32",
    "channels_last",
    "compile",
    "cuda_graphs",
    "recompute",
    "tensor_slices",
    "tensor_plan",
)


@dataclass(frozen=True, order=True)
class Setting:
    """Loader setting of a run."""

    workers: int  # loader processes of each rank
    prefetch: int = DEFAULT_PREFETCH  # microbatches that each of them loads in advance; without effect for 0 workers

    def __str__(self) -> str:
        if not self.workers:
            return "no workers"
        return f"{plural(self.workers, 'worker')}, prefetch {self.prefetch}"


@dataclass(frozen=True)
class TunedSetting:
    """Setting from the file `path`."""

    workers: int
    prefetch: int
    path: str


def grid(workers: Sequence[int], prefetch: Sequence[int]) -> list[Setting]:
    """Return all combinations; 0 workers have one."""
    several = [Setting(count, ahead) for count in sorted({*workers}) if count for ahead in sorted({*prefetch})]
    return [Setting(0), *several] if 0 in workers else several


@dataclass(frozen=True)
class TuneTarget:
    """Recipe, machine and number of ranks for which a setting is chosen."""

    name: str | None  # name of the recipe; None if unknown
    recipe: dict[str, Any]  # keys of the recipe that determine the time of a step
    processes: int
    machine: dict[str, Any]  # result of `machine_key`

    @classmethod
    def of(cls, name: str | None, recipe: Recipe, processes: int, machine: dict[str, Any]) -> TuneTarget:
        """Return the target of a recipe on `processes` ranks of a machine."""
        data = recipe_data(recipe)
        parts = {key: data[key] for key in _RECIPE_KEYS}
        return cls(name, {**parts, "step": {key: data["step"][key] for key in _STEP_KEYS}}, processes, machine)

    def folder(self, runs: Path) -> Path:
        """Return the folder of the target's file, which no other target has."""
        text = json.dumps([self.recipe, self.processes, self.machine], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        return runs / FOLDER / f"{self.name}-{self.processes}-{key}"


def machine_key(device: str) -> dict[str, Any]:
    """Return the properties of this machine that determine the time of a step.

    Args:
        device: `--device`; GPUs have no effect for `cpu`.
    """
    from samestep.tools.doctor.gpus import read_nvidia  # here: most commands need only the classes above

    gpus = [] if device == "cpu" else [gpu.name for gpu in read_nvidia().gpus]
    return {"processor": processor_name(), "cores": read_processors().usable, "gpus": gpus}


def write_tuning(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write the result of `samestep tune` atomically, and return the file."""
    path = folder / FILE
    with replacing(path) as temporary:
        temporary.write_text(to_json(data), encoding="utf-8")
    return path


def has_tunings(runs: Path) -> bool:
    """Return whether a folder of runs contains any tuning."""
    return any((runs / FOLDER).glob(f"*/{FILE}"))


def find_setting(runs: Path, target: TuneTarget) -> tuple[TunedSetting | None, list[str]]:
    """Return the setting for a target, and messages about files that cannot be used."""
    messages: list[str] = []
    for path in sorted((runs / FOLDER).glob(f"*/{FILE}")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            tuned, choice = data["place"], data["choice"]
            setting = TunedSetting(choice["workers"], choice["prefetch"], str(path))
            is_same_machine = (tuned["processes"], tuned["machine"]) == (target.processes, target.machine)
            changes = differences(tuned["recipe"], target.recipe)
            if not (type(setting.workers) is type(setting.prefetch) is int and setting.workers >= 0 < setting.prefetch):
                raise ValueError(f"workers {setting.workers}, prefetch {setting.prefetch}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            messages.append(f"{path} is ignored: it cannot be read ({type(error).__name__}: {error})")
            continue
        if is_same_machine and not changes:
            return setting, messages
        if is_same_machine and tuned["name"] == target.name:
            messages.append(f"{path} is ignored: the recipe has changed ({'; '.join(changes[:3])})")
    return None, messages
