"""Time of a step with sharded parameters, compared with a hand-written loop with torch's FSDP2.

All contenders are in the same processes, with the same units, weights and batches, and alternate. Processor times are
the sum over ranks, and include the threads of the backend; they depend less on other load than elapsed times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import MODELS, build_dataset, build_model, build_optimizer
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import samestep
from samestep.config import StrategyConfig
from samestep.distributed.world import World, all_gather
from samestep.microbatches import microbatch_bounds
from samestep.strategies.fsdp import shard_units

HERE = Path(__file__).parent
STOCK, AGAIN = "FSDP2", "FSDP2, again"
OURS = "samestep.parallel"
READY = 8  # batches in memory
Step = Callable[[int], float]


def stock(name: str, batch_size: int, world: World) -> Step:
    """Return a step of a hand-written loop."""
    assert world.mesh is not None
    model = build_model(name)
    for module in [*shard_units(model), model]:
        fully_shard(module, mesh=world.mesh["shard"])
    optimizer, dataset = build_optimizer(model), build_dataset(name)
    start, stop = microbatch_bounds(batch_size, world.size)[world.rank]

    def step(number: int) -> float:
        first = number % READY * batch_size
        inputs, targets = dataset[first + start : first + stop]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def ours(name: str, batch_size: int) -> Step:
    """Return a step of Samestep."""
    model = samestep.parallel(build_model(name), strategy="fsdp")
    optimizer, dataset = build_optimizer(model), build_dataset(name)

    def step(number: int) -> float:
        first = number % READY * batch_size
        inputs, targets = dataset[first : first + batch_size]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measure(name: str, batch_size: int, rounds: int, steps: int) -> list[list[dict[str, tuple[float, float]]]]:
    """Return seconds of processor and of elapsed time per step of each contender, by rank and round."""
    with samestep.init(device="cpu", strategy=StrategyConfig(name="fsdp"), threads=1) as world:
        contenders = {STOCK: stock(name, batch_size, world), AGAIN: stock(name, batch_size, world)}
        contenders[OURS] = ours(name, batch_size)
        for step in contenders.values():
            for number in range(READY):
                step(number)
        found = []
        for turn in range(rounds):
            times = {}
            for label in list(contenders)[:: -1 if turn % 2 else 1]:
                world.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                for number in range(steps):
                    contenders[label](number)
                world.barrier()
                times[label] = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
            found.append(times)
        ranks: list[list[dict[str, tuple[float, float]]]] = all_gather(found, world)
        return ranks


def row_of(label: str, ranks: list[list[dict[str, tuple[float, float]]]]) -> dict[str, Any]:
    """Return the times of a contender in milliseconds, and their ratios to the loop with FSDP2."""
    row: dict[str, Any] = {"contender": label}
    for column, (kind, over_ranks) in enumerate((("processor", sum), ("elapsed", max))):

        def times(name: str, column: int = column, over_ranks: Any = over_ranks) -> list[float]:
            return [1000 * over_ranks(times[name][column] for times in turn) for turn in zip(*ranks, strict=True)]

        ratios = [own / base for own, base in zip(times(label), times(STOCK), strict=True)]
        row |= {f"{kind} ms": Spread.of(times(label)).rounded(2), f"{kind} ratio": Spread.of(ratios).rounded(3)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "resnet"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fsdp.json")
    options = parser.parse_args()
    machine, results = describe_machine(), []
    for model, processes in product(options.models, options.processes):
        ranks = samestep.launch(measure, model, options.batch_size, options.rounds, options.steps, processes=processes)
        rows = [{"model": model, "processes": processes, **row_of(label, ranks)} for label in ranks[0][0]]
        results.append(rows)
        for row in rows:
            print(model, processes, row["contender"], row["processor ms"]["median"], row["processor ratio"], flush=True)
    header = ["model", "processes", "contender", "processor ms", "ratio", "quartiles", "elapsed ms", "ratio"]
    rows = [
        [
            row["model"],
            str(row["processes"]),
            row["contender"],
            f"{row['processor ms']['median']:.1f}",
            f"{row['processor ratio']['median']:.3f}",
            f"{row['processor ratio']['q1']:.3f} to {row['processor ratio']['q3']:.3f}",
            f"{row['elapsed ms']['median']:.1f}",
            f"{row['elapsed ratio']['median']:.3f}",
        ]
        for row in chain(*results)
    ]
    settings = {name: getattr(options, name) for name in ("batch_size", "rounds", "steps")}
    page = ["# Step with sharded parameters, relative to FSDP2", machine_line(machine), markdown_table(header, rows)]
    save(options.output, {"machine": machine, "settings": settings, "results": results}, "\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
