"""How near `samestep tune` comes to the best of a full grid, and in how much of the grid's time.

The grid is a search by hand: every setting of workers and prefetch, five rounds of 20 steps. Searches
stand between the grid's rounds, in the same processes, so that both see the machine as it is. The choice of a
search is then compared with the grid's best by turns: the best of 25 noisy medians looks better than it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from tune_rounds import measure

import samestep
from samestep.recipes.recipe_files import make_recipe

HERE = Path(__file__).parent
BASE = {
    "optimizer": {"name": "sgd", "options": {"lr": 0.01}},
    "batch_size": 64,
    "microbatches": 8,
    "epochs": 1,
}
# The cause of time: waits for a disk and a device, the processor, or almost nothing.
CASES: dict[str, dict[str, Any]] = {
    "waits": {"data": {"wait": 0.005}, "model": {"wait": 0.01}},
    "works": {"data": {"work": 0.0005}, "model": {"wait": 0.004}},
    "ready": {"data": {}, "model": {"width": 64}},
}


def run(case: str, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case on so many processes."""
    parts = {
        "data": {"name": "tune_data:load", "options": CASES[case]["data"]},
        "model": {"name": "tune_data:Net", "options": CASES[case]["model"]},
    }
    recipe = make_recipe({**BASE, **parts}, (), origin=case)
    given = (recipe, options.searches, options.rounds, options.again, options.seconds)
    found = samestep.launch(measure, *given, processes=processes, preload=("tune_rounds", "tune_data"))
    return {"case": case, "processes": processes, **found}


def row(result: dict[str, Any]) -> list[str]:
    searches = result["searches"]
    of_grid = Spread.of([each["seconds"] / result["grid_seconds"] for each in searches])
    lost = Spread.of([100 * (1 - Spread.of(each["against_best"]).median) for each in searches])
    chosen = ", ".join(dict.fromkeys(_name(each) for each in searches))
    return [
        result["case"],
        str(result["processes"]),
        _name(result["best"]),
        chosen,
        f"{lost.median:.1f} ({lost.least:.1f} to {lost.most:.1f})",
        f"{result['grid_seconds']:.0f}",
        f"{100 * of_grid.median:.0f} ({100 * of_grid.least:.0f} to {100 * of_grid.most:.0f})",
    ]


def _name(setting: dict[str, Any]) -> str:
    return f"{setting['workers']}/{setting['prefetch']}" if setting["workers"] else "0"


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    header = ["data", "processes", "best of the grid", "chosen", "% slower than it", "grid, s", "% of its time"]
    return (
        "\n\n".join(
            [
                "# Settings chosen by `samestep tune`, compared with a full grid",
                machine_line(machine),
                f"The grid: 25 settings (workers/prefetch), {options.rounds} rounds of 20 steps. {options.searches} "
                f"searches between its rounds; medians,\nin brackets the extremes. Slower: of {options.again} turns "
                "each by turns with the grid's best; negative is faster. Other\nwork ran on the machine.",
                markdown_table(header, [row(result) for result in results]),
            ]
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/tune.py --cases waits:2 --searches 1 --rounds 1",
    )
    parser.add_argument("--cases", nargs="+", default=["waits:1", "waits:2", "works:1", "ready:2"], metavar="CASE:N")
    parser.add_argument("--searches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="of the grid (default: 5)")
    parser.add_argument("--again", type=int, default=7, help="turns of the choice against the grid's best")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn of a search (default: 0.5)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tune.json")
    options = parser.parse_args()
    machine = describe_machine()
    results = []
    for case in options.cases:
        name, _, processes = case.partition(":")
        results.append(run(name, int(processes), options))
        print(page(machine, options, results), flush=True)
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        save(
            options.output,
            {"machine": machine, "settings": settings, "results": results},
            page(machine, options, results),
        )


if __name__ == "__main__":
    main()
