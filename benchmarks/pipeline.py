"""Time of a step with pipeline stages, compared with another checkout of Samestep.

Both checkouts take turns in processes of their own, with the same models and batches. Processor times are
the sum over ranks, and include the threads of the backend; they depend less on other load than elapsed times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.zoo.text.models import GPT

HERE = Path(__file__).parent
BATCH, MICROBATCHES, CLASSES, TOKENS = 64, 8, 10, 32


def perceptron(width: int, layers: int) -> nn.Module:
    """Return a model of `layers` layers with dropout."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(layers - 1)]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the width of the inputs; 0 for tokens
    "small": (partial(perceptron, 64, 8), 64),
    "5.3 M parameters": (partial(perceptron, 768, 10), 768),
    "GPT, 1 M parameters": (partial(GPT, 512, 128, 4, 4, TOKENS, 0.1), 0),
}


def step_times(name: str, schedule: str, steps: int, warmup: int) -> list[tuple[float, float]]:
    """Return milliseconds of processor and of elapsed time per step, for every rank."""
    build, width = MODELS[name]
    strategy = samestep.StrategyConfig(name="pp", schedule=schedule)  # type: ignore[arg-type]
    with samestep.start(device="cpu", strategy=strategy) as world:
        torch.manual_seed(0)
        size = 8 * BATCH
        inputs = torch.randn(size, width) if width else torch.randint(512, (size, TOKENS))
        targets = torch.randint(CLASSES, (size,)) if width else inputs
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
        data = TensorDataset(inputs, targets)
        batches = list(islice(samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, world=world), 8))
        for number in range(warmup):
            engine.step(batches[number % 8])
        world.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for number in range(steps):
            engine.step(batches[number % 8])
        times = time.process_time() - cpu, time.perf_counter() - wall
        rows: list[tuple[float, float]] = samestep.all_gather([1000 * value / steps for value in times], world)
        return rows


def run_turn(checkout: Path, arguments: list[str]) -> tuple[float, float]:
    """Return milliseconds per step of a checkout: processor time of all ranks, elapsed time."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, str(Path(__file__).resolve()), "--turn", *arguments]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = json.loads(output.splitlines()[-1])
    return sum(row[0] for row in rows), max(row[1] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: git worktree add ../before HEAD~1; python benchmarks/pipeline.py ../before",
    )
    parser.add_argument("before", type=Path, help="checkout to compare with")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "pipeline.json")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": HERE.parent}
    machine, results = describe_machine(), []
    for processes in options.processes:
        for name in MODELS:
            arguments = [name, str(processes), options.schedule, str(options.steps)]
            times: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
            for number in range(options.rounds):
                for checkout in ("before", "after") if number % 2 else ("after", "before"):
                    times[checkout].append(run_turn(checkouts[checkout], arguments))
            row: dict[str, Any] = {"model": name, "processes": processes}
            for column, kind in enumerate(("processor", "elapsed")):
                before, after = ([time[column] for time in times[checkout]] for checkout in ("before", "after"))
                ratios = [new / old for new, old in zip(after, before, strict=True)]
                row |= {f"{kind} ms": Spread.of(after).rounded(2), f"{kind} ratio": Spread.of(ratios).rounded(3)}
            results.append(row)
            print(name, processes, row["processor ms"], row["processor ratio"], row["elapsed ratio"], flush=True)
    header = ["model", "processes", "processor ms", "ratio", "quartiles", "elapsed ms", "ratio"]
    rows = [
        [
            row["model"],
            str(row["processes"]),
            f"{row['processor ms']['median']:.1f}",
            f"{row['processor ratio']['median']:.3f}",
            f"{row['processor ratio']['q1']:.3f} to {row['processor ratio']['q3']:.3f}",
            f"{row['elapsed ms']['median']:.1f}",
            f"{row['elapsed ratio']['median']:.3f}",
        ]
        for row in results
    ]
    text = markdown_table(header, rows)
    print(text)
    settings = {name: getattr(options, name) for name in ("schedule", "rounds", "steps")}
    title = f"# Step with pipeline stages, relative to an earlier version\n\n{machine_line(machine)}\n\n"
    save(options.output, {"machine": machine, "settings": settings, "results": results}, f"{title}{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        model, processes, schedule, steps = sys.argv[2:]
        times = samestep.launch(step_times, model, schedule, int(steps), 5, processes=int(processes))
        print(json.dumps(times))
    else:
        main()
