"""`samestep eval`: evaluation of a checkpoint, or of a file of weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import reported_by_rank_0, run_as_rank
from samestep.cli.launch_options import LaunchOptions, launch_ranks
from samestep.cli.options import (
    add_machine_options,
    add_options,
    option_conflict,
    output_errors,
    print_json,
    run_options,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides, with_microbatches
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, reading
from samestep.errors import EXIT_DONE, RunError
from samestep.launcher.launch import LaunchConfig
from samestep.launcher.watchdog import HANG_AFTER
from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import load_recipe, make_recipe, read_dataset_info, recipe_data


def add_eval(add_parser: Any) -> None:
    """Add `samestep eval`."""
    parser = add_parser(
        description="Evaluate a checkpoint of a run, or a file of weights with a recipe. Every sample counts once, on "
        "any number of processes.",
        epilog="example: samestep eval runs/first --checkpoint best",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="directory of the run; with --pretrained, a recipe")
    parser.add_argument("--checkpoint", metavar="WHICH", help="best, last, epoch-N, or a step (default best)")
    add_options(parser, "--set", "--trust")
    text = "evaluate these weights (.safetensors, .pth, .pdparams) with the recipe given as RUN"
    parser.add_argument("--pretrained", metavar="FILE", help=text)
    text = "write precision, recall and F1 per class: classes.json and confusion.png in DIR"
    parser.add_argument("--report", type=Path, metavar="DIR", help=text)
    add_machine_options(parser)
    add_strategy_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate and print `loss`, `samples` and the metrics."""
    with reported_by_rank_0():
        overrides = all_overrides(arguments)
        launch, options = LaunchOptions.parse(arguments), run_options(arguments)
    file = arguments.pretrained

    def rank_arguments(plan: RunPlan) -> tuple[Any, ...]:
        if arguments.report is not None:
            with output_errors(f"--report {arguments.report}", "a writable folder", "--report with another folder"):
                arguments.report.mkdir(parents=True, exist_ok=True)
        is_other_data = file is None and bool(arguments.overrides)
        classes = read_dataset_info(arguments.folder).classes if is_other_data else None
        return plan.recipe, options, plan.checkpoint, arguments.report, classes

    def make_plan(restarts: int = 0) -> RunPlan:
        plan, is_rank = _plan(arguments, overrides), launch.rendezvous is not None
        recipe, _ = with_microbatches(plan.recipe, is_rank=is_rank)
        return replace(plan, recipe=recipe)

    if launch.rendezvous is not None:
        plan, values = run_as_rank(launch, launch.rendezvous, "evaluate", make_plan, rank_arguments)
        if launch.rendezvous.rank != 0:
            return EXIT_DONE
    else:
        plan = make_plan()
        processes = launch.process_range(plan.recipe)[1]
        with reading(plan.checkpoint):
            values = launch_ranks(
                "evaluate",
                *rank_arguments(plan),
                processes=processes,
                launch_config=LaunchConfig(HANG_AFTER),
                options=launch,
            ).value
    by_class = values.pop("by_class", None)
    result = {"checkpoint": str(plan.checkpoint), "step": plan.step, **values}
    report: list[str] = []
    if by_class is not None and arguments.report is not None:
        report = _write_class_report(arguments.report, by_class, result)
    if arguments.json:
        print_json(result)
        return EXIT_DONE
    width = max(12, *(len(name) + 2 for name in values))
    lines = [f"{'checkpoint':<{width}}{plan.checkpoint}"]
    lines += [f"{name:<{width}}{format_metric(name, value)}" for name, value in values.items()]
    print("\n".join(lines + report))
    return EXIT_DONE


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> RunPlan:
    """Return the plan of an evaluation with these overrides, after a check of all options."""
    folder, which, file = arguments.folder, arguments.checkpoint, arguments.pretrained
    if arguments.report is not None:
        from samestep.metrics.class_report import require_matplotlib

        require_matplotlib("confusion matrix")
    if file is None:
        for override in arguments.overrides:
            if not override.startswith("data."):
                raise option_conflict(
                    f"--set {override} with a run",
                    "the recipe of the run, apart from the data",
                    "leave --set out, or evaluate the weights with a recipe: samestep eval RECIPE --set ... "
                    "--pretrained FILE",
                )
        # The evaluating machine can differ from the training machine: the strategy of the run does not apply.
        layout = ["strategy={}", *(text for text in overrides if text not in arguments.overrides)]
        plan = plan_from_checkpoint(folder, which or "best", layout, trust=arguments.trust)
        recipe = make_recipe(recipe_data(plan.recipe), arguments.overrides, origin=str(folder))
        return replace(plan, recipe=recipe)
    if which is not None:
        value = f"--checkpoint {which} with --pretrained {file}"
        raise option_conflict(value, "weights from a checkpoint or from a file")
    recipe = load_recipe(str(folder), overrides)
    # Without a run, the file replaces the folder. A file is not a directory, so no logs are written.
    return RunPlan(replace(recipe, model=replace(recipe.model, pretrained=None)), Path(file), Path(file))


def _write_class_report(folder: Path, by_class: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Write the result of an evaluation with its numbers per class; return their lines for the terminal."""
    # Imported here: an evaluation without a report does not need numpy.
    from samestep.metrics.class_report import averages, class_rows, draw_confusion, table_lines

    names, counts = by_class["classes"], by_class["counts"]
    rows = class_rows(counts, names)
    data = {**result, **averages(rows), "classes": [asdict(row) for row in rows], "confusion": counts}
    table, picture = folder / "classes.json", folder / "confusion.png"
    try:
        table.write_text(json.dumps(data) + "\n", encoding="utf-8")
        draw_confusion(counts, names, picture)
    except OSError as error:
        raise RunError(
            f"--report {folder} cannot be written: {error.strerror}",
            fix="free disk space, or --report with another folder",
            code="E_OUTPUT",
        ) from error
    files = [str(table), str(picture), *([str(folder / "overlays")] if by_class.get("pictures") else [])]
    return ["", *table_lines(rows), "", f"{'report':<12}{', '.join(files)}"]
