"""Time of an optimizer step: Samestep, a hand-written DDP loop, Accelerate, Lightning Fabric and Lightning Trainer.

All contenders live in the same processes and alternate in short blocks of steps, so that other load of the
machine affects all of them; ratios are taken round by round. `ready` feeds every contender tensors that are in memory;
`loader` lets each draw its batches as its users would. The ratio of a second hand-written loop shows the noise.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_contenders import ACCELERATE, AGAIN, FABRIC, HAND_WRITTEN, REDUCTIONS, TRAINER, Feed, Setting, ours
from step_models import MODELS
from step_profile import profile
from step_rounds import Plan, Round, measure

import samestep
from samestep.errors import SamestepError

HERE = Path(__file__).parent
MICROBATCHES_A_RANK = (1, 2, 4, 8)
BLOCKS = {"resnet": 5, "small": 20, "gpt": 3}  # steps a turn: some tenths of a second
PRELOAD = ("step_rounds",)

# For each comparison, the contender by which times are divided.
_CONTENDERS = (HAND_WRITTEN, AGAIN, ours("exact"), ours("fast"), ACCELERATE, FABRIC, TRAINER)
PEERS = dict.fromkeys(_CONTENDERS, HAND_WRITTEN)
MICROBATCHES = {
    ours(reduction, microbatches): ours(reduction) for reduction in REDUCTIONS for microbatches in MICROBATCHES_A_RANK
}
COMPARISONS = {"peers": PEERS, "microbatches": MICROBATCHES}


def compare(comparison: str, processes: int, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one comparison at one number of processes; a summary for each feed."""
    bases = COMPARISONS[comparison]
    setting = Setting(model, options.batch_size)
    block = options.block or BLOCKS[model]
    plan = Plan(tuple(bases), setting, tuple(options.feeds), options.rounds, block, options.warmup)
    found: dict[Feed, list[Round]] = samestep.launch(measure, plan, processes=processes, preload=PRELOAD)
    return [
        {
            "comparison": comparison,
            "model": model,
            "processes": processes,
            "block": block,
            "feed": feed,
            "rows": [summarise(name, base, rounds) for name, base in bases.items()],
        }
        for feed, rounds in found.items()
    ]


def summarise(name: str, base: str, rounds: list[Round]) -> dict[str, Any]:
    return {
        "name": name,
        "base": base,
        "milliseconds": Spread.of([1000 * turns[name].wall for turns in rounds]).rounded(3),
        "ratio": Spread.of([turns[name].wall / turns[base].wall for turns in rounds]).rounded(4),
        "cpu_milliseconds": Spread.of([1000 * turns[name].cpu for turns in rounds]).rounded(3),
        "cpu_ratio": Spread.of([turns[name].cpu / turns[base].cpu for turns in rounds]).rounded(4),
    }


def table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        is_base = row["name"] == row["base"]
        ratios = ["1" if is_base else _shown(row[key], 3) for key in ("ratio", "cpu_ratio")]
        rows.append([row["name"], _shown(row["milliseconds"], 1), *ratios])
    return markdown_table(["median (quartiles) of", "ms a step", "ratio", "ratio of processor time"], rows)


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['q1']:.{digits}f} to {spread['q3']:.{digits}f})"


def title(result: dict[str, Any]) -> str:
    against = "the hand-written loop" if result["comparison"] == "peers" else "one microbatch a rank"
    fed = "tensors in memory" if result["feed"] == "ready" else "batches from its loader"
    return f"{result['model']}, {counted(result['processes'])}, {fed}: against {against}"


def counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def page(machine: dict[str, Any], options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    parts = [
        "# Time of an optimizer step",
        machine_line(machine),
        f"Global batch {options.batch_size}, one thread a process, {options.rounds} rounds; in each, every contender "
        "has a turn of some steps,\nall in the same processes. Ratios are taken round by round; above 1 is slower. "
        "Processor time is rank 0's.",
    ]
    for result in results:
        parts += [f"## {title(result)}", table(result)]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/step_time.py --processes 2 4 --models resnet --rounds 40",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--comparisons", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--feeds", nargs="+", choices=("ready", "loader"), default=["ready", "loader"])
    parser.add_argument("--prefetched", dest="feeds", action="store_const", const=["ready"], help="--feeds ready")
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: 64)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (default: 20)")
    parser.add_argument("--block", type=int, help=f"steps a turn (default: {BLOCKS})")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each contender that do not count (default: 5)")
    parser.add_argument("--profile", action="store_true", help="print where our time goes instead of measuring")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "step_time.json")
    options = parser.parse_args()
    smallest = max(options.processes) * max(MICROBATCHES_A_RANK)
    if options.batch_size % smallest:
        parser.error(
            f"--batch-size {options.batch_size}: a multiple of {smallest} gives all microbatches the same size"
        )
    return options


def print_profiles(options: argparse.Namespace) -> None:
    for processes, model in product(options.processes, options.models):
        print(samestep.launch(profile, Setting(model, options.batch_size), processes=processes, preload=PRELOAD))


def measure_all(options: argparse.Namespace) -> None:
    machine = describe_machine()
    results = []
    for model, processes, comparison in product(options.models, options.processes, options.comparisons):
        for result in compare(comparison, processes, model, options):
            print(f"{title(result)}\n\n{table(result)}\n", flush=True)
            results.append(result)
    settings = {name: getattr(options, name) for name in ("batch_size", "rounds", "warmup")}
    save(
        options.output,
        {"machine": machine, "settings": settings, "results": results},
        page(machine, options, results),
    )
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


def main() -> None:
    options = parse()
    try:
        print_profiles(options) if options.profile else measure_all(options)
    except SamestepError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
