"""`samestep export`: the model of a run as weights, torch.export program or ONNX, or as a repository of the Hub."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal

from samestep.cli.launch_options import call_in_worker
from samestep.cli.options import (
    JsonOption,
    RunArgument,
    option,
    option_conflict,
    output_errors,
    require_file,
    require_new_file,
)
from samestep.cli.run_plans import plan_from_checkpoint, refuse_script_run
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_dataset_info

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, RunArgument):
    """Write the model of a run as weights, as a torch.export program or as ONNX; or upload it to the Hugging Face Hub.

    The outputs of a program are compared with those of the model. An upload has weights, recipe and
    model card.
    """

    example: ClassVar = "samestep export runs/first --format onnx --like picture.png"

    format: Literal["safetensors", "torch", "onnx"] = option(
        "format (default safetensors)", default="safetensors"
    )
    like: Path | None = option("example input; required except for safetensors", "FILE")
    out: Path | None = option(
        "output file (default: in the directory of the run); with --hub a new folder, without an upload",
        "PATH",
    )
    hub: str | None = option("upload to this repository; created if it does not exist", "USER/NAME")
    certificate: Path | None = option("for --hub: certificate.json of samestep verify", "FILE")


def run(options: Options) -> int:
    """Export the model, and print where it is."""
    if options.hub is not None:
        return _export_to_hub(options, options.hub)
    folder = options.folder
    kind = options.format
    if options.certificate is not None:
        raise option_conflict("--certificate without --hub", "--hub USER/NAME")
    if options.like is None and kind != "safetensors":
        raise option_conflict(
            f"--format {kind} without --like", "--like FILE, as for samestep predict"
        )
    plan = plan_from_checkpoint(folder, options.checkpoint, [], trust=options.trust)
    out = options.out or folder / f"model-{plan.step}{_SUFFIXES[kind]}"
    kinds = {suffix: kind for kind, suffix in _SUFFIXES.items()}
    if kinds.get(out.suffix, kind) != kind:
        raise option_conflict(f"--out {out} with --format {kind}", f"a {_SUFFIXES[kind]} file")
    require_new_file(out)
    if options.like is not None:
        require_file(options.like)
    model = (plan.recipe, read_dataset_info(folder), plan.checkpoint)
    try:
        difference = call_in_worker(
            "samestep.tools.export", "export", *model, kind, out, options.like
        )
    except BaseException:
        out.unlink(missing_ok=True)  # an incomplete file; there was none before
        raise
    lines = [f"{'written':<12}{out}"]
    if difference is not None:
        lines.append(f"{'agrees':<12}within {difference:.1e} of the largest output")
    options.result({"path": str(out), "format": kind, "difference": difference}, *lines)
    return EXIT_DONE


def _export_to_hub(options: Options, repository: str) -> int:
    """Write the files of a repository, and upload them or move them to `--out`."""
    from samestep.tools.export import upload, write_repository

    if options.like is not None or options.format != "safetensors":
        raise option_conflict("--hub with --format or --like")
    refuse_script_run(options.folder)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        facts = write_repository(options.folder, options.checkpoint, options.certificate, folder)
        if options.out is None:
            address = upload(folder, facts["step"], repository)
        else:
            with output_errors(f"--out {options.out}", "a new folder", "--out with another folder"):
                address = str(shutil.copytree(folder, options.out))
    lines = (f"{'written':<12}{address}", f"{'sha256':<12}{facts['sha256']}")
    options.result({**facts, "address": address}, *lines)
    return EXIT_DONE
