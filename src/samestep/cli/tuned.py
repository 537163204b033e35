"""What `samestep tune` has found for a run on this machine, taken up by commands that train."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.cli import options
from samestep.cli.member import Plan
from samestep.config import RunOptions


def add_option(parser: Any) -> None:
    """Describe the option."""
    parser.add_argument(
        "--no-tuned",
        action="store_true",
        help="leave what samestep tune has found here; --workers and --prefetch leave it too",
    )


def with_tuned(plan: Plan, arguments: argparse.Namespace, processes: int) -> Plan:
    """The plan, with what was found for it on so many ranks of this machine, unless options say otherwise."""
    # Imported here: a command that has nothing to take up starts sooner.
    from samestep.tools.tune import choice

    runs = plan.run.parent
    is_said = arguments.no_tuned or arguments.workers is not None or arguments.prefetch is not None
    if is_said or not choice.is_any(runs):
        return plan
    name = getattr(arguments, "recipe", None)
    stem = Path(name).stem if name is not None else None
    place = choice.Place.of(stem, plan.recipe, processes, choice.machine(arguments.device))
    found, told = choice.find(runs, place)
    for text in told:
        if not arguments.json:
            print(text, file=sys.stderr)
    return replace(plan, tuned=found)


def run_options(arguments: argparse.Namespace, plan: Plan) -> RunOptions:
    """The options of a command as data, with what the plan took up."""
    found, given = plan.tuned, options.run_options(arguments)
    if found is None:
        return given
    return replace(given, workers=found.workers, prefetch=found.prefetch, tuned=found.path)
