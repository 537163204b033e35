"""`samestep eval`: evaluation of a checkpoint, or of a file of weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from samestep.cli.external_launcher import run_as_rank
from samestep.cli.launch_options import LoaderOptions
from samestep.cli.options import (
    JsonOption,
    SetOption,
    argument,
    option,
    option_conflict,
    options_of,
    output_errors,
)
from samestep.cli.recipe_options import StrategyOptions
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE
from samestep.launcher.launch import LaunchConfig
from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import load_recipe, make_recipe, read_dataset_info, recipe_data


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, StrategyOptions, LoaderOptions, SetOption):
    """Evaluate a checkpoint of a run, or a file of weights with a recipe.

    Every sample counts once, on any number of processes.
    """

    example: ClassVar = "samestep eval runs/first --checkpoint best"

    folder: Path = argument("RUN", "directory of the run; with --pretrained, a recipe")
    checkpoint: str | None = option("best, last, epoch-N, or a step (default best)", "WHICH")
    trust: bool = option(
        "import the code that the recipe of the run names (docs/security.md)", default=False
    )
    pretrained: str | None = option(
        "evaluate these weights (.safetensors, .pth, .pdparams) with the recipe RUN", "FILE"
    )
    report: Path | None = option(
        "write precision, recall and F1 per class: classes.json and confusion.png in DIR", "DIR"
    )


def run(options: Options) -> int:
    """Evaluate and print `loss`, `samples` and the metrics."""
    run_options = options_of(RunOptions, options, quiet=options.json)

    def rank_arguments(plan: RunPlan) -> tuple[Any, ...]:
        if options.report is not None:
            with output_errors(
                f"--report {options.report}", "a writable folder", "--report with another folder"
            ):
                options.report.mkdir(parents=True, exist_ok=True)
        is_other_data = options.pretrained is None and bool(options.overrides)
        classes = read_dataset_info(options.folder).classes if is_other_data else None
        return plan.recipe, run_options, plan.checkpoint, options.report, classes

    def make_plan(restarts: int = 0) -> RunPlan:
        plan = _plan(options)
        return replace(plan, recipe=plan.recipe.with_microbatches())

    if options.rendezvous is not None:
        plan, values = run_as_rank(
            options, options.rendezvous, "evaluate", make_plan, rank_arguments
        )
        if options.rendezvous.rank != 0:
            return EXIT_DONE
    else:
        plan = make_plan()
        processes = options.process_range(plan.recipe)[1]
        config = LaunchConfig(options.hang_after)
        values = options.launch(
            "evaluate", *rank_arguments(plan), processes=processes, config=config
        ).value
    by_class = values.pop("by_class", None)
    result = {"checkpoint": str(plan.checkpoint), "step": plan.step, **values}
    report: list[str] = []
    if by_class is not None and options.report is not None:
        from samestep.metrics.class_report import (
            write_report,
        )  # here: other evaluations do not need numpy

        report = write_report(options.report, by_class, result)
    width = max(12, *(len(name) + 2 for name in values))
    lines = [f"{'checkpoint':<{width}}{plan.checkpoint}"]
    lines += [f"{name:<{width}}{format_metric(name, value)}" for name, value in values.items()]
    options.result(result, *lines, *report)
    return EXIT_DONE


def _plan(options: Options) -> RunPlan:
    """Return the plan of an evaluation, after a check of all options."""
    folder = options.folder
    file = options.pretrained
    if options.report is not None:
        from samestep.metrics.class_report import require_matplotlib

        require_matplotlib("confusion matrix")
    layout = options.strategy_overrides()
    if file is None:
        for override in options.overrides:
            if not override.startswith("data."):
                raise option_conflict(
                    f"--set {override} with a run",
                    "samestep eval RECIPE --pretrained FILE --set ...",
                )
        # The evaluating machine can differ from the training machine: the strategy of the run does
        # not apply.
        layout = ["strategy={}", *layout]
        plan = plan_from_checkpoint(
            folder, options.checkpoint or "best", layout, trust=options.trust
        )
        recipe = make_recipe(recipe_data(plan.recipe), options.overrides, origin=str(folder))
        return replace(plan, recipe=recipe)
    if options.checkpoint is not None:
        raise option_conflict("--checkpoint with --pretrained")
    recipe = load_recipe(str(folder), [*layout, *options.overrides])
    # Without a run, the file replaces the folder. A file is not a directory, so no logs are
    # written.
    return RunPlan(
        replace(recipe, model=replace(recipe.model, pretrained=None)), Path(file), Path(file)
    )
