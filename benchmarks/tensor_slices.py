"""Processor time of a step with slices of matrix products, on one process and on the ranks of a tensor axis.

A GPT with the built-in plan. Times are sums over ranks, relative to one process without slices.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from torch.nn.functional import cross_entropy

import samestep
from samestep.config import StrategyConfig
from samestep.distributed.world import all_gather
from samestep.zoo.models import GPT

HERE = Path(__file__).parent
VOCABULARY, TOKENS, SAMPLES, MICROBATCHES = 257, 64, 16, 2
CASES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4))  # ranks of the tensor axis, and slices


def measure(slices: int, width: int, rounds: int, steps: int) -> list[float]:
    """Return the milliseconds of a step in every round, summed over ranks."""
    with samestep.init(device="cpu", strategy=StrategyConfig(name="tp"), reduction="exact") as world:
        torch.manual_seed(0)
        model = GPT(VOCABULARY, width, 4, 4, TOKENS, dropout=0.1)
        samestep.parallel(model, strategy="tp", reduction="exact", microbatches=MICROBATCHES, tensor_slices=slices)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        times = []
        for _ in range(rounds + 1):
            began = time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            times.append(1000 * (time.process_time() - began) / steps)
        return [sum(row) for row in zip(*all_gather(times, world), strict=True)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/tensor_slices.py --width 256",
    )
    parser.add_argument("--width", type=int, nargs="+", default=[128, 384], help="of the model (default: 128 and 384)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of each round (default: 2)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tensor_slices.json")
    options = parser.parse_args()
    machine = describe_machine()
    results: list[dict[str, Any]] = []
    for width in options.width:
        for ranks, slices in CASES:
            function = partial(measure, slices, width, options.rounds, options.steps)
            spread = Spread.of(samestep.launch(function, processes=ranks)).rounded(1)
            results.append({"width": width, "ranks": ranks, "slices": slices, "milliseconds": spread})
    single = {row["width"]: row["milliseconds"]["median"] for row in results if row["slices"] == 1}
    rows = [
        [
            *(str(row[name]) for name in ("width", "slices", "ranks")),
            f"{row['milliseconds']['median']:.0f}",
            f"{row['milliseconds']['median'] / single[row['width']]:.2f}",
        ]
        for row in results
    ]
    text = markdown_table(["width", "slices", "ranks", "processor time of a step, ms", "relative"], rows)
    print(text)
    title = f"# Processor time of slices of matrix products\n\n{machine_line(machine)}\n\n"
    settings = {"rounds": options.rounds, "steps": options.steps, "cases": [list(case) for case in CASES]}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, f"{title}{text}\n")


if __name__ == "__main__":
    main()
