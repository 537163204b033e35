"""Cost of logged checksums of the state: processor time of steps without checksums and of one checksum.

Steps and checksums alternate in one process, so that both see the same load of the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import build_dataset, build_model, build_optimizer

import samestep
from samestep.engine.checksum import state_checksum
from samestep.microbatches import Cursor

HERE = Path(__file__).parent
EVERY = (1, 10, 100)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of processor time of a step and of a checksum, and the share of the checksums."""
    with samestep.start(device="cpu") as world:
        net = build_model(model)
        engine = samestep.Engine(net, build_optimizer(net), samestep.cross_entropy, world=world)
        loader = samestep.loader(build_dataset(), batch_size=options.batch_size, microbatches=1, world=world)
        batches = cycle(list(islice(loader, 4)))
        rounds = [
            (
                _milliseconds(lambda: engine.step(next(batches)), options.steps),
                _milliseconds(lambda: state_checksum(engine, Cursor()), options.steps),
            )
            for _ in range(options.rounds + 1)
        ][1:]
        steps, checksums = zip(*rounds, strict=True)
        shares = {every: Spread.of([c / every / s for s, c in rounds]).rounded(5) for every in EVERY}
        return {
            "model": model,
            "parameters": sum(parameter.numel() for parameter in net.parameters()),
            "step": Spread.of(steps).rounded(3),
            "checksum": Spread.of(checksums).rounded(3),
            "share": shares,
        }


def _milliseconds(call: Callable[[], Any], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return 1000 * (time.process_time() - began) / times


def table(results: list[dict[str, Any]]) -> str:
    """Return one row per model."""
    header = ["model", "parameters", "step, ms", "checksum, ms", *(f"every {every}" for every in EVERY)]
    rows = [
        [
            result["model"],
            f"{result['parameters']:,}",
            f"{result['step']['median']:.2f}",
            f"{result['checksum']['median']:.2f}",
            *(f"{result['share'][every]['median']:.2%}" for every in EVERY),
        ]
        for result in results
    ]
    return markdown_table(header, rows)


def main() -> None:
    """Measure all models, and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps, and checksums, of a round (default: 5)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "checksums.json")
    options = parser.parse_args()
    machine = describe_machine()
    results = [measure(model, options) for model in ("resnet", "small")]
    page = "\n\n".join(
        [
            "# Cost of checksums of the state",
            machine_line(machine),
            f"Processor time on one thread, medians of {options.rounds} rounds; global batch {options.batch_size}, SGD "
            "with momentum. The last columns are the time of checksums relative to that of steps.",
            table(results),
        ]
    )
    save(options.output, {"machine": machine, "results": results}, page + "\n")
    print(page)


if __name__ == "__main__":
    main()
