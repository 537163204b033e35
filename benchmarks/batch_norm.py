"""Cost of `batch_norm: sync` relative to `microbatch`: the same steps, interleaved in the same processes.

Also the bare cost of as many small all-gathers as a step has exchanges, by the backend and by the sockets of
`samestep.distributed.local_sockets`: the lower limit of `sync`.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import build_dataset, build_model, build_optimizer

import samestep
from samestep.config import BatchNorm, StepConfig
from samestep.distributed.world import World, all_gather
from samestep.engine.sync_batch_norm import norm_layers

WORDS: tuple[BatchNorm, ...] = ("microbatch", "sync")
Result = dict[str, Any]


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Turn:
    """Seconds, and processor seconds of all ranks, of a block that all ranks run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> Turn:
        self._world.barrier()
        self._began, self._processor = time.perf_counter(), processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self._world.barrier()
        self.seconds = time.perf_counter() - self._began
        self.processor = sum(all_gather(processor_seconds() - self._processor, self._world))


def measure(model: str, batch_size: int, per_rank: int, rounds: int, steps: int) -> Result:
    """Return seconds per step of each variant and round on rank 0; a function for `samestep.launch`."""
    with samestep.start(device="cpu") as world:
        contenders = {}
        for word in WORDS:
            net = build_model(model)
            rules = StepConfig(batch_norm=word)
            engine = samestep.Engine(net, build_optimizer(net), samestep.cross_entropy, world=world, config=rules)
            loader = samestep.loader(
                build_dataset(), batch_size=batch_size, microbatches=per_rank * world.size, world=world, num_workers=0
            )
            batches = [batch for batch, _ in zip(loader, range(steps), strict=False)]
            contenders[word] = (engine, batches)
        peaks = {}
        for word, (engine, batches) in contenders.items():  # warms up; sync last, since a peak only grows
            for batch in batches:
                engine.step(batch)
            peaks[word] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times: dict[str, list[float]] = {word: [] for word in WORDS}
        processor: dict[str, list[float]] = {word: [] for word in WORDS}
        bare: dict[str, list[float]] = {}
        gathers = all_gathers(world, contenders["sync"][0].model, per_rank)
        for number in range(rounds):
            for word in WORDS if number % 2 == 0 else WORDS[::-1]:
                engine, batches = contenders[word]
                with Turn(world) as turn:
                    for batch in batches:
                        engine.step(batch)
                times[word].append(turn.seconds / steps)
                processor[word].append(turn.processor / steps)
            for name, gather in gathers.items():
                with Turn(world) as turn:
                    gather()
                bare.setdefault(name, []).append(turn.processor)
        growth = peaks["sync"] - peaks["microbatch"]
        return {"times": times, "processor": processor, "bare": bare, "growth": growth}


def all_gathers(world: World, model: torch.nn.Module, rows: int) -> dict[str, Callable[[], None]]:
    """Return the bare all-gathers of a step, which has two for each norm layer, by transport."""
    layers = norm_layers(model)
    width = 2 * max(layer.num_features for layer in layers.values())
    own = torch.zeros(rows, width, dtype=torch.float64)
    received = torch.zeros(world.size, rows, width, dtype=torch.float64)
    sockets, ranks, count = world.connect(), range(world.size), 2 * len(layers)

    def by_backend() -> None:
        for _ in range(count):
            dist.all_gather(list(received), own)

    def by_sockets() -> None:
        assert sockets is not None
        for _ in range(count):
            sockets.all_gather(own, received, ranks)

    return {"backend": by_backend, "sockets": by_sockets} if world.size > 1 else {}


def row(result: Result, name: str, per_rank: int) -> list[str]:
    times, processor = result["times"], result["processor"]
    medians = [f"{1000 * Spread.of(times[word]).median:.0f}" for word in WORDS]
    bare = [f"{1000 * Spread.of(result['bare'][name]).median:.0f}" for name in ("backend", "sockets") if result["bare"]]
    return [
        name,
        str(per_rank),
        *medians,
        ratios(times),
        ratios(processor),
        *(bare or ["", ""]),
        f"{result['growth']:+.0f}",
    ]


def ratios(values: dict[str, list[float]]) -> str:
    ratio = Spread.of([sync / other for other, sync in zip(values["microbatch"], values["sync"], strict=True)])
    return f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["resnet", "small"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--per-rank", type=int, nargs="+", default=[1, 2], help="microbatches of each process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "batch_norm.json")
    options = parser.parse_args()
    machine = describe_machine()
    results: dict[str, dict[str, Result]] = {}
    header = [
        "processes",
        "microbatches per process",
        "microbatch, ms a step",
        "sync, ms a step",
        "ratio, median (quartiles)",
        "ratio of processor time",
        "bare all-gathers of gloo, processor ms",
        "by sockets",
        "MiB a rank more",
    ]
    parts = [
        "# Batch norm over all microbatches, relative to batch norm by microbatch",
        machine_line(machine),
        f"Global batch {options.batch_size}, one thread a process, `exact`, {options.rounds} rounds in which both have "
        "a turn of some steps in the same processes. Ratios are taken\nround by round; processor time is that of all "
        "processes. `Bare all-gathers` are as many small messages as a step has exchanges, without a step.\n"
        "The last column is by how much the first steps with `sync` raised the peak memory of rank 0 above that of "
        "`microbatch`.",
    ]
    for model in options.models:
        results[model], rows = {}, []
        for processes, per_rank in product(options.processes, options.per_rank):
            arguments = (model, options.batch_size, per_rank, options.rounds, options.steps)
            result = samestep.launch(measure, *arguments, processes=processes)
            results[model][f"{processes} x {per_rank}"] = result
            rows.append(row(result, str(processes), per_rank))
        parts += [f"## {model}", markdown_table(header, rows)]
        print(parts[-2], parts[-1], sep="\n\n", flush=True)
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
