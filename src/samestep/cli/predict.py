"""`samestep predict`: predictions for files, and completed texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import call_in_worker
from samestep.cli.options import add_number, add_options, add_run_argument, option_conflict, print_json, require_file
from samestep.cli.run_plans import plan_from_checkpoint, reading
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_dataset_info


def add_predict(add_parser: Any) -> None:
    """Add `samestep predict`."""
    parser = add_parser(
        description="Predict with the model of a run for files (images or texts, depending on the recipe), or complete "
        "a prompt with a language model. The training data is not needed.",
        epilog="example: samestep predict runs/first picture.png",
    )
    add_run_argument(parser, checkpoint="best")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="input files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for predicted masks, for segmentation")
    parser.add_argument("--prompt", metavar="TEXT", help="text to complete, for language models")
    add_number(parser, "--tokens", default=100, metavar="N", help="tokens to generate (default 100)")
    add_options(parser, "--device", "--json")
    parser.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    """Print one prediction per file, or the completed text."""
    require_single_process("predict")
    prompt: str | None = arguments.prompt
    if (prompt is None) == (not arguments.files):
        raise option_conflict(
            f"predict with {'neither files nor' if prompt is None else 'both files and'} a prompt",
            "input files, or --prompt for a language model",
            "samestep predict RUN FILE, or samestep predict RUN --prompt TEXT",
        )
    for file in arguments.files:
        require_file(file)
    plan = plan_from_checkpoint(arguments.folder, arguments.checkpoint, [], trust=arguments.trust)
    options = RunOptions(device=arguments.device, quiet=True)
    model = (plan.recipe, options, read_dataset_info(arguments.folder), plan.checkpoint)
    if prompt is not None:
        with reading(plan.checkpoint):
            completion = call_in_worker("samestep.recipes.run", "complete", *model, prompt, arguments.tokens)
        print_json(completion) if arguments.json else print(completion["text"])
        return EXIT_DONE
    files = tuple(arguments.files)
    with reading(plan.checkpoint):
        predictions = call_in_worker("samestep.recipes.run", "predict", *model, files, arguments.out)
    for prediction in predictions:
        print_json(prediction) if arguments.json else print("\n".join(_prediction_lines(prediction)))
    return EXIT_DONE


def _prediction_lines(prediction: dict[str, Any]) -> list[str]:
    """Return a prediction as text: the file, followed by indented values."""
    lines = [prediction["file"]]
    for name, value in prediction.items():
        if isinstance(value, list):
            lines += ["  " + "  ".join(map(_format, entry.values())) for entry in value]
        elif name != "file":
            lines.append(f"  {name}  {_format(value)}")
    return lines


def _format(value: Any) -> str:
    return f"{value:7.2%}" if isinstance(value, float) and 0 <= value <= 1 else str(value)
