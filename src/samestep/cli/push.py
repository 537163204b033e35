"""`samestep push`: upload of a model, with recipe and model card, to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import add_options, add_run_argument, option_conflict, output_errors, print_json
from samestep.cli.run_plans import refuse_script_run
from samestep.errors import EXIT_DONE


def add_push(add_parser: Any) -> None:
    """Add `samestep push`."""
    parser = add_parser(
        description="Upload the weights of a checkpoint with recipe, model card and, by choice, a certificate of "
        "samestep verify to a repository of the Hugging Face Hub. The Hub's client reads the token: hf auth login.",
        epilog="example: samestep push runs/first me/digits --certificate certificate/certificate.json",
    )
    add_run_argument(parser, checkpoint="best")
    parser.add_argument("repository", nargs="?", metavar="USER/NAME", help="repository; created if it does not exist")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="certificate.json of samestep verify")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the files into a new folder, without an upload")
    add_options(parser, "--json")
    parser.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> int:
    """Write the files, upload them, and print the address or the folder."""
    from samestep.tools.push import upload, write_repository

    require_single_process("push")
    refuse_script_run(arguments.folder)
    name, out = arguments.repository, arguments.out
    if (name is None) == (out is None):
        value = "push with neither a repository nor --out" if name is None else f"{name} with --out {out}"
        raise option_conflict(value, "a repository, or --out for the files alone", "samestep push RUN USER/NAME")
    if arguments.private and out is not None:
        raise option_conflict(f"--private with --out {out}", "--private for an upload", "leave --private out")
    with TemporaryDirectory() as folder:
        repository = write_repository(arguments.folder, arguments.checkpoint, arguments.certificate, Path(folder))
        address = None if name is None else upload(Path(folder), repository, name, private=arguments.private)
        if out is not None:
            with output_errors(f"--out {out}", "a new folder", "--out with another folder"):
                shutil.copytree(folder, out)
    result = {**asdict(repository), "address": address or str(out)}
    if arguments.json:
        print_json(result)
    else:
        print(f"{'uploaded' if out is None else 'written':<12}{result['address']}\nsha256      {repository.sha256}")
    return EXIT_DONE
