"""Predictions of `samestep plan` and measured runs of the same layouts: step time, memory, and the choice.

For each recipe and number of processes: first the plan, which measures only its calibration; then every layout of the
plan is run as `samestep train` would run it, in rounds, each layout in new processes. The step time of a layout is the
median over rounds, its memory the peak of resident memory of two steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import describe_machine, machine_line, markdown_table, save

from samestep.cli.launch_options import PRELOAD
from samestep.config import MeshConfig, Recipe, RunOptions, StrategyConfig
from samestep.launcher.failure import RankError
from samestep.recipes.recipe_files import load_recipe, make_recipe
from samestep.tools.bench import Contender
from samestep.tools.plan.collectives import Link
from samestep.tools.plan.plan import PlanConfig, plan
from samestep.tools.plan.scaling import Failures
from samestep.tools.timing import run_trial

HERE = Path(__file__).parent
OPTIONS = RunOptions(device="cpu", quiet=True)
RESNET = {
    "data": {"name": "plan_data:load", "options": {"size": 64}},
    "model": {"name": "torchvision:resnet18"},
    "optimizer": {"name": "sgd", "options": {"lr": 0.01, "momentum": 0.9}},
    "batch_size": 16,
    "microbatches": 4,
    "epochs": 1,
}
RECIPES = ("digits", "resnet18", "gpt")
_TRIALS = "samestep.tools.trials"
_MEASURED_SECONDS = 2.0  # of the steps of a layout in a round
_LEAST_STEPS, _MOST_STEPS = 3, 40


def recipe(name: str) -> Recipe:
    """One of the recipes of the comparison."""
    if name == "resnet18":
        return make_recipe(RESNET, (), origin=name)
    return load_recipe({"gpt": "language"}.get(name, name), [])


def run(name: str, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plan one recipe on a number of processes, and run its layouts."""
    subject = recipe(name)
    config = PlanConfig(
        devices=processes,
        nodes=1,
        link=Link(20e-6, 8e-11),
        memory=None,
        failures=Failures(50_000, 120),
        local=processes,
        seconds=options.seconds,
        options=OPTIONS,
        preload=(*PRELOAD, "plan_data"),
    )
    planned = plan(subject, config, report)
    layouts = planned["layouts"][: options.layouts]
    rows = [measured_row(subject, row, processes) for row in layouts]
    rows = [row for row in rows if row is not None]
    for number in range(options.rounds):
        for row in rows[:: -1 if number % 2 else 1]:
            row["rounds"].append(step_seconds(subject, row, processes))
    for row in rows:
        row["measured_seconds"] = statistics.median(row["rounds"])
    best = min(row["measured_seconds"] for row in rows)
    chosen = next((row for row in rows if row["name"] == planned["chosen"]), rows[0])
    return {
        "recipe": name,
        "processes": processes,
        "calibration_seconds": planned["calibration_seconds"],
        "calibration": planned["calibration"],
        "chosen": chosen["name"],
        "chosen_to_best": chosen["measured_seconds"] / best,
        "best": min(rows, key=lambda row: row["measured_seconds"])["name"],
        "rows": rows,
    }


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def layout_recipe(subject: Recipe, row: dict[str, Any]) -> Recipe:
    return replace(subject, strategy=StrategyConfig(name=row["strategy"], mesh=MeshConfig(**row["mesh"])))


def measured_row(subject: Recipe, row: dict[str, Any], processes: int) -> dict[str, Any] | None:
    """Measure the memory of a layout; None if it cannot run."""
    try:
        inspection = run_trial(
            _TRIALS,
            "inspect_recipe",
            layout_recipe(subject, row),
            OPTIONS,
            None,
            processes=processes,
            preload=(*PRELOAD, "plan_data"),
        )
    except RankError as error:
        report(f"{row['name']} cannot run: {str(error).splitlines()[0]}")
        return None
    facts = {key: row[key] for key in ("name", "strategy", "mesh", "step_seconds", "parts", "memory", "is_measured")}
    return {**facts, "measured_bytes": inspection.peak, "rounds": []}


