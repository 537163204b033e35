"""`samestep run`: a person's own script, on several processes."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

from samestep.cli import member, options, ranks
from samestep.cli.restarts import add_fault_options, keep_going
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError
from samestep.runtime.by_name import ByName
from samestep.runtime.crew import Terms
from samestep.runtime.launch import Outcome, run_crew


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "run",
        help="run a script of your own",
        description="Run a script on several processes of this machine: one that uses samestep.start(), or one written "
        "for torchrun, whose variables are set. Output of ranks other than 0 goes to files.",
        epilog="example: samestep run --processes 2 train.py --epochs 3",
    )
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script is given")
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--processes",
        default="auto",
        metavar="N",
        help="number of ranks; auto: one a GPU, or one a core where there is no GPU; or MIN:MAX (default auto)",
    )
    options.add_devices_option(group)
    add_fault_options(parser)
    group = parser.add_argument_group("where it goes")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; 0 when every rank has ended well, 130 when somebody asked to end."""
    member.refuse_launchers("run")
    script: Path = arguments.script
    if not script.is_file():
        raise InputError(f"{script} is not a file", rule="a Python script", do="look at the path")
    log_dir = arguments.runs / options.free_name(arguments.runs, script.stem) / "logs"
    devices = ranks.devices(arguments.devices, "auto")
    count = ranks.bounds(arguments.processes, "auto", devices=devices)
    call = partial(ByName("samestep.runtime.script", "run_script"), script, tuple(arguments.arguments))
    environment = devices.variables() if devices else None
    starts = itertools.count()

    def attempt(processes: int, terms: Terms) -> Outcome:
        given = (next(starts), arguments.max_restarts)
        return run_crew(call, *given, processes=processes, terms=terms, environment=environment)

    outcome = keep_going(arguments, count, attempt, log_dir=log_dir)
    return EXIT_STOPPED if outcome.asked_by is not None else EXIT_DONE
