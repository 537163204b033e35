"""Peak memory of a rank in training: Samestep and a hand-written DDP loop, each in separate processes.

Memory is that of the system: the resident set of rank 0, and its growth from the complete process group, with all
modules imported, to the peak of some steps (proc(5): `VmRSS`, and `VmHWM` after a reset).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import Spread, describe_machine, machine_line, markdown_table, save
from step_models import MODELS, build_dataset, build_model, build_optimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import samestep

HERE = Path(__file__).parent
HAND_WRITTEN, VIEWS = "hand-written DDP", "hand-written DDP, gradients as views"
CONTENDERS = (HAND_WRITTEN, VIEWS, "exact", "fast")
BATCH, STEPS = 64, 12


def memory(field: str) -> int:
    """Return a field of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def begin() -> int:
    """Reset the peak, and return the resident set."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def hand_written(name: str, *, views: bool) -> tuple[int, int]:
    """Train, and return the resident set before and the peak."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    before = begin()
    model = DistributedDataParallel(build_model(name), gradient_as_bucket_view=views)
    optimizer = build_optimizer(model)
    sampler: DistributedSampler[Any] = DistributedSampler(build_dataset(name), shuffle=True)
    loader = DataLoader(sampler.dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step == STEPS:
            break
    peak = memory("VmHWM")
    dist.barrier()
    dist.destroy_process_group()
    return before, peak


def ours(name: str, reduction: Any) -> tuple[int, int]:
    """Train, and return the resident set before and the peak."""
    world = samestep.init(device="cpu", reduction=reduction, threads=1)
    before = begin()
    model = samestep.parallel(build_model(name), reduction=reduction, microbatches=world.size)
    optimizer = build_optimizer(model)
    for step, (inputs, targets) in enumerate(samestep.loader(build_dataset(name), batch_size=BATCH, shuffle=True)):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step == STEPS:
            break
    return before, memory("VmHWM")


def run(contender: str, model: str, processes: int) -> tuple[int, int]:
    """Start the ranks of a contender, and return the resident set of rank 0 before training and its peak."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        output = Path(folder) / "memory.json"
        command = [sys.executable, "-m", *launcher, __file__, "--rank", contender, model, str(output)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, peak = json.loads(output.read_text())
        return before, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/memory.py --rounds 3",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet", "gpt"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory.json")
    options = parser.parse_args()
    machine, results = describe_machine(), []
    for model in options.models:
        values: dict[str, list[tuple[int, int]]] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            for name in CONTENDERS:
                values[name].append(run(name, model, options.processes))
        for name in CONTENDERS:
            peaks = [peak for _, peak in values[name]]
            growth = [peak - before for before, peak in values[name]]
            base = values[HAND_WRITTEN]
            row = {"model": model, "contender": name, "MB": Spread.of([peak / 1e6 for peak in peaks]).rounded(1)}
            row["growth MB"] = Spread.of([value / 1e6 for value in growth]).rounded(1)
            ratios = [peak / other for peak, (_, other) in zip(peaks, base, strict=True)]
            growths = [value / (other - start) for value, (start, other) in zip(growth, base, strict=True)]
            row |= {"ratio": Spread.of(ratios).rounded(3), "growth ratio": Spread.of(growths).rounded(3)}
            results.append(row)
    columns = ("MB", "ratio", "growth MB", "growth ratio")
    rows = [[row["model"], row["contender"], *(f"{row[column]['median']:g}" for column in columns)] for row in results]
    text = markdown_table(["model", "loop", "peak, MB", "ratio", "growth in training, MB", "ratio"], rows)
    print(text)
    note = f"{options.processes} processes, global batch {BATCH}, {options.rounds} rounds, medians; rank 0."
    title = f"# Peak memory of a rank\n\n{machine_line(machine)}\n{note}\n\n"
    save(options.output, {"machine": machine, "results": results}, f"{title}{text}\n")


def run_rank(contender: str, model: str, output: str) -> None:
    """Train as one rank that torchrun has started."""
    rank = int(os.environ["RANK"])
    if contender in (HAND_WRITTEN, VIEWS):
        result = hand_written(model, views=contender == VIEWS)
    else:
        result = ours(model, contender)
    if rank == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    run_rank(*sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
