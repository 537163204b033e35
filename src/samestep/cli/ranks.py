"""How many ranks a command starts, and starting them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from samestep.config import Recipe, settle
from samestep.errors import InputError
from samestep.runtime.by_name import ByName
from samestep.runtime.crew import Terms
from samestep.runtime.devices import Devices, chosen
from samestep.runtime.env import read_environment
from samestep.runtime.launch import Outcome, launch, run_crew
from samestep.runtime.processors import read_processors

# Imported once for all ranks, beside what the launcher itself names.
PRELOAD = ("samestep.recipes.run", "samestep.recipes.digits")
# For commands that evaluate sooner or later in each rank they start; training has its first step sooner without.
EVALUATING = (*PRELOAD, "samestep.runtime.counting")


def launch_ranks(
    function: str,
    recipe: Recipe,
    *arguments: Any,
    processes: int,
    terms: Terms,
    devices: Devices | None = None,
    preload: Sequence[str] = PRELOAD,
) -> Outcome:
    """Run a function of `samestep.recipes.run` in that many ranks."""
    named = ByName("samestep.recipes.run", function)
    environment = devices.variables() if devices else None
    return run_crew(
        named, recipe, *arguments, processes=processes, terms=terms, preload=preload, environment=environment
    )


def devices(text: str | None, device: str) -> Devices | None:
    """What `--devices` says, if it is given.

    Raises:
        InputError: it names devices that are not there, or `--device` says that none are wanted.
    """
    if text is None:
        return None
    if device == "cpu":
        raise InputError(f"--devices {text} with --device cpu", rule="devices are GPUs", do="leave one of them out")
    return chosen(text, read_environment().visible_devices, len(gpu_names()))


def bounds(
    processes: str, device: str, recipe: Recipe | None = None, devices: Devices | None = None
) -> tuple[int, int]:
    """With how few ranks a run goes on, and with how many it begins: what `--processes` says.

    Raises:
        InputError: it is not `N`, `auto`, `MIN:MAX` or `MIN:auto`, there are fewer devices than ranks, or the recipe's
            strategy has no layout on so many.
    """
    least, colon, most = processes.partition(":")
    if not colon:
        most = least
    count = _auto(device, recipe, devices) if most == "auto" else number_of_processes(most)
    if devices is not None and count > len(devices.names):
        raise InputError(
            f"--processes {processes} with {len(devices.names)} devices",
            rule="a rank gets a GPU of its own",
            do="leave --processes out for one rank a device, or name more devices",
        )
    fewest = number_of_processes(least) if colon else count
    if recipe is not None:
        for number in (count, fewest):
            settle(recipe.strategy, number, recipe.shards)
    return fewest, count


def number_of_processes(text: str) -> int:
    """What `--processes` says where it is a number.

    Raises:
        InputError: it is none.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(f"--processes {text}", rule="a positive number, auto, or MIN:MAX", do="--processes 2")
    return int(text)


def _auto(device: str, recipe: Recipe | None, devices: Devices | None) -> int:
    if devices is not None:
        found = len(devices.names)
    else:
        found = (len(gpu_names()) if device != "cpu" else 0) or read_processors().usable
    if recipe is None:
        return found
    if recipe.strategy.name == "dp":
        return 1
    if recipe.strategy.name == "placed":
        found = max(1, found // (recipe.strategy.devices or found))
    divided = math.prod(size for axis, size in recipe.strategy.mesh.given.items() if axis in ("pipeline", "tensor"))
    return min(recipe.shards * divided, found)


def gpu_names(preload: Sequence[str] = PRELOAD) -> list[str]:
    """What the GPUs of this machine are called, in torch's order.

    Args:
        preload: what ranks that are started afterwards need.
    """
    # Asked in a fork of the warm server: this process does not import torch.
    names: list[str] = launch(ByName("samestep.recipes.run", "gpu_names"), processes=1, preload=preload)
    return names
