"""What `batch_norm: sync` costs beside `microbatch`: the same steps by turns, in the same processes."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import build_dataset, build_model, build_optimizer

import samestep
from samestep.config import BatchNorm, StepConfig

WORDS: tuple[BatchNorm, ...] = ("microbatch", "sync")
Found = dict[str, Any]


def measure(model: str, batch_size: int, microbatches: int, rounds: int, steps: int) -> Found:
    """Seconds a step, by word and round, on rank 0; what `samestep.launch` runs in each rank."""
    with samestep.start(device="cpu") as world:
        contenders = {}
        for word in WORDS:
            net = build_model(model)
            rules = StepConfig(batch_norm=word)
            engine = samestep.Engine(net, build_optimizer(net), samestep.cross_entropy, world=world, config=rules)
            loader = samestep.loader(
                build_dataset(), batch_size=batch_size, microbatches=microbatches, world=world, num_workers=0
            )
            batches = [batch for batch, _ in zip(loader, range(steps), strict=False)]
            contenders[word] = (engine, batches)
        peaks = {}
        for word, (engine, batches) in contenders.items():  # warms up; sync last, since a peak only grows
            for batch in batches:
                engine.step(batch)
            peaks[word] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times: dict[str, list[float]] = {word: [] for word in WORDS}
        for turn in range(rounds):
            for word in WORDS if turn % 2 == 0 else WORDS[::-1]:
                engine, batches = contenders[word]
                world.barrier()
                began = time.perf_counter()
                for batch in batches:
                    engine.step(batch)
                world.barrier()
                times[word].append((time.perf_counter() - began) / steps)
        return {"times": times, "growth": peaks["sync"] - peaks["microbatch"]}


def row(found: Found, name: str) -> list[str]:
    times = found["times"]
    ratio = Spread.of([sync / microbatch for microbatch, sync in zip(times["microbatch"], times["sync"], strict=True)])
    medians = [f"{1000 * Spread.of(times[word]).median:.0f}" for word in WORDS]
    return [name, *medians, f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})", f"{found['growth']:+.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["resnet", "small"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "batch_norm.json")
    options = parser.parse_args()
    machine = describe_machine()
    results: dict[str, dict[int, Found]] = {}
    header = ["processes", "microbatch, ms a step", "sync, ms a step", "ratio, median (quartiles)", "MiB a rank more"]
    parts = [
        "# Batch norm over all microbatches beside batch norm by microbatch",
        machine_line(machine),
        f"Global batch {options.batch_size} in {options.microbatches} microbatches, one thread a process, `exact`, "
        f"{options.rounds} rounds in which\nboth have a turn of some steps in the same processes. "
        "Ratios are taken round by round. The last column is\nby how much the first steps with `sync` raised "
        "the peak memory of rank 0 above that of `microbatch`.",
    ]
    for model in options.models:
        results[model] = {
            processes: samestep.launch(
                measure,
                model,
                options.batch_size,
                options.microbatches,
                options.rounds,
                options.steps,
                processes=processes,
            )
            for processes in options.processes
        }
        rows = [row(found, str(processes)) for processes, found in results[model].items()]
        parts += [f"## {model}", markdown_table(header, rows)]
        print(parts[-2], parts[-1], sep="\n\n", flush=True)
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
