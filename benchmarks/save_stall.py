"""Stall of training for a checkpoint, compared with a blocking `torch.save` of the same state.

The writer of runs copies the state to memory that it keeps, and writes, hashes and syncs the copy in a thread.
`torch.save` is timed with and without `fsync`; the checkpoint of a run is always synced. All take turns in one process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from torch import nn

from samestep.checkpoint.background_writer import AsyncCheckpointWriter, SavedCheckpoint
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import Training, snapshot
from samestep.checkpoint.store import CheckpointFolder

WIDTH = 1024
STALL, PLAIN, SYNCED = "stall of the writer", "torch.save", "torch.save and fsync"
Seconds = dict[str, list[float]]


def build_training(millions: int) -> Training:
    """Linear layers with about `millions` million parameters, and the state of AdamW after one step."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(round(millions * 1e6 / (WIDTH * (WIDTH + 1))))])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return Training(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False))


def blocking(training: Training, path: Path, *, sync: bool) -> None:
    """Save weights and optimizer state, and wait for the disk with `sync`."""
    with path.open("wb") as file:
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def measure(millions: int, rounds: int, place: Path | None) -> dict[str, Any]:
    """Seconds, and processor seconds of the training thread, by way and round."""
    torch.set_num_threads(1)
    training = build_training(millions)
    seconds: Seconds = {STALL: [], PLAIN: [], SYNCED: []}
    processor: Seconds = {name: [] for name in seconds}
    written: list[SavedCheckpoint] = []
    with tempfile.TemporaryDirectory(dir=place) as folder:
        writer = AsyncCheckpointWriter(CheckpointFolder(Path(folder) / "checkpoints"), written.append)
        path = Path(folder) / "plain.pt"
        ways: dict[str, Callable[[int], None]] = {
            STALL: lambda step: writer.save(step, partial(snapshot, training, Progress(step=step))),
            PLAIN: lambda step: blocking(training, path, sync=False),
            SYNCED: lambda step: blocking(training, path, sync=True),
        }
        for step in range(rounds + 1):  # the first round allocates memory, and does not count
            for name in list(ways)[step % 3 :] + list(ways)[: step % 3]:
                began, used = time.perf_counter(), time.thread_time()
                ways[name](step)
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.thread_time() - used)
                writer.wait()
                path.unlink(missing_ok=True)
                os.sync()  # no way pays for the pages of another
    first = {"seconds": seconds[STALL][0], "processor": processor[STALL][0]}
    return {
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "processor": {name: values[1:] for name, values in processor.items()},
        "first": first,
        "writing": [saved.seconds for saved in written][1:],
        "bytes": 4 * 3 * sum(parameter.numel() for parameter in training.model.parameters()),
    }


def table(result: dict[str, Any]) -> str:
    rows = []
    for name in result["seconds"]:
        wall, used = (result[kind] for kind in ("seconds", "processor"))
        row = [name, *(f"{1000 * Spread.of(values[name]).median:.0f}" for values in (wall, used))]
        for values in (wall, used):
            ratio = Spread.of([own / other for own, other in zip(values[STALL], values[name], strict=True)])
            row.append(f"{ratio.median:.3f} ({ratio.q1:.3f} to {ratio.q3:.3f})" if name != STALL else "")
        rows.append(row)
    header = ["", "ms", "processor ms of the training thread", "stall relative to it", "processor time"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[12, 50], help="parameters; 12 is a ResNet-18")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that checkpoints go to (default: the system's)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "save_stall.json")
    options = parser.parse_args()
    machine, results = describe_machine(), {}
    parts = [
        "# Stall of training for a checkpoint",
        machine_line(machine),
        f"Weights and AdamW state in float32; one thread; {options.rounds} rounds in which the ways alternate, after "
        "one that does not count. Medians, and\nmedians and quartiles of ratios round by round. The writer hashes and "
        "syncs; `torch.save` does so only where stated.",
    ]
    for millions in options.millions:
        result = results[millions] = measure(millions, options.rounds, options.folder)
        parts += [
            f"## {millions} M parameters, {result['bytes'] / 1e6:.0f} MB",
            table(result),
            f"The checkpoint is complete after {1000 * Spread.of(result['writing']).median:.0f} ms. The first save, "
            f"which allocates the memory, stalls for {1000 * result['first']['seconds']:.0f} ms "
            f"({1000 * result['first']['processor']:.0f} ms of the processor).",
        ]
        print(*parts[-3:], sep="\n\n", flush=True)
    settings = {"millions": options.millions, "rounds": options.rounds}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
