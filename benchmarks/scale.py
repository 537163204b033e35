"""Bookkeeping of one rank among many simulated ones: time of a step, memory, messages and start-up.

Rank 0 of N is real: loader, engine, DDP and optimizer of one linear layer, with one microbatch per rank. The others are
simulated as copies of it: torch's fake process group sends nothing, messages of peers are copies of the own ones, and
gathered values are equal on all ranks. Times are those of the process. Delays of a network are not measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine, machine_line, markdown_table, save
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import samestep
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.world import RunContext, World
from samestep.strategies import reduction

HERE = Path(__file__).parent
WIDTH, CLASSES = 256, 16
SAMPLES = 2  # in a microbatch
_WARMUP, _STEPS = 5, 20


class CountingStore(dist.Store):
    """Store of the job that counts operations and bytes of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self.operations = self.bytes = 0

    def set(self, key: str, value: Any) -> None:
        self._count(value)
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self._count(self._values[key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._count(keys)
        return all(key in self._values for key in keys)

    def clone(self) -> CountingStore:  # type: ignore[override]
        return self

    def _count(self, value: Any) -> None:
        self.operations += 1
        self.bytes += len(str(value))


class SimulatedWorld(World):
    """Rank 0 among equal ranks.

    Attributes of the class:
        sent: bytes that this rank has sent to other ranks.
    """

    sent = 0

    def connect(self) -> None:
        return None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        SimulatedWorld.sent += 2 * tensor.nbytes
        if tensor.dim() == 2 and len(tensor) == self.size:  # a row of each rank
            tensor[:] = tensor[self.rank].clone()
        else:
            tensor.mul_(self.size)


def exchange(world: World, sent: reduction.Messages, received: reduction.Messages) -> None:
    """Receive copies of the sent messages."""
    for (own, _), (other, _) in zip(sent, received, strict=True):
        SimulatedWorld.sent += own.nbytes
        length = min(own.numel(), other.numel())
        other.view(-1)[:length] = own.reshape(-1)[:length]


def all_reduced(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    """Fill the rows of other ranks with the own one, for the collective check."""
    SimulatedWorld.sent += 2 * tensor.nbytes
    if tensor.dim() == 2 and len(tensor) == dist.get_world_size():
        tensor[:] = tensor[0].clone()
    work = torch.futures.Future()  # type: ignore[var-annotated]
    work.set_result(None)
    work.is_completed = work.done  # type: ignore[attr-defined]
    work.wait = lambda *_: None  # type: ignore[method-assign]
    return work


def measure(ranks: int) -> dict[str, Any]:
    """Return the numbers of rank 0 of `ranks`."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    dist.all_reduce = all_reduced
    dist.new_group = lambda *_, **__: dist.group.WORLD
    reduction.communicate = exchange
    store, local = CountingStore(), RunContext.local()
    began = time.process_time()
    tracemalloc.start()
    check = CollectiveCheck(store, local.status, rank=0, size=ranks, timeout=timedelta(seconds=60))
    context = RunContext(local.status, local.stop, check)
    world = SimulatedWorld(0, ranks, torch.device("cpu"), context)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, WIDTH), torch.arange(64) % CLASSES)
    batch = SAMPLES * ranks
    loader = samestep.loader(Repeated(dataset, batch * 4), batch_size=batch, microbatches=ranks, world=world)
    batches = list(loader)
    for number in range(_WARMUP):
        engine.step(batches[number % len(batches)])
    start, memory = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    operations, sent = store.operations, SimulatedWorld.sent
    began = time.process_time()
    for number in range(_STEPS):
        engine.step(batches[number % len(batches)])
    return {
        "ranks": ranks,
        "start_seconds": start,
        "python_bytes": memory[0],
        "step_seconds": (time.process_time() - began) / _STEPS,
        "sent_bytes": (SimulatedWorld.sent - sent) / _STEPS,
        "store_operations": (store.operations - operations) / _STEPS,
        "store_start": operations,
    }


class Repeated:
    """The samples of a dataset, repeated up to a length."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Any:
        return self._dataset[index % len(self._dataset)]


def page(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    header = ["ranks", "start, s", "Python objects, MiB", "step, ms", "sent a step, kB", "store operations a step"]
    cells = [
        [
            f"{row['ranks']:,}",
            f"{row['start_seconds']:.2f}",
            f"{row['python_bytes'] / 2**20:.1f}",
            f"{1e3 * row['step_seconds']:.2f}",
            f"{row['sent_bytes'] / 1e3:.0f}",
            f"{row['store_operations']:g}",
        ]
        for row in rows
    ]
    parts = [
        "# Bookkeeping of one rank among simulated ones",
        machine_line(machine),
        f"One linear layer of {WIDTH} x {CLASSES}, one microbatch per rank. Processor time of rank 0; the start ends "
        f"after {_WARMUP} steps and\nincludes imports, under `tracemalloc`.",
        markdown_table(header, cells),
    ]
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG of all numbers over ranks, relative to the smallest number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    names = {
        "step_seconds": "time of a step",
        "start_seconds": "start",
        "python_bytes": "memory",
        "sent_bytes": "bytes sent a step",
    }
    ranks = [row["ranks"] for row in rows]
    for name, label in names.items():
        axes.plot(ranks, [row[name] / rows[0][name] for row in rows], marker="o", markersize=3, label=label)
    axes.plot(ranks, [number / ranks[0] for number in ranks], "--", color="#888888", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"relative to {ranks[0]} ranks")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/scale.py --ranks 64 1024",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 8192], metavar="N")
    parser.add_argument("--only", type=int, metavar="N", help="measure in this process, and print JSON")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "scale.json")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only)))
        return
    machine, rows = describe_machine(), []
    for ranks in options.ranks:
        command = [sys.executable, __file__, "--only", str(ranks)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        save(options.output, {"machine": machine, "rows": rows}, page(machine, rows))
    draw(rows, options.output.with_suffix(".png"))
    print(page(machine, rows))


if __name__ == "__main__":
    main()
