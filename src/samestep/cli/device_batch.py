"""`--per-device-batch-size`: a global batch size, said as what each process gets of it."""

from __future__ import annotations

import argparse
from typing import Any

from samestep.cli import ranks
from samestep.config import Recipe
from samestep.errors import InputError
from samestep.sharding import require_enough_shards


def add_option(parser: Any) -> None:
    """Describe the option."""
    parser.add_argument(
        "--per-device-batch-size",
        type=int,
        metavar="N",
        help="set batch_size to N times --processes, once and for all: the run keeps it on any number of processes",
    )


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The overrides of a command, that of the batch size among them.

    Raises:
        InputError: the option cannot be, or batch_size would depend on the machine or be said twice.
    """
    given: list[str] = arguments.overrides
    size, processes = arguments.per_device_batch_size, arguments.processes
    if size is None:
        return given
    if size < 1:
        raise InputError(
            f"--per-device-batch-size {size}", rule="at least 1 sample a device", do="--per-device-batch-size 32"
        )
    if not processes.isdigit():
        raise InputError(
            f"--per-device-batch-size {size} with --processes {processes}",
            rule="batch_size counts the samples of all processes together, and no machine decides it",
            do=f"say the number, as --processes 2 for batch_size={2 * size}; or --set batch_size={2 * size} instead",
        )
    said = [override for override in given if override.partition("=")[0] == "batch_size"]
    if said:
        raise InputError(
            f"--per-device-batch-size {size} and --set {said[-1]}",
            rule="the global batch size is said once",
            do="leave one of them out",
        )
    return [*given, f"batch_size={size * ranks.number_of_processes(processes)}"]


def told(arguments: argparse.Namespace, recipe: Recipe) -> str | None:
    """What the option came to, in words; None where it was not given.

    Raises:
        InputError: there are fewer shards than processes.
    """
    size = arguments.per_device_batch_size
    if size is None:
        return None
    count = ranks.number_of_processes(arguments.processes)
    require_enough_shards(recipe.shards, count)
    return (
        f"global batch {recipe.batch_size} = {size} per device x {count} process{'es' if count > 1 else ''}; "
        "it is written to the recipe, and stays when the run is resumed on another number of processes"
    )
