"""`samestep export`: the model of a run as weights, torch.export program or ONNX."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import call_in_worker
from samestep.cli.options import (
    add_options,
    add_run_argument,
    option_conflict,
    print_json,
    require_file,
    require_new_file,
)
from samestep.cli.run_plans import plan_from_checkpoint, reading
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_dataset_info

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def add_export(add_parser: Any) -> None:
    """Add `samestep export`."""
    parser = add_parser(
        description="Write the model of a run as weights (safetensors), as a torch.export program, or as ONNX, "
        "and compare outputs of the file with the model.",
        epilog="example: samestep export runs/first --format onnx --like picture.png",
    )
    add_run_argument(parser, checkpoint="best")
    formats = tuple(_SUFFIXES)
    parser.add_argument("--format", choices=formats, default="safetensors", help="default safetensors")
    parser.add_argument("--like", type=Path, metavar="FILE", help="example input; required except for safetensors")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file (default: in the directory of the run)")
    add_options(parser, "--json")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    """Export the model and print the largest difference of the outputs."""
    require_single_process("export")
    folder: Path = arguments.folder
    plan = plan_from_checkpoint(folder, arguments.checkpoint, [], trust=arguments.trust)
    out = arguments.out or folder / f"model-{plan.step}{_SUFFIXES[arguments.format]}"
    kinds = {suffix: kind for kind, suffix in _SUFFIXES.items()}
    if (kind := kinds.get(out.suffix, arguments.format)) != arguments.format:
        expected = f"a {_SUFFIXES[arguments.format]} file"
        raise option_conflict(f"--out {out} with --format {arguments.format}", expected, f"--format {kind}")
    require_new_file(out)
    if arguments.like is not None:
        require_file(arguments.like, "--like")
    model = (plan.recipe, read_dataset_info(folder), plan.checkpoint)
    try:
        with reading(plan.checkpoint):
            exported = call_in_worker("samestep.tools.export", "export", *model, arguments.format, out, arguments.like)
    except BaseException:
        out.unlink(missing_ok=True)  # an incomplete file; there was none before
        raise
    if arguments.json:
        print_json(asdict(exported))
        return EXIT_DONE
    print(f"{'written':<12}{exported.path}")
    if exported.difference is not None:
        print(f"{'agrees':<12}within {exported.difference:.1e} of the largest output")
    return EXIT_DONE
