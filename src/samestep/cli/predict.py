"""`samestep predict`: predictions for files, and completed texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.cli.launch_options import call_in_worker
from samestep.cli.options import (
    DeviceOption,
    JsonOption,
    RunArgument,
    argument,
    option,
    option_conflict,
    require_file,
)
from samestep.cli.run_plans import plan_from_checkpoint
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import read_dataset_info


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, DeviceOption, RunArgument):
    """Predict with the model of a run for files, or complete a prompt with a language model.

    The files are images or texts, depending on the recipe. The training data is not needed.
    """

    example: ClassVar = "samestep predict runs/first picture.png"

    files: Sequence[Path] = argument("FILE", "input files", nargs="*", type=Path)
    out: Path | None = option("folder for predicted masks, for segmentation", "DIR")
    prompt: str | None = option("text to complete, for language models", "TEXT")
    tokens: int = option("tokens to generate (default 100)", "N", default=100)


def run(options: Options) -> int:
    """Print one prediction per file, or the completed text."""
    if (options.prompt is None) == (not options.files):
        fix = "samestep predict RUN FILE, or samestep predict RUN --prompt TEXT"
        raise option_conflict("predict needs files, or a prompt for a language model", fix)
    for file in options.files:
        require_file(file)
    plan = plan_from_checkpoint(options.folder, options.checkpoint, [], trust=options.trust)
    run_options = RunOptions(device=options.device, quiet=True)
    model = (plan.recipe, run_options, read_dataset_info(options.folder), plan.checkpoint)
    if options.prompt is not None:
        text = call_in_worker(
            "samestep.recipes.predict", "complete", *model, options.prompt, options.tokens
        )
        options.result(text, text["text"])
        return EXIT_DONE
    predictions = call_in_worker(
        "samestep.recipes.predict", "predict", *model, tuple(options.files), options.out
    )
    for prediction in predictions:
        options.result(prediction, *_prediction_lines(prediction))
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
    if isinstance(value, float) and 0 <= value <= 1:
        return f"{value:7.2%}"
    return str(value)
