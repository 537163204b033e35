"""`samestep eval`, `samestep predict` and `samestep export`: commands for trained models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from samestep.cli.launch_options import LaunchOptions, call_in_worker, run_as_rank
from samestep.cli.options import (
    TRUST,
    DeviceOption,
    JsonOption,
    RunArgument,
    SetOption,
    StrategyOptions,
    WorkersOption,
    argument,
    expanded,
    option,
    option_conflict,
    options_of,
    output_errors,
    require_file,
    require_new_file,
)
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint
from samestep.config import RunOptions
from samestep.config.validation import require_package
from samestep.errors import EXIT_DONE, InputError
from samestep.launcher.launch import LaunchConfig
from samestep.loggers.logger import format_metric
from samestep.recipes.overrides import full_key
from samestep.recipes.recipe_files import (
    load_recipe,
    make_recipe,
    read_dataset_info,
    recipe_data,
    require_paths,
)
from samestep.runs import run_folder

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


@dataclass(frozen=True, kw_only=True)
class Eval(JsonOption, StrategyOptions, WorkersOption, LaunchOptions, SetOption):
    """Evaluate a checkpoint of a run, or a file of weights with a recipe.

    Every sample counts once, on any number of processes.
    """

    example: ClassVar = "samestep eval runs/first --checkpoint best"
    # All samples of a path are evaluated: it is not split again.
    path_keys: ClassVar = ("data.options.path", "data.options.evaluation_path")

    folder: Path = argument("RUN", "name or directory of the run; with --pretrained, a recipe")
    checkpoint: str | None = option("best, last, epoch-N, or a step (default best)", "WHICH")
    trust: bool = option(TRUST, default=False)
    pretrained: str | None = option(
        "evaluate these weights (.safetensors, .pth, .pdparams) with the recipe RUN", "FILE"
    )
    report: Path | None = option(
        "write precision, recall and F1 per class: classes.json and confusion.png in DIR", "DIR"
    )

    def run(self) -> int:
        """Evaluate and print `loss`, `samples` and the metrics."""
        if self.rank_place is not None:
            plan, values = run_as_rank(self, "evaluate", self._plan, self._rank_arguments)
            if self.rank_place.rank != 0:
                return EXIT_DONE
        else:
            plan = self._plan(0)
            # The larger number: an evaluation is not restarted on fewer ranks.
            processes = self.process_range(plan.recipe)[1]
            arguments = self._rank_arguments(plan)
            config = LaunchConfig(self.hang_after)
            result = self.launch("evaluate", *arguments, processes=processes, config=config)
            values = result.value
        by_class = values.pop("by_class", None)  # not part of the printed result
        data = {"checkpoint": str(plan.checkpoint), "step": plan.step, **values}
        report: list[str] = []
        if by_class is not None and self.report is not None:
            from samestep.recipes.class_report import write_report  # imports numpy

            report = write_report(self.report, by_class, data)
        width = max(12, *(len(name) + 2 for name in values))
        lines = [f"{'checkpoint':<{width}}{plan.checkpoint}"]
        lines += [f"{name:<{width}}{format_metric(name, value)}" for name, value in values.items()]
        self.result(data, *lines, *report)
        return EXIT_DONE

    def _rank_arguments(self, plan: RunPlan) -> tuple[Any, ...]:
        # Before anything is computed: an evaluation can take long.
        if self.report is not None:
            value = f"--report {self.report}"
            with output_errors(value, "a writable folder", "--report with another folder"):
                self.report.mkdir(parents=True, exist_ok=True)
        classes = None
        if self.pretrained is None and self.overrides:  # other data have the classes of the run
            classes = read_dataset_info(plan.folder).classes
        options = options_of(RunOptions, self, quiet=self.json)
        return plan.recipe, options, plan.checkpoint, self.report, classes

    def _plan(self, restarts: int) -> RunPlan:
        if self.report is not None:
            require_package("a plot of the confusion matrix", "matplotlib", "'samestep[zoo]'")
        if self.pretrained is None:
            plan = self._plan_of_run()
        elif self.checkpoint is not None:
            raise option_conflict("--checkpoint with --pretrained")
        else:
            overrides = [*self.strategy_overrides(), *self.overrides]
            recipe = load_recipe(str(self.folder), overrides)
            require_paths(recipe)
            # Weights that the recipe names would be read in vain.
            recipe = replace(recipe, model=replace(recipe.model, pretrained=None))
            # Without a run, the file replaces the folder. A file is not a directory, so no logs are
            # written.
            plan = RunPlan(recipe, Path(self.pretrained), Path(self.pretrained))
        return replace(plan, recipe=plan.recipe.with_microbatches())

    def _plan_of_run(self) -> RunPlan:
        for override in self.overrides:
            if not full_key({}, override.partition("=")[0]).startswith("data."):
                fix = "samestep eval RECIPE FOLDER --pretrained FILE"
                raise option_conflict(f"{override} with a run", fix)
        # The evaluating machine can differ from the training machine: the strategy of the run does
        # not apply.
        layout = ["strategy={}", *self.strategy_overrides()]
        which = self.checkpoint or "best"
        folder = run_folder(str(self.folder))
        plan = plan_from_checkpoint(folder, which, layout, trust=self.trust)
        # After the comparison with the checkpoint, which refuses other data.
        data = recipe_data(plan.recipe)
        return replace(plan, recipe=make_recipe(data, self.overrides, origin=str(folder)))


@dataclass(frozen=True, kw_only=True)
class Predict(JsonOption, DeviceOption, RunArgument):
    """Predict with the model of a run for files, or complete a prompt with a language model.

    The files are images or texts, depending on the recipe. The training data is not needed.
    """

    example: ClassVar = "samestep predict runs/first picture.png"

    files: Sequence[Path] = argument(
        "FILE", "input files, or folders of input files", nargs="*", type=expanded
    )
    out: Path | None = option("folder for predicted masks, for segmentation", "DIR")
    prompt: str | None = option("text to complete, for language models", "TEXT")
    tokens: int = option("tokens to generate", "N", default=100)

    def run(self) -> int:
        """Print one prediction per file, or the completed text."""
        if (self.prompt is None) == (not self.files):
            fix = "samestep predict RUN FILE, or samestep predict RUN --prompt TEXT"
            raise option_conflict("predict needs files, or a prompt for a language model", fix)
        files = files_of(self.files)
        plan = plan_from_checkpoint(self.folder, self.checkpoint, [], trust=self.trust)
        options = RunOptions(device=self.device, quiet=True)
        model = (plan.recipe, options, read_dataset_info(self.folder), plan.checkpoint)
        call = partial(call_in_worker, "samestep.recipes.predict")
        if self.prompt is not None:
            text = call("complete", *model, self.prompt, self.tokens)
            self.result(text, text["text"])
            return EXIT_DONE
        for prediction in call("predict", *model, tuple(files), self.out):
            self.result(prediction, *_prediction_lines(prediction))
        return EXIT_DONE


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files of the arguments: of a folder all files in it, without hidden ones."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            require_file(path)
            files.append(path)
            continue
        with output_errors(f"{path} cannot be read", "a readable folder", "another folder"):
            inside = [
                one
                for one in sorted(path.rglob("*"))
                if one.is_file() and not one.name.startswith(".")
            ]
        if not inside:
            fix = "the path of a file, or of a folder with files"
            raise InputError(f"{path} has no files", "input files", fix, code="E_FILE_MISSING")
        files += inside
    return files


def _prediction_lines(prediction: dict[str, Any]) -> list[str]:
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


@dataclass(frozen=True, kw_only=True)
class Export(JsonOption, RunArgument):
    """Write the model of a run for other programs.

    Formats are weights, a torch.export program, or ONNX. The outputs of a program are compared with
    those of the model.
    """

    example: ClassVar = "samestep export runs/first --format onnx --like picture.png"

    format: Literal["safetensors", "torch", "onnx"] = option("format", default="safetensors")
    like: Path | None = option("example input; required except for safetensors", "FILE")
    out: Path | None = option("output file (default: in the directory of the run)", "FILE")

    def run(self) -> int:
        """Export the model, and print where it is."""
        kind = self.format
        if self.like is None and kind != "safetensors":
            fix = "--like FILE, as for samestep predict"
            raise option_conflict(f"--format {kind} without --like", fix)
        plan = plan_from_checkpoint(self.folder, self.checkpoint, [], trust=self.trust)
        suffix = _SUFFIXES[kind]
        out = self.out or self.folder / f"model-{plan.step}{suffix}"
        if out.suffix in _SUFFIXES.values() and out.suffix != suffix:
            raise option_conflict(f"--out {out} with --format {kind}", f"a {suffix} file")
        require_new_file(out)
        if self.like is not None:
            require_file(self.like)
        model = (plan.recipe, read_dataset_info(self.folder), plan.checkpoint)
        output = (kind, out, self.like)
        try:
            difference = call_in_worker("samestep.tools.export", "export", *model, *output)
        except BaseException:
            out.unlink(missing_ok=True)  # an incomplete file; there was none before
            raise
        lines = [f"{'written':<12}{out}"]
        if difference is not None:
            lines.append(f"{'agrees':<12}within {difference:.1e} of the largest output")
        self.result({"path": str(out), "format": kind, "difference": difference}, *lines)
        return EXIT_DONE
