"""How many ranks a command starts, and starting them."""

from __future__ import annotations

from typing import Any

from samestep.config import Recipe
from samestep.errors import InputError
from samestep.runtime.by_name import ByName
from samestep.runtime.crew import Terms
from samestep.runtime.devices import Devices, chosen
from samestep.runtime.env import read_environment
from samestep.runtime.launch import Outcome, launch, run_crew
from samestep.sharding import require_enough_shards

# Imported once for all ranks, beside what the launcher itself names.
PRELOAD = ("samestep.recipes.run", "samestep.recipes.digits")


def launch_ranks(
    function: str, recipe: Recipe, *arguments: Any, processes: int, terms: Terms, devices: Devices | None = None
) -> Outcome:
    """Run a function of `samestep.recipes.run` in that many ranks."""
    named = ByName("samestep.recipes.run", function)
    environment = devices.variables() if devices else None
    return run_crew(
        named, recipe, *arguments, processes=processes, terms=terms, preload=PRELOAD, environment=environment
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
    return chosen(text, read_environment().visible_devices, _gpus())


def bounds(processes: str, device: str, shards: int | None = None, devices: Devices | None = None) -> tuple[int, int]:
    """With how few ranks a run goes on, and with how many it begins: what `--processes` says.

    Raises:
        InputError: it is not `N`, `auto`, `MIN:MAX` or `MIN:auto`, or there are fewer shards, or devices, than ranks.
    """
    least, colon, most = processes.partition(":")
    if not colon:
        most = least
    count = _auto(device, shards, devices) if most == "auto" else number_of_processes(most)
    if devices is not None and count > len(devices.names):
        raise InputError(
            f"--processes {processes} with {len(devices.names)} devices",
            rule="a rank gets a GPU of its own",
            do="leave --processes out for one rank a device, or name more devices",
        )
    if shards is not None:
        require_enough_shards(shards, count)
    return (number_of_processes(least) if colon else count), count


def number_of_processes(text: str) -> int:
    """What `--processes` says where it is a number.

    Raises:
        InputError: it is none.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(f"--processes {text}", rule="a positive number, auto, or MIN:MAX", do="--processes 2")
    return int(text)


def _auto(device: str, shards: int | None, devices: Devices | None) -> int:
    if devices is not None:
        found = len(devices.names)
    else:
        found = (_gpus() if device != "cpu" else 0) or read_environment().cores
    return min(shards, found) if shards is not None else found


def _gpus() -> int:
    # Asked in a fork of the warm server: this process does not import torch.
    return int(launch(ByName("samestep.recipes.run", "count_gpus"), processes=1, preload=PRELOAD))
