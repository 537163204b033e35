"""`samestep tune`: what this machine decides about a run, found by short trials."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli import layouts, member, options, ranks
from samestep.cli.sizes import size
from samestep.config import Recipe, RunOptions
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.recipes.parse import load_recipe, shipped_recipes
from samestep.tools.tune.rules import RULES
from samestep.tools.tune.setting import PREFETCH, WORKERS, grid

if TYPE_CHECKING:
    from samestep.tools.tune.tuning import Tuning, Wishes

_ROUNDS = 5


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "tune",
        help="find how many workers a recipe needs on this machine",
        description="Find by short trials how many loader workers and how much prefetch a recipe needs on this "
        "machine, whether its shards fit into memory, and what threads, channels-last and compilation would gain. What "
        "changes no result is written down, and train and resume take it up; what does is told, and yours to set.",
        epilog="example: samestep tune digits --processes 2 --workers 0,1,2 --try threads",
    )
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    options.add_set_option(parser)
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--processes", metavar="N", help="number of ranks, or auto: one a GPU, or one a core where there is none"
    )
    options.add_devices_option(group)
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute")
    group.add_argument(
        "--memory", metavar="SIZE", help="what a rank may take at most, such as 2GiB: do the shards fit into that?"
    )
    layouts.add_options(parser)
    group = parser.add_argument_group("what is tried")
    group.add_argument(
        "--workers",
        default=",".join(map(str, WORKERS)),
        metavar="N,N,...",
        help="loader processes (default %(default)s)",
    )
    group.add_argument(
        "--prefetch", default=",".join(map(str, PREFETCH)), metavar="N,N,...", help="shards ahead (default %(default)s)"
    )
    group.add_argument(
        "--try",
        dest="rules",
        default=",".join(RULES),
        metavar="RULE,...",
        help="of what changes bits, or none (default %(default)s; compile takes half a minute by itself)",
    )
    group.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of a turn, about (default %(default)s)")
    group = parser.add_argument_group("where it goes")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    group.add_argument("--no-picture", action="store_true", help="tune.json alone")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune and print; 3 where the shards do not fit into memory, and then nothing is written."""
    # Imported here: the other commands have no use for them.
    from samestep.record.confusion import require_pictures
    from samestep.tools.tune import page
    from samestep.tools.tune.choice import Place, machine, write

    member.refuse_launchers("tune")
    recipe = load_recipe(arguments.recipe, [*layouts.overrides(arguments), *arguments.overrides])
    wishes = _wishes(arguments)
    processes = _processes(arguments, recipe)
    if not arguments.no_picture:
        require_pictures("picture")
    name = Path(arguments.recipe).stem
    place = Place.of(name, recipe, processes, machine(arguments.device))
    try:
        with options.new_folder(place.folder(arguments.runs), name) as folder:
            tuning = _tuned(arguments, place, recipe, wishes)
            if tuning.found is None:
                raise _DoesNotFit(tuning)
            if not arguments.no_picture:
                title = f"{name} on {processes} rank{'s' if processes > 1 else ''}, {tuning.machine['device']}"
                page.draw(tuning.found, title, folder / "tune.png")
            write(folder, tuning.as_data())
    except _DoesNotFit as error:
        _show(arguments, error.tuning, wishes, None)
        return EXIT_DIFFERS
    _show(arguments, tuning, wishes, folder)
    if not arguments.json:
        print(f"{'written':<20}{folder / 'tune.json'}{'' if arguments.no_picture else ', tune.png beside it'}")
        print(f"{'taken up by':<20}samestep train {arguments.recipe} --processes {processes}{_as_here(arguments)}")
    return EXIT_DONE


def _as_here(arguments: argparse.Namespace) -> str:
    """What a command that trains must be told too, to find what was written."""
    words = ["--set", *arguments.overrides] if arguments.overrides else []
    given = {"strategy": None, "mesh": None, "device": "auto", "devices": None, "runs": Path("runs")}
    for name, default in given.items():
        if getattr(arguments, name) != default:
            words += [f"--{name}", str(getattr(arguments, name))]
    return "".join(f" {shlex.quote(word)}" for word in words)


class _DoesNotFit(Exception):
    """There is not enough memory, so nothing is to be left behind."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__()
        self.tuning = tuning


def _show(arguments: argparse.Namespace, tuning: Tuning, wishes: Wishes, folder: Path | None) -> None:
    from samestep.tools.tune import page

    if arguments.json:
        options.print_json({**tuning.as_data(), "folder": str(folder) if folder else None})
    else:
        page.show(tuning, len(wishes.settings))


def _tuned(arguments: argparse.Namespace, place: Any, recipe: Recipe, wishes: Wishes) -> Tuning:
    from samestep.tools.bench.machine import describe
    from samestep.tools.tune.tuning import tune

    def tell(text: str) -> None:
        if not arguments.json:
            print(text, file=sys.stderr, flush=True)

    return tune(place, recipe, wishes, describe(place.machine["gpus"]), tell)


def _wishes(arguments: argparse.Namespace) -> Wishes:
    from samestep.tools.tune.tuning import Wishes

    rules = [] if arguments.rules == "none" else arguments.rules.split(",")
    unknown = [name for name in rules if name not in RULES]
    if unknown:
        raise InputError(f"--try {arguments.rules}", rule=f"none, or of {', '.join(RULES)}", do="--try threads")
    if not 0 < arguments.seconds < 600:
        raise InputError(f"--seconds {arguments.seconds:g}", rule="more than 0, less than 600", do="--seconds 0.5")
    workers = options.numbers("--workers", arguments.workers, least=0)
    prefetch = options.numbers("--prefetch", arguments.prefetch)
    devices = ranks.devices(arguments.devices, arguments.device)
    return Wishes(
        settings=grid(workers, prefetch),
        rules=rules,
        memory=size("--memory", arguments.memory) if arguments.memory is not None else None,
        seconds=arguments.seconds,
        rounds=_ROUNDS,
        options=RunOptions(device=arguments.device, quiet=arguments.json),
        preload=ranks.EVALUATING,
        environment=devices.variables() if devices else None,
    )


def _processes(arguments: argparse.Namespace, recipe: Recipe) -> int:
    member.settled(arguments)
    if ":" in arguments.processes:
        raise InputError(
            f"--processes {arguments.processes}", rule="a positive number, or auto", do="tune for each number by itself"
        )
    devices = ranks.devices(arguments.devices, arguments.device)
    _, count = ranks.bounds(arguments.processes, arguments.device, recipe, devices)
    return count