def step_seconds(subject: Recipe, row: dict[str, Any], processes: int) -> float:
    """Run some steps of a layout in new processes, and return the time of a step."""
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, round(_MEASURED_SECONDS / row["step_seconds"])))
    contender = Contender(row["name"], processes, processes, layout_recipe(subject, row))
    trial = ("time_contenders", [contender], steps, OPTIONS)
    timings = run_trial(_TRIALS, *trial, processes=processes, preload=(*PRELOAD, "plan_data"))
    report(f"{subject.model.name} {row['name']}: {1e3 * timings[0].step_seconds:.1f} ms")
    return float(timings[0].step_seconds)


def errors(results: list[dict[str, Any]]) -> tuple[dict[str, list[float]], list[float]]:
    """Relative errors of the step times of layouts by their kind in the plan, and of the memory of all."""
    rows = [row for result in results for row in result["rows"]]
    times: dict[str, list[float]] = {"all layouts": [], "run by the plan": [], "predicted": []}
    for row in rows:
        error = abs(row["step_seconds"] / row["measured_seconds"] - 1)
        for kind in ("all layouts", "run by the plan" if row["is_measured"] else "predicted"):
            times[kind].append(error)
    return times, [abs(row["memory"]["total"] / row["measured_bytes"] - 1) for row in rows]


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    times, sizes = errors(results)
    header = [
        "recipe",
        "processes",
        "layout",
        "plan",
        "step, ms",
        "planned",
        "error, %",
        "MiB",
        "predicted",
        "error, %",
    ]
    cells = [
        [
            result["recipe"],
            str(result["processes"]),
            row["name"] + (" (chosen)" if row["name"] == result["chosen"] else ""),
            "run" if row["is_measured"] else "predicted",
            f"{1e3 * row['measured_seconds']:.1f}",
            f"{1e3 * row['step_seconds']:.1f}",
            f"{100 * (row['step_seconds'] / row['measured_seconds'] - 1):+.0f}",
            f"{row['measured_bytes'] / 2**20:.0f}",
            f"{row['memory']['total'] / 2**20:.0f}",
            f"{100 * (row['memory']['total'] / row['measured_bytes'] - 1):+.1f}",
        ]
        for result in results
        for row in result["rows"]
    ]
    choices = [
        [
            result["recipe"],
            str(result["processes"]),
            result["chosen"],
            result["best"],
            f"{result['chosen_to_best']:.3f}",
            f"{result['calibration_seconds']:.0f}",
        ]
        for result in results
    ]
    return (
        "\n\n".join(
            [
                "# Predictions of `samestep plan`, compared with runs",
                machine_line(machine),
                f"Medians of {options.rounds} rounds, each layout in new processes in each round. Memory is resident "
                "memory of the largest rank.",
                "Error of the step time: "
                + "; ".join(
                    f"{kind} ({len(values)}) median {100 * statistics.median(values):.1f} %, largest "
                    f"{100 * max(values):.0f} %"
                    for kind, values in times.items()
                    if values
                )
                + f". Of memory: median {100 * statistics.median(sizes):.1f} %, largest {100 * max(sizes):.1f} %.",
                markdown_table(header, cells),
                "The chosen layout relative to the fastest measured one:",
                markdown_table(["recipe", "processes", "chosen", "fastest", "ratio", "calibration, s"], choices),
            ]
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/plan.py --recipes digits --processes 1 2 --rounds 2",
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", type=int, default=100, help="fastest predicted layouts to run (default: all)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a measurement of the calibration (default: 0.5)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "plan.json")
    options = parser.parse_args()
    sys.path.append(str(HERE))
    machine, results, began = describe_machine(), [], time.monotonic()
    for name in options.recipes:
        for processes in options.processes:
            results.append(run(name, processes, options))
            settings = {key: value for key, value in vars(options).items() if key != "output"}
            data = {"machine": machine, "settings": settings, "results": results}
            save(options.output, data, page(machine, options, results))
    print(page(machine, options, results))
    print(f"{time.monotonic() - began:.0f} s; written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
