"""Time and memory of a plain loop with `samestep.parallel`, relative to the plain loop, DDP, Accelerate and Fabric.

The global batch is the same for all, data are in memory, and a process has one thread. The processes of all contenders
of a case are started once and wait for turns of some steps, so that other load of the machine affects all of them.
Ratios are taken round by round; a goal holds if the median, or the upper end of the interval of the cost of checks, is
at most the limit. The start is the time of the first steps beyond that of as many later ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine, machine_line, markdown_table, save
from plain_loop_cases import ACCELERATE, CASES, DDP, DDP_SYNC, EXACT, FABRIC, PARALLEL, PLAIN, UNWATCHED, Case
from plain_loop_data import image_folder, write_images
from plain_loop_ranks import Ranks

import samestep

CONTENDERS = {
    "plain": (PLAIN, 1),
    "parallel-1": (PARALLEL, 1),
    "parallel-2": (PARALLEL, 2),
    "ddp-2": (DDP, 2),
    "ddp-sync-2": (DDP_SYNC, 2),
    "accelerate-1": (ACCELERATE, 1),
    "accelerate-2": (ACCELERATE, 2),
    "fabric-1": (FABRIC, 1),
    "fabric-2": (FABRIC, 2),
}
# Contenders of cases that have their own.
OWN_CONTENDERS = {
    "checks-gpt": [(PLAIN, 1), (PARALLEL, 1), (PARALLEL, 2), (UNWATCHED, 2)],
    "checks-unet": [(PLAIN, 1), (PARALLEL, 1), (PARALLEL, 2), (UNWATCHED, 2)],
    "digits-epoch": [(PLAIN, 1), (PARALLEL, 1), (PARALLEL, 2), (DDP_SYNC, 2)],
    "jpeg-resnet": [(PLAIN, 1), (PARALLEL, 1), (PARALLEL, 2), (DDP_SYNC, 2), (DDP, 2)],
    "exact-gpt-8": [(EXACT, 2), (DDP, 2), (EXACT, 4), (DDP, 4)],
    "exact-resnet-16": [(EXACT, 2), (DDP, 2), (EXACT, 4), (DDP, 4)],
}
PACKAGES = {ACCELERATE: "accelerate", FABRIC: "lightning"}
MEMORY_CASES, MEMORY_CONTENDERS = ("gpt-32", "segmentation"), ("plain", "ddp-2", "parallel-2")
MEMORY_LIMIT = 1.05

WARMUP_STEPS = 6  # a call is computed whole, tried, and then divided
EPOCHS_OF_WARMUP = 1
TURN_SECONDS = 0.25  # of a contender of middle speed; all take as many steps
SAME_UPDATE = 0.05  # relative distance of the weights' changes; Adam amplifies rounding of gradients close to zero

Key = tuple[str, int]
Times = dict[Key, list[dict[str, float]]]


def missing_reason(contender: str) -> str | None:
    """Return why a contender cannot take part, or None."""
    if contender in (PARALLEL, EXACT, UNWATCHED) and not hasattr(samestep, "parallel"):
        return "this version has no samestep.parallel"
    package = PACKAGES.get(contender)
    if package and find_spec(package) is None:
        return f"{package} is not installed"
    return None


def start_ranks(name: str, keys: Sequence[Key], warmup: int, notes: list[str]) -> list[Ranks]:
    """Start the contenders of a case and take some steps; one that fails is left out with a note."""
    started = []
    for contender, processes in keys:
        reason = missing_reason(contender)
        if reason is None:
            try:
                ranks = Ranks(name, contender, processes)
                ranks.take_first_steps(warmup)
                started.append(ranks)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
        if reason is not None:
            notes.append(f"{contender} on {processes} does not take part: {reason}")
            print(f"  {notes[-1]}", flush=True)
    return started


def measure(name: str, keys: Sequence[Key], options: argparse.Namespace) -> dict[str, Any]:
    """Return the times, ratios and verdicts of one case."""
    case = CASES[name]
    notes: list[str] = []
    warmup = min(options.warmup, EPOCHS_OF_WARMUP) if case.kind == "epoch" else options.warmup
    contenders = start_ranks(name, keys, warmup, notes)
    try:
        if case.kind in ("train", "accumulate") and case.dataset is None:  # with equal batches
            notes += different_updates(case, contenders)
        seconds = [ranks.take_turn(1 if case.kind == "epoch" else 3)["wall"] for ranks in contenders]
        steps = max(1, round(options.turn / (min(seconds) * max(seconds)) ** 0.5))
        times: Times = {(ranks.contender, ranks.processes): [] for ranks in contenders}
        for order in orders(contenders, options.rounds):
            for ranks in order:
                times[ranks.contender, ranks.processes].append(ranks.take_turn(steps))
    finally:
        for ranks in contenders:
            ranks.close()
    rows = rows_of(case, times)
    for row, ranks in zip(rows, contenders, strict=True):
        row["start"] = round(ranks.first_steps - warmup * row["milliseconds"] / 1000, 3)
    return {"case": name, "title": case.title, "steps": steps, "notes": notes, "rows": rows}


def orders(contenders: list[Ranks], rounds: int) -> Iterator[list[Ranks]]:
    """Yield everyone once per round, beginning one further each time, and backwards every other time."""
    for number in range(rounds):
        shift = number // 2 % len(contenders)
        order = [*contenders[shift:], *contenders[:shift]]
        yield order if number % 2 == 0 else order[::-1]


def different_updates(case: Case, contenders: Sequence[Ranks]) -> list[str]:
    """Compare the weights after the first steps with those of the first contender."""
    reference, notes = None, []
    for ranks in contenders:
        first, *others = ranks.ask("weights")
        if any(not first.equal(other) for other in others):
            notes.append(f"{ranks.contender} on {ranks.processes}: weights of the ranks differ")
        if reference is None:
            reference = first
        elif not (case.has_batch_norm and ranks.processes > 1 and ranks.contender not in (PARALLEL, EXACT, DDP_SYNC)):
            start = ranks.ask("start")[0]
            distance = float((first - reference).norm() / (reference - start).norm())
            if distance > SAME_UPDATE:
                notes.append(f"{ranks.contender} on {ranks.processes}: the update differs by {distance:.2g}")
    for note in notes:
        print(f"  {note}", flush=True)
    return notes


def rows_of(case: Case, times: Times) -> list[dict[str, Any]]:
    """Return for each contender its median time, its ratios, and its goal."""
    rows = []
    for (contender, processes), turns in times.items():
        row: dict[str, Any] = {"contender": contender, "processes": processes}
        row["milliseconds"] = round(1000 * statistics.median(turn["wall"] for turn in turns), 3)
        goal = next(
            (goal for goal in case.goals if contender in (PARALLEL, EXACT) and goal.processes == processes), None
        )
        base = goal.base if goal else default_base(case, processes)
        if base in times and base != (contender, processes):
            row["base"] = f"{base[0]} on {base[1]}"
            row["ratio"] = interval([a["wall"] / b["wall"] for a, b in zip(turns, times[base], strict=True)])
            row["cpu_ratio"] = interval([a["cpu"] / b["cpu"] for a, b in zip(turns, times[base], strict=True)])
            if goal:
                row["goal"] = goal.limit
                row["holds"] = row["ratio"]["high" if goal.is_bound else "median"] <= goal.limit
        rows.append(row)
    return rows


def default_base(case: Case, processes: int) -> Key:
    """Return the contender by which the times of others are divided."""
    return (DDP, 2) if processes > 1 and case.kind != "evaluate" else (PLAIN, 1)


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the median with a 95 % interval, from the ranks of the ordered values."""
    ordered, count = sorted(values), len(values)
    outside, tail = 0, 0.0
    while outside < count // 2:
        tail += comb(count, outside) / 2**count
        if 2 * tail > 0.05:
            break
        outside += 1
    low = max(outside - 1, 0)
    measured = {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[count - 1 - low]}
    return {name: round(value, 4) for name, value in measured.items()}


