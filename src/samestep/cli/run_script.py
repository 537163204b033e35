"""`samestep run`: a person's own script, on several processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import options, ranks
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
    add_fault_options(parser)
    group = parser.add_argument_group("where it goes")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; 0 when every rank has ended well, 130 when somebody asked to end."""
    script: Path = arguments.script
    if not script.is_file():
        raise InputError(f"{script} is not a file", rule="a Python script", do="look at the path")
    log_dir = arguments.runs / options.free_name(arguments.runs, script.stem) / "logs"
    starts = [0]

    def attempt(processes: int, terms: Terms) -> Outcome:
        restart, most = len(starts) - 1, arguments.max_restarts
        starts.append(restart)
        function = ByName("samestep.runtime.script", "run_script")
        outcome = run_crew(
            function, script, tuple(arguments.arguments), restart, most, processes=processes, terms=terms
        )
        return outcome

    outcome = keep_going(arguments, ranks.bounds(arguments.processes, "auto"), attempt, log_dir=log_dir)
    return EXIT_STOPPED if outcome.asked_by is not None else EXIT_DONE
