"""Processor time of a step with 8 microbatches on one device, relative to one microbatch of the whole batch.

Engines take turns in one process: one microbatch; 8 microbatches one after another; 8 microbatches as the engine
computes them, together if this has equal bits and is faster. Losses of both ways are compared. Times are those of the
process, without waits for the processor.
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
from samestep.zoo.text.models import GPT

HERE = Path(__file__).parent
MICROBATCHES, VOCABULARY, FEATURES, CLASSES = 8, 257, 64, 10
ONE, ALONE, CHOSEN = "one microbatch", "one after another", "as chosen"
Case = tuple[Callable[[], nn.Module], int, int]  # model, samples of a batch, tokens of a sample (0: features)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


CASES: dict[str, Case] = {
    "GPT of `language`, 16 samples": (GPT, 16, 64),
    "GPT of `language`, 32 samples": (GPT, 32, 64),
    "GPT of `language`, 64 samples": (GPT, 64, 64),
    "GPT, n_embd 64, n_layer 2, 32 tokens, 64 samples": (lambda: GPT(n_embd=64, n_layer=2, block_size=32), 64, 32),
    "GPT, n_embd 32, n_layer 2, 32 tokens, 16 samples": (lambda: GPT(n_embd=32, n_layer=2, block_size=32), 16, 32),
    "perceptron, 64 samples": (perceptron, 64, 0),
}


def measure(world: samestep.World, case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Return milliseconds of a step in each way in every round, and how the last engine computes microbatches."""
    build, size, tokens = case
    torch.manual_seed(0)
    if tokens:
        inputs, targets = torch.randint(VOCABULARY, (2, 4 * size, tokens))
    else:
        inputs, targets = torch.randn(4 * size, FEATURES), torch.randint(CLASSES, (4 * size,))
    dataset, engines, steps = TensorDataset(inputs, targets), {}, {}
    for name in (ONE, ALONE, CHOSEN):
        loader = samestep.loader(dataset, batch_size=size, microbatches=1 if name == ONE else MICROBATCHES, world=world)
        batches = list(islice(loader, 4))
        torch.manual_seed(0)
        model = build()
        engine = samestep.Engine(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), samestep.cross_entropy, world=world
        )
        if name == ALONE:
            engine._components.runner.computes_together = False
        engines[name] = engine
        steps[name] = lambda number, engine=engine, batches=batches: engine.step(batches[number % 4]).loss
    losses = {name: [step(number) for number in range(4)] for name, step in steps.items()}
    if losses[ALONE] != losses[CHOSEN]:
        raise SystemExit(f"the losses differ: {losses}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 else reversed(list(steps)):
            began, done = time.process_time(), 0
            while time.process_time() - began < seconds:
                steps[name](done)
                done += 1
            times[name].append(1000 * (time.process_time() - began) / done)
    is_together = engines[CHOSEN].computes_together
    return {"times": times, "together": is_together, "reason": engines[CHOSEN].alone_reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.8, help="processor time of each turn (default: 0.8)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "batched.json")
    options = parser.parse_args()
    machine, results, rows = describe_machine(), [], []
    with samestep.start(device="cpu") as world:
        for name, case in CASES.items():
            result = measure(world, case, options.rounds, options.seconds)
            ones = result["times"][ONE]
            pairs = {way: zip(result["times"][way], ones, strict=True) for way in (ALONE, CHOSEN)}
            ratios = {way: Spread.of([a / b for a, b in pair]).rounded(3) for way, pair in pairs.items()}
            spreads = {way: Spread.of(values).rounded(3) for way, values in result.pop("times").items()}
            results.append({"model": name, **result, "milliseconds": spreads, "ratios": ratios})
            chosen = "together" if result["together"] else f"one after another: {result['reason']}"
            medians = [f"{ratios[way]['median']:.2f}" for way in (ALONE, CHOSEN)]
            rows.append([name, f"{spreads[ONE]['median']:.1f}", *medians, chosen])
            print(*rows[-1], sep="  ", flush=True)
    header = ["model", "one microbatch, ms", f"{MICROBATCHES} one after another", f"{MICROBATCHES} as chosen", "choice"]
    title = "# Processor time of 8 microbatches on one device, relative to one microbatch"
    page = f"{title}\n\n{machine_line(machine)}\n\n{markdown_table(header, rows)}\n"
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, page)


if __name__ == "__main__":
    main()
