"""Host time of a step beyond a hand-written loop: one linear layer, so that nearly all of a step is bookkeeping.

The engine and the loop take turns of some steps in one process, with the same microbatches, already collated; the loop
accumulates their gradients. Times are those of the process, without waits for the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.utils.data import TensorDataset

import samestep

HERE = Path(__file__).parent
SAMPLES, CLASSES = 16, 4  # in a microbatch


def measure(world: samestep.World, microbatches: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds of a step of the engine and of the loop in every round."""
    torch.manual_seed(0)
    size = SAMPLES * microbatches
    dataset = TensorDataset(torch.randn(8 * size, 32), torch.randint(CLASSES, (8 * size,)))
    loader = samestep.loader(dataset, batch_size=size, microbatches=microbatches, world=world)
    batches = list(islice(loader, 8))
    data = [[microbatch.data for microbatch in batch.local_microbatches] for batch in batches]
    models = [nn.Linear(32, CLASSES) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    engine = samestep.Engine(models[0], optimizers[0], samestep.cross_entropy, world=world)

    def plain_step(number: int) -> None:
        optimizers[1].zero_grad()
        for inputs, targets in data[number % 8]:
            loss = nn.functional.cross_entropy(models[1](inputs), targets) / microbatches
            loss.backward()
        optimizers[1].step()
        loss.item()

    def engine_step(number: int) -> None:
        engine.step(batches[number % 8])

    def turn(step: Callable[[int], None]) -> float:
        began = time.process_time()
        for number in range(steps):
            step(number)
        return 1000 * (time.process_time() - began) / steps

    turn(engine_step), turn(plain_step)
    times: dict[str, list[float]] = {"engine": [], "loop": []}
    for number in range(rounds):
        turns = [("engine", engine_step), ("loop", plain_step)]
        for name, step in turns if number % 2 else turns[::-1]:
            times[name].append(turn(step))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/host_time.py --microbatches 1 8",
    )
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 8], metavar="V")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50, help="of each turn (default: 50)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "host_time.json")
    options = parser.parse_args()
    machine = describe_machine()
    results: list[dict[str, Any]] = []
    with samestep.start(device="cpu") as world:
        for microbatches in options.microbatches:
            times = measure(world, microbatches, options.rounds, options.steps)
            beyond = [engine - loop for engine, loop in zip(times["engine"], times["loop"], strict=True)]
            spreads = {name: Spread.of(values).rounded(3) for name, values in {**times, "beyond": beyond}.items()}
            results.append({"microbatches": microbatches, **spreads})
    rows = [
        [str(row["microbatches"]), *(f"{row[name]['median']:.2f}" for name in ("engine", "loop", "beyond"))]
        for row in results
    ]
    text = markdown_table(["microbatches", "engine, ms", "loop, ms", "beyond the loop, ms"], rows)
    print(text)
    title = f"# Host time of a step beyond a hand-written loop\n\n{machine_line(machine)}\n\n"
    settings = {"rounds": options.rounds, "steps": options.steps}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, f"{title}{text}\n")


if __name__ == "__main__":
    main()