def measure_memory(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peak of a step of each contender, beyond what is there between steps."""
    notes: list[str] = []
    names = [name for name in MEMORY_CONTENDERS if name in options.contenders]
    contenders = start_ranks(case, [CONTENDERS[name] for name in names], options.warmup, notes)
    try:
        peaks = {(ranks.contender, ranks.processes): max(ranks.ask("memory")) for ranks in contenders}
        gradients = 4 * contenders[0].ask("weights")[0].numel()
    finally:
        for ranks in contenders:
            ranks.close()
    rows: list[dict[str, Any]] = [{"contender": key[0], "processes": key[1], "bytes": peaks[key]} for key in peaks]
    for row in rows:
        if (PLAIN, 1) in peaks and row["contender"] == PARALLEL:
            row["goal"] = round(MEMORY_LIMIT * (peaks[PLAIN, 1] / row["processes"] + gradients))
            row["holds"] = row["bytes"] <= row["goal"]
    return {"case": case, "gradients": gradients, "notes": notes, "rows": rows}


def table(result: dict[str, Any]) -> str:
    header = ["contender", "on", "start, s", "ms a step", "ratio (95 %)", "of", "processor time", "goal", "holds"]
    cells = []
    for row in result["rows"]:
        ratios = [shown(row[name]) if name in row else "" for name in ("ratio", "cpu_ratio")]
        goal = [f"{row['goal']:.2f}", "yes" if row["holds"] else "no"] if "goal" in row else ["", ""]
        times = f"{row['milliseconds']:.2f}"
        counts = [row["contender"], str(row["processes"]), f"{row['start']:.2f}"]
        cells.append([*counts, times, ratios[0], row.get("base", ""), ratios[1], *goal])
    return markdown_table(header, cells)


def shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def memory_table(result: dict[str, Any]) -> str:
    cells = []
    for row in result["rows"]:
        goal = [f"{row['goal'] / 1e6:.1f}", "yes" if row["holds"] else "no"] if "goal" in row else ["", ""]
        cells.append([row["contender"], str(row["processes"]), f"{row['bytes'] / 1e6:.1f}", *goal])
    return markdown_table(["contender", "on", "peak of a step, MB", "goal", "holds"], cells)


def summary(results: Sequence[dict[str, Any]]) -> str:
    cells = []
    for result in results:
        for row in result["rows"]:
            if "goal" in row:
                holds = "yes" if row["holds"] else "**no**"
                values = [shown(row["ratio"]), row["base"], f"{row['goal']:.2f}", holds]
                cells.append([result["title"], str(row["processes"]), *values])
    return markdown_table(["case", "on", "ratio (95 %)", "of", "goal", "holds"], cells)


def page(machine: dict[str, Any], options: argparse.Namespace, measured: dict[str, Any]) -> str:
    parts = [
        "# Time of a plain loop with `samestep.parallel`",
        machine_line(machine),
        "Global batch equal in all contenders, data in memory, one thread per process, "
        f"{options.rounds} rounds of turns of about {options.turn} s,\nby turns in processes that are started once. "
        "Ratio: median of the ratios of rounds with its 95 % interval; above 1 is slower.\n"
        "Start: seconds of the first steps beyond those of as many later ones. "
        "Processor time is the sum over the ranks. DDP, Accelerate and Fabric have batch norm per rank; DDP with batch "
        "norm over ranks is\nwritten by hand, since torch's SyncBatchNorm does not run on CPUs.",
        "## Goals",
        summary(measured["results"]),
    ]
    for result in measured["results"]:
        parts += [f"## {result['title']}", table(result), *(f"- {note}" for note in result["notes"])]
    for memory in measured["memory"]:
        parts += [
            f"## Memory of a step: {CASES[memory['case']].title}",
            "Peak of the bytes of tensors in a step beyond those between steps, on the rank with most. Goal: the plain "
            "loop's divided by\nthe number of ranks, plus the gradients "
            f"({memory['gradients'] / 1e6:.1f} MB), plus 5 %.",
            memory_table(memory),
        ]
    return "\n\n".join(parts) + "\n"


def print_profiles(options: argparse.Namespace) -> None:
    for name in options.cases:
        for ranks in start_ranks(name, keys_of(name, options), options.warmup, []):
            first, *_ = ranks.ask("profile")
            print(f"{name}: {ranks.contender} on {ranks.processes}, rank 0\n{first}", flush=True)
            ranks.close()


def keys_of(name: str, options: argparse.Namespace) -> list[Key]:
    if name in OWN_CONTENDERS:
        return OWN_CONTENDERS[name]
    keys = [CONTENDERS[contender] for contender in CONTENDERS if contender in options.contenders]
    case = CASES[name]
    has_sync = case.has_batch_norm and case.kind == "train"
    return [key for key in keys if has_sync or key[0] != DDP_SYNC]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/plain_loop.py --cases gpt-8 --contenders plain ddp-2 parallel-2 --rounds 10",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (default: 15)")
    parser.add_argument("--turn", type=float, default=TURN_SECONDS, help="seconds of a turn (default: 0.25)")
    parser.add_argument("--warmup", type=int, default=WARMUP_STEPS, help="steps before the first turn")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure memory")
    parser.add_argument("--profile", action="store_true", help="print operations of rank 0 instead of measuring")
    parser.add_argument("--output", type=Path, help="JSON file, with a page in the same folder (default: print only)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # before the server of the processes starts
    with TemporaryDirectory() as images:
        if any(CASES[name].dataset is image_folder for name in options.cases):
            write_images(Path(images))  # before the server starts, which passes the folder on
        if options.profile:
            print_profiles(options)
        else:
            measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """Measure the cases and write the results."""
    machine = describe_machine()
    measured: dict[str, Any] = {"machine": machine, "settings": {"rounds": options.rounds, "turn": options.turn}}
    measured |= {"results": [], "memory": []}
    for name in options.cases:
        result = measure(name, keys_of(name, options), options)
        print(f"{result['title']}\n\n{table(result)}\n", flush=True)
        measured["results"].append(result)
    for name in MEMORY_CASES if options.memory else ():
        measured["memory"].append(measure_memory(name, options))
        print(memory_table(measured["memory"][-1]), flush=True)
    if options.output is not None:
        save(options.output, measured, page(machine, options, measured))
        print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
