"""Cost of comparisons between ranks in training: steps without checks, with the default ones and with `check_every`.

`--witness` measures steps with a `Witness` instead.

All variants live in the same processes and take turns of some steps; ratios to the engine that is not checked are taken
round by round. The cost of rarer comparisons follows from that of `every step`.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from checks_rounds import Plan, measure
from machine import Spread, describe_machine, machine_line, markdown_table, save

import samestep
from samestep.errors import SamestepError

HERE = Path(__file__).parent
OFF, AGAIN, DEFAULT, EVERY, TENTH = "off", "off, again", "default", "every step", "every 10 steps"
Variants = dict[str, dict[str, int] | None]
CHECKS: Variants = {
    OFF: None,
    AGAIN: None,
    DEFAULT: {},
    TENTH: {"check_every": 10},
    EVERY: {"check_every": 1},
}
WITNESS: Variants = {OFF: None, AGAIN: None, DEFAULT: {}, TENTH: {"witness_every": 10}, EVERY: {"witness_every": 1}}
BLOCKS = {"resnet": 10, "small": 40}  # multiples of 10, so that each turn has as many comparisons


def compare(model: str, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """The variants at one number of processes."""
    rounds = options.rounds * (4 if model == "small" else 1)
    variants = WITNESS if options.witness else CHECKS
    plan = Plan(model, options.batch_size, variants, rounds, BLOCKS[model], options.warmup)
    found: list[dict[str, tuple[float, float]]] = samestep.launch(
        measure, plan, processes=processes, preload=("checks_rounds",)
    )
    rows = [
        {
            "name": name,
            "milliseconds": Spread.of([1000 * turns[name][0] for turns in found]).rounded(3),
            "ratio": Spread.of([turns[name][0] / turns[OFF][0] for turns in found]).rounded(4),
            "added": Spread.of([1000 * (turns[name][0] - turns[OFF][0]) for turns in found]).rounded(3),
            "processor_ratio": Spread.of([turns[name][1] / turns[OFF][1] for turns in found]).rounded(4),
        }
        for name in variants
    ]
    return {"model": model, "processes": processes, "rounds": rounds, "block": BLOCKS[model], "rows": rows}


def table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        is_base = row["name"] == OFF
        rows.append(
            [
                row["name"],
                _shown(row["milliseconds"], 2),
                "0" if is_base else _shown(row["added"], 2),
                "1" if is_base else _shown(row["ratio"], 3),
                "1" if is_base else _shown(row["processor_ratio"], 3),
            ]
        )
    hundredth = [f"{_hundredth(result, kind):.3f}" for kind in ("ratio", "processor_ratio")]
    rows.append(["every 100 steps, computed", "", "", *hundredth])
    head = ["median (quartiles) of", "ms a step", "ms added", "ratio", "ratio of processor time"]
    return markdown_table(head, rows)


def _hundredth(result: dict[str, Any], kind: str) -> float:
    """The checks of each step, and a hundredth of a comparison of weights or of a witnessed step."""
    ratio = {row["name"]: row[kind]["median"] for row in result["rows"]}
    base = ratio[DEFAULT]
    return float(base + max(0.0, ratio[EVERY] - base) / 100)


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['q1']:.{digits}f} to {spread['q3']:.{digits}f})"


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    parts = [
        "# Cost of a witness" if options.witness else "# Cost of comparisons between ranks in training",
        machine_line(machine),
        f"Global batch {options.batch_size}, one microbatch and one thread per process, SGD with momentum; the "
        "variants alternate in the same\nprocesses, with ratios per round. `off, again` equals `off`: its "
        "difference from 1 is noise.",
    ]
    for result in results:
        turns = f"{result['rounds']} rounds of {result['block']} steps"
        parts += [f"## {result['model']}, {result['processes']} processes, {turns}", table(result)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/checks.py --processes 2 4 --models small",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=["resnet", "small"])
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: 64)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each variant; small has 4 times as many")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant that do not count (default: 3)")
    parser.add_argument("--witness", action="store_true", help="measure the witness, not the other checks")
    parser.add_argument("--output", type=Path, help="default: results/checks.json or results/witness.json")
    options = parser.parse_args()
    options.output = options.output or HERE / "results" / ("witness.json" if options.witness else "checks.json")
    machine = describe_machine()
    settings = {name: getattr(options, name) for name in ("batch_size", "rounds", "warmup")}
    results: list[dict[str, Any]] = []
    try:
        for model, processes in product(options.models, options.processes):
            results.append(compare(model, processes, options))
            print(f"{model}, {processes} processes\n\n{table(results[-1])}\n", flush=True)
            content = {"machine": machine, "settings": settings, "results": results}
            save(options.output, content, page(machine, options, results))
    except SamestepError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
