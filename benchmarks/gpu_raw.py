"""Check of collectives and messages of torch alone, on ranks that share a GPU: shows whether NCCL does that here.

`python gpu_raw.py DEVICE RANK SIZE PORT RESULT` is one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_training import Outcome, synchronize

from samestep.distributed.env import prepare_shared_nccl, prepare_torch_environment
from samestep.distributed.resources import free_loopback_socket

_SECONDS = 60
_ELEMENTS = {"cuda": (1 << 10, 1 << 20, 4 << 20), "cpu": (1 << 10, 1 << 16)}
_REPEATS = 4
_BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}


def raw(device: str) -> Outcome:
    """Values and times of collectives and messages on 2 and 4 ranks."""
    outcome = Outcome()
    for size in (2, 4):
        with free_loopback_socket() as listener:
            port = str(listener.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, __file__, device]
            ranks = [
                subprocess.Popen(
                    [*command, str(rank), str(size), port, str(result)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(size)
            ]
            for number, process in enumerate(ranks):
                _require_end(outcome, f"rank {number} of {size}", process)
            if result.exists():
                outcome.numbers[f"{size} ranks"] = json.loads(result.read_text(encoding="utf-8"))
    return outcome


def _require_end(outcome: Outcome, name: str, process: subprocess.Popen[str]) -> None:
    """Wait for a rank, and record its output unless it succeeds."""
    try:
        output = process.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = f"no end within {_SECONDS} s\n{process.communicate()[0]}"
    outcome.require(process.returncode == 0, f"{name}: exit code {process.returncode}: {output[-1000:]}")


def _rank(device: torch.device, rank: int, size: int, port: str) -> dict[str, Any]:
    """Check values of each operation; return times."""
    numbers: dict[str, Any] = {}
    dist.init_process_group(
        _BACKENDS[device.type],
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_SECONDS - 10),
    )
    assert dist.group.WORLD is not None
    numbers["backend"] = dist.group.WORLD._get_backend(device).name()
    began = time.perf_counter()
    total = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(total)
    assert total.unique().tolist() == [size * (size + 1) / 2]
    numbers["first all-reduce, seconds"] = round(time.perf_counter() - began, 2)
    for elements in _ELEMENTS[device.type]:
        numbers[f"message of {4 * elements} bytes, ms"] = _message(device, rank, size, elements)
    row = torch.arange(size, device=device, dtype=torch.float32)
    column = torch.empty_like(row)
    dist.all_to_all_single(column, row)
    assert column.tolist() == [float(rank)] * size
    rows = torch.empty(size * 4, device=device)
    dist.all_gather_into_tensor(rows, torch.full((4,), float(rank), device=device))
    assert rows.view(size, 4).tolist() == [[float(other)] * 4 for other in range(size)]
    ones = torch.ones(8, device=device)
    dist.all_reduce(ones, group=dist.new_group(list(range(size))))
    assert ones.tolist() == [float(size)] * 8
    dist.barrier()
    synchronize(device)
    dist.destroy_process_group()
    return numbers


def _message(device: torch.device, rank: int, size: int, elements: int) -> float:
    """Return the milliseconds of a message to the next rank and one from the rank before."""
    sent = torch.full((elements,), float(rank), device=device)
    received = torch.empty(elements, device=device)
    before = (rank - 1) % size

    def exchange() -> None:
        messages = [
            dist.P2POp(dist.irecv, received, group_peer=before),
            dist.P2POp(dist.isend, sent, group_peer=(rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    exchange()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        exchange()
    synchronize(device)
    assert received.unique().tolist() == [float(before)]
    return round(1000 * (time.perf_counter() - began) / _REPEATS, 2)


def main() -> None:
    kind, rank, size, port, result = sys.argv[1:]
    prepare_torch_environment(loopback=True)
    device = torch.device("cpu")
    if kind == "cuda":
        prepare_shared_nccl(int(rank), loopback=True)
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    numbers = _rank(device, int(rank), int(size), port)
    if rank == "0":
        Path(result).write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
