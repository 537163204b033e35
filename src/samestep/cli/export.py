"""`samestep export`: a trained model for other programs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.cli import member, options, ranks
from samestep.cli.opened import open_run
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, InputError
from samestep.recipes.facts import read_facts
from samestep.runtime.by_name import ByName
from samestep.runtime.crew import Terms
from samestep.runtime.launch import run_crew
from samestep.runtime.watchdog import HANG_AFTER

_ENDINGS = {"safetensors": ".safetensors", "torch": ".pt2", "torchscript": ".pt", "onnx": ".onnx"}


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "export",
        help="write a trained model for other programs",
        description="Write the model of a run as plain weights (safetensors), as a program of torch.export or "
        "TorchScript, or as ONNX, and check that what was written says the same.",
        epilog="example: samestep export runs/first --format onnx --like picture.png",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, last, or a step (default best)")
    parser.add_argument("--format", choices=tuple(_ENDINGS), default="safetensors", help="default safetensors")
    parser.add_argument("--like", type=Path, metavar="FILE", help="what the model is asked about; all but safetensors")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in the run's directory, by format")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write it and say how well it agrees."""
    member.refuse_launchers("export")
    recipe, checkpoint, step = open_run(arguments.folder, arguments.checkpoint, [])
    out = arguments.out or arguments.folder / f"model-{step}{_ENDINGS[arguments.format]}"
    if out.exists():
        raise InputError(f"{out} exists", rule="nothing is written over", do="--out another, or remove it")
    if arguments.like is not None and not arguments.like.is_file():
        raise InputError(f"{arguments.like} is not a file", rule="--like is one that is there", do="look at the path")
    given = (recipe, RunOptions(quiet=True), read_facts(arguments.folder), checkpoint, arguments.format, out)
    function = ByName("samestep.tools.export", "export")
    outcome = run_crew(function, *given, arguments.like, processes=1, terms=Terms(HANG_AFTER), preload=ranks.PRELOAD)
    found = outcome.value
    if arguments.json:
        options.print_json(asdict(found))
        return EXIT_DONE
    print(f"{'written':<12}{found.path}")
    if found.difference is not None:
        print(f"{'agrees':<12}within {found.difference:.1e} of the largest output")
    return EXIT_DONE
