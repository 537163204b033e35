"""`samestep resume`: go on with a run, on any number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import layouts, member, options, requeue, tuned
from samestep.cli.member import Plan
from samestep.cli.opened import open_run, plan_to_go_on
from samestep.cli.restarts import add_fault_options
from samestep.cli.train import run_as_member, run_ranks


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "resume",
        help="go on with a run",
        description="Go on with a run from a checkpoint, on any number of processes, with the same result.",
        epilog="example: samestep resume runs/first --processes 3",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--checkpoint", default="last", metavar="WHICH", help="last, best, or a step (default last)")
    options.add_set_option(parser)
    options.add_machine_options(parser)
    tuned.add_option(parser)
    layouts.add_options(parser)
    options.add_saving_options(parser)
    options.add_check_option(parser)
    requeue.add_option(add_fault_options(parser))
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Resume; exit codes as those of train."""
    arguments.overrides = [*layouts.overrides(arguments), *arguments.overrides]
    found = member.settled(arguments)
    if found is not None:
        return run_as_member(arguments, found, lambda restarts: _plan(arguments, restarts))
    return run_ranks(arguments, _plan(arguments, requeue.restarts(arguments)))


def _plan(arguments: argparse.Namespace, restarts: int = 0) -> Plan:
    folder, overrides = arguments.folder, arguments.overrides
    if restarts and arguments.checkpoint == "last":
        return plan_to_go_on(folder, overrides)
    recipe, checkpoint, step = open_run(folder, arguments.checkpoint, overrides)
    return Plan(recipe, folder, checkpoint, step)
