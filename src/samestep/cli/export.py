"""`samestep export`: the model of a run as weights, torch.export program or ONNX, or as a repository of the Hub."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import call_in_worker
from samestep.cli.options import (
    add_options,
    add_run_argument,
    option_conflict,
    output_errors,
    print_json,
    require_file,
    require_new_file,
)
from samestep.cli.run_plans import plan_from_checkpoint, reading, refuse_script_run
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_dataset_info

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def add_export(add_parser: Any) -> None:
    """Add `samestep export`."""
    parser = add_parser(
        description="Write the model of a run as weights, as a torch.export program or as ONNX, and compare outputs of "
        "the file with the model; or upload weights, recipe and model card to the Hugging Face Hub.",
        epilog="example: samestep export runs/first --format onnx --like picture.png",
    )
    add_run_argument(parser, checkpoint="best")
    formats = tuple(_SUFFIXES)
    parser.add_argument("--format", choices=formats, default="safetensors", help="default safetensors")
    parser.add_argument("--like", type=Path, metavar="FILE", help="example input; required except for safetensors")
    text = "output file (default: in the directory of the run); with --hub a new folder, without an upload"
    parser.add_argument("--out", type=Path, metavar="PATH", help=text)
    group = parser.add_argument_group("Hugging Face Hub")
    group.add_argument("--hub", metavar="USER/NAME", help="upload to this repository; created if it does not exist")
    group.add_argument("--certificate", type=Path, metavar="FILE", help="certificate.json of samestep verify")
    group.add_argument("--private", action="store_true", help="create a private repository")
    add_options(parser, "--json")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    """Export the model, and print where it is."""
    require_single_process("export")
    if arguments.hub is not None:
        return _export_to_hub(arguments)
    folder, kind = arguments.folder, arguments.format
    if arguments.certificate is not None or arguments.private:
        raise option_conflict("--certificate or --private without --hub", "a repository", "--hub USER/NAME")
    if arguments.like is None and kind != "safetensors":
        expected = "an example input, for tracing and comparison"
        raise option_conflict(f"--format {kind} without --like", expected, "--like FILE, as for samestep predict")
    plan = plan_from_checkpoint(folder, arguments.checkpoint, [], trust=arguments.trust)
    out = arguments.out or folder / f"model-{plan.step}{_SUFFIXES[kind]}"
    kinds = {suffix: kind for kind, suffix in _SUFFIXES.items()}
    if kinds.get(out.suffix, kind) != kind:
        raise option_conflict(f"--out {out} with --format {kind}", f"a {_SUFFIXES[kind]} file", "another --format")
    require_new_file(out)
    if arguments.like is not None:
        require_file(arguments.like, "--like")
    model = (plan.recipe, read_dataset_info(folder), plan.checkpoint)
    try:
        with reading(plan.checkpoint):
            difference = call_in_worker("samestep.tools.export", "export", *model, kind, out, arguments.like)
    except BaseException:
        out.unlink(missing_ok=True)  # an incomplete file; there was none before
        raise
    if arguments.json:
        print_json({"path": str(out), "format": kind, "difference": difference})
        return EXIT_DONE
    print(f"{'written':<12}{out}")
    if difference is not None:
        print(f"{'agrees':<12}within {difference:.1e} of the largest output")
    return EXIT_DONE


def _export_to_hub(arguments: argparse.Namespace) -> int:
    """Write the files of a repository, and upload them or move them to `--out`."""
    from samestep.tools.hub import upload, write_repository

    refuse_script_run(arguments.folder)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        facts = write_repository(arguments.folder, arguments.checkpoint, arguments.certificate, folder)
        if arguments.out is None:
            address = upload(folder, facts["step"], arguments.hub, private=arguments.private)
        else:
            with output_errors(f"--out {arguments.out}", "a new folder", "--out with another folder"):
                address = str(shutil.copytree(folder, arguments.out))
    if arguments.json:
        print_json({**facts, "address": address})
    else:
        print(f"{'written':<12}{address}\n{'sha256':<12}{facts['sha256']}")
    return EXIT_DONE
