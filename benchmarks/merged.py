"""Time of a step of 8 microbatches on one device under `reduction: fast`, divided by that of one microbatch.

All engines live in one process and take turns of some steps; ratios are taken round by round. A second engine with one
microbatch shows the noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from machine import Spread, describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.zoo.segmentation.unet import unet_small
from samestep.zoo.text.models import GPT

HERE = Path(__file__).parent
CLASSES, VOCABULARY, BLOCK = 10, 256, 64
ONE, AGAIN, MERGED, SEPARATE = "one", "one, again", "8, together", "8, one after another"
SIDES = {ONE: (1, "off"), AGAIN: (1, "off"), MERGED: (8, "auto"), SEPARATE: (8, "off")}


class Case(NamedTuple):
    """A model and samples of one batch."""

    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    targets: Callable[[int], torch.Tensor]


def gpt() -> nn.Module:
    return GPT(num_classes=VOCABULARY, n_embd=256, n_head=4, n_layer=4, block_size=BLOCK, dropout=0.1)


CASES = {
    "resnet": Case(
        "ResNet-18, images of 64x64, batch norm of each microbatch",
        lambda: torchvision.models.resnet18(num_classes=CLASSES),
        lambda size: torch.randn(size, 3, 64, 64),
        lambda size: torch.randint(CLASSES, (size,)),
    ),
    "gpt": Case(
        f"GPT, 4 layers of width 256, {BLOCK} tokens, dropout 0.1",
        gpt,
        lambda size: torch.randint(VOCABULARY, (size, BLOCK)),
        lambda size: torch.randint(VOCABULARY, (size, BLOCK)),
    ),
    "unet": Case(
        "U-Net, images of 64x64, batch norm of each microbatch",
        lambda: unet_small(num_classes=2),
        lambda size: torch.randn(size, 3, 64, 64),
        lambda size: torch.randint(2, (size, 64, 64)),
    ),
}


def engine_of(case: Case, world: samestep.World, microbatches: int, merge: Any, size: int) -> Callable[[], object]:
    """Return a function that computes one step of the batch."""
    torch.manual_seed(0)
    model, dataset = case.build(), TensorDataset(case.inputs(size), case.targets(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    config = samestep.StepConfig(reduction="fast", merge=merge)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
    batch = next(iter(samestep.loader(dataset, batch_size=size, microbatches=microbatches, world=world)))
    for _ in range(2):
        engine.step(batch)
    if engine.separate_reason is not None:
        raise RuntimeError(f"{case.title}: {engine.separate_reason}")
    return lambda: engine.step(batch)


def measure(case: Case, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds of a step, and of processor time, of each side in every round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    with samestep.start(device=options.device) as world:
        steps = {name: engine_of(case, world, *side, options.batch_size) for name, side in SIDES.items()}
        for number in range(options.rounds):
            for name in list(SIDES)[:: 1 if number % 2 else -1]:
                began, used = time.perf_counter(), time.process_time()
                for _ in range(options.steps):
                    steps[name]()
                wall, processor = time.perf_counter() - began, time.process_time() - used
                times[name].append((1000 * wall / options.steps, 1000 * processor / options.steps))
    return times


def summarise(times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "milliseconds": Spread.of([wall for wall, _ in own]).rounded(2),
            "ratio": Spread.of([a[0] / b[0] for a, b in zip(own, times[ONE], strict=True)]).rounded(4),
            "cpu_ratio": Spread.of([a[1] / b[1] for a, b in zip(own, times[ONE], strict=True)]).rounded(4),
        }
        for name, own in times.items()
    ]


def shown(spread: dict[str, float], digits: int = 3) -> str:
    return f"{spread['median']:.{digits}f} ({spread['q1']:.{digits}f} to {spread['q3']:.{digits}f})"


def table(rows: list[dict[str, Any]]) -> str:
    header = ["microbatches", "ms a step", "ratio", "ratio of processor time"]
    cells = [[r["name"], shown(r["milliseconds"], 1), shown(r["ratio"]), shown(r["cpu_ratio"])] for r in rows]
    return markdown_table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="of each turn (default: 2)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "merged.json")
    options = parser.parse_args()
    machine, results = describe_machine(), dict[str, Any]()
    parts = [
        "# 8 microbatches against one, on one device",
        machine_line(machine),
        f"`reduction: fast`, one process, one thread, batch {options.batch_size}, {options.rounds} rounds of turns of "
        f"{options.steps} steps.\nMedian (quartiles); ratios to one microbatch are taken round by round; above 1 is "
        "slower.",
    ]
    for name in options.models:
        results[name] = summarise(measure(CASES[name], options))
        parts += [f"## {CASES[name].title}", table(results[name])]
        print(parts[-2], parts[-1], sep="\n\n", flush=True)
    settings = {"batch_size": options.batch_size, "rounds": options.rounds, "steps": options.steps}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
