"""Time of a step that updates the parameters of a bucket during the rest of backward, as gradients are complete.

Hand-written DDP loops in the same processes take turns; each pair computes the same weights, which is checked first.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from early_step_rounds import ALONE, OPTIMIZERS, Plan, Variant, measure
from machine import Spread, describe_machine, machine_line, markdown_table, save

import samestep
from samestep.errors import SamestepError

HERE = Path(__file__).parent
BASE = "after backward"
VARIANTS = {
    BASE: Variant(False, None),
    "after backward, again": Variant(False, None),
    "during backward": Variant(True, None),
    "after backward, buckets of 2 MB": Variant(False, 2),
    "during backward, buckets of 2 MB": Variant(True, 2),
}


def compare(optimizer: str, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """The variants at one number of processes."""
    plan = Plan("resnet", optimizer, options.batch_size, VARIANTS, options.rounds, options.block, warmup=3)
    found: list[dict[str, float]] = samestep.launch(measure, plan, processes=processes, preload=("early_step_rounds",))
    rows = [
        {
            "name": name,
            "milliseconds": Spread.of([1000 * turns[name] for turns in found]).rounded(3),
            "ratio": Spread.of([turns[name] / turns[BASE] for turns in found]).rounded(4),
        }
        for name in (*VARIANTS, ALONE)
    ]
    return {"optimizer": optimizer, "processes": processes, "rows": rows}


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    parts = [
        "# Updates during backward",
        machine_line(machine),
        f"A ResNet of 5.4 M parameters, global batch {options.batch_size}, plain DDP, {options.rounds} rounds of "
        f"{options.block} steps.\nRatios are taken round by round; above 1 is slower. The update alone is all that "
        "there is to gain.",
    ]
    for result in results:
        rows = [[row["name"], _shown(row["milliseconds"], 1), _shown(row["ratio"], 3)] for row in result["rows"]]
        parts += [
            f"## {result['optimizer']}, {result['processes']} processes",
            markdown_table(["median (quartiles) of", "ms a step", "ratio"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['q1']:.{digits}f} to {spread['q3']:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: 64)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each loop (default: 30)")
    parser.add_argument("--block", type=int, default=1, help="steps a turn (default: 1)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "early_step.json")
    options = parser.parse_args()
    machine = describe_machine()
    try:
        results = [compare(*case, options) for case in product(options.optimizers, options.processes)]
    except SamestepError as error:
        raise SystemExit(f"error: {error}") from None
    settings = {name: getattr(options, name) for name in ("batch_size", "rounds", "block")}
    text = page(machine, options, results)
    save(options.output, {"machine": machine, "settings": settings, "results": results}, text)
    print(text)


if __name__ == "__main__":
    main()
