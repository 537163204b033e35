"""Cost of a checkpoint in training: written while the ranks wait, or during their steps.

All variants live in the same processes and take turns of some steps, one of which is followed by a save; ratios to
turns without a save are taken round by round. A turn ends when the checkpoint is on the disk. The cost of rarer
saves follows.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from snapshots_rounds import BACKGROUND, BLOCKING, OFF, VARIANTS, Plan, measure

import samestep
from samestep.errors import SamestepError

HERE = Path(__file__).parent
BLOCKS = {"resnet": 10, "small": 100}


def compare(model: str, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """The variants at one number of processes."""
    block = BLOCKS[model]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plan = Plan(model, options.batch_size, Path(folder), options.rounds, block, options.warmup)
        found: dict[str, Any] = samestep.launch(measure, plan, processes=processes, preload=("snapshots_rounds",))
    turns = found["rounds"]
    rows = [
        {
            "name": name,
            "milliseconds": Spread.of([1000 * turn[name] for turn in turns]).rounded(3),
            "ratio": Spread.of([turn[name] / turn[OFF] for turn in turns]).rounded(4),
            "a_save": Spread.of([1000 * block * (turn[name] - turn[OFF]) for turn in turns]).rounded(1),
        }
        for name in VARIANTS
    ]
    pauses = {name: Spread.of([1000 * pause for pause in found["pauses"][name]]).rounded(1) for name in found["pauses"]}
    writing = Spread.of([1000 * seconds for seconds in found["writing"]]).rounded(1)
    return {
        "model": model,
        "processes": processes,
        "rounds": options.rounds,
        "block": block,
        "megabytes": round(found["bytes"] / 1e6, 2),
        "rows": rows,
        "pauses": pauses,
        "writing": writing,
    }


def table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        name, is_base = row["name"], row["name"] == OFF
        rows.append(
            [
                name,
                _shown(row["milliseconds"], 2),
                "1" if is_base else _shown(row["ratio"], 3),
                "0" if is_base else _shown(row["a_save"], 0),
                _shown(result["pauses"][name], 0) if name in result["pauses"] else "",
            ]
        )
    header = ["median (quartiles) of", "ms a step", "ratio", "ms a turn more", "ms until rank 0 trains on"]
    return markdown_table(header, rows)


def rarer(result: dict[str, Any]) -> str:
    """Return the cost of one save in 30 seconds, in percent."""
    cost = {row["name"]: row["a_save"]["median"] for row in result["rows"]}
    parts = [f"{max(0.0, cost[name]) / 300:.2f} % {name}" for name in (BLOCKING, BACKGROUND)]
    return (
        f"A checkpoint has {result['megabytes']:,} MB. It is on the disk {_shown(result['writing'], 0)} ms after the "
        f"step whose state it holds. Computed for one in 30 s: {', '.join(parts)}."
    )


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['q1']:.{digits}f} to {spread['q3']:.{digits}f})"


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    parts = [
        "# Cost of a checkpoint in training",
        machine_line(machine) + (f" {options.note}" if options.note else ""),
        f"Global batch {options.batch_size}, one microbatch and one thread per process, SGD with momentum; the "
        "variants alternate in the same\nprocesses, with ratios per round. A turn with a save ends when the "
        "checkpoint is on the disk.\n`no saves, again` equals `no saves`: its difference from 1 is noise.",
    ]
    for result in results:
        turns = f"{result['rounds']} rounds of {result['block']} steps, one save a turn"
        parts += [f"## {result['model']}, {result['processes']} processes, {turns}", table(result), rarer(result)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/snapshots.py --processes 2 --models small",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=["resnet", "small"])
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: 64)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant (default: 8)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant that do not count (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the disk that checkpoints go to (default: the system's)")
    parser.add_argument("--note", default="", help="a sentence for the page, such as other load of the machine")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "snapshots.json")
    options = parser.parse_args()
    machine = describe_machine()
    settings = {name: getattr(options, name) for name in ("batch_size", "rounds", "warmup", "note")}
    results: list[dict[str, Any]] = []
    try:
        for model, processes in product(options.models, options.processes):
            results.append(compare(model, processes, options))
            print(f"{model}, {processes} processes\n\n{table(results[-1])}\n\n{rarer(results[-1])}\n", flush=True)
            content = {"machine": machine, "settings": settings, "results": results}
            save(options.output, content, page(machine, options, results))
    except SamestepError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
