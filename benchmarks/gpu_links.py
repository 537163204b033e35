"""Checks of collectives between ranks: times by size, the memory that a backend takes, the time of the host."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import launch, most_ranks
from gpu_training import Outcome, joined, synchronize

from samestep.distributed.world import World
from samestep.reduce.exact import ExactReduction

Calls = dict[str, Callable[[], Any]]
SIZES = {"64 kB": 1 << 16, "1 MB": 1 << 20, "12 MB": 12 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
_HOST_ELEMENTS = 1 << 16
_REPEATS = 8
_LINES = 80  # of NCCL
# NCCL's lines on transports, channels and variables.
_SAID = re.compile(r"channels|via (P2P|SHM|NET)|Using network|NVLS|GDR|P2P is disabled|NCCL version|NCCL_\w+ set by")


def links(device: str) -> Outcome:
    """Times and memory on 3 and all GPUs, and what NCCL reports about its connections."""
    outcome = Outcome()
    most = most_ranks(device)
    sizes = SIZES if device == "cuda" else {"64 kB": SIZES["64 kB"]}
    with tempfile.TemporaryDirectory() as folder:
        debug = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
            "NCCL_DEBUG_FILE": f"{folder}/%p",
        }
        for ranks in sorted({min(3, most), most}):
            with outcome.attempt(f"{ranks} ranks"):
                outcome.numbers[f"{ranks} ranks"] = launch(measured, sizes, device, ranks=ranks, environment=debug)
        files = sorted(Path(folder).iterdir())
        said = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    # Without the name of the host, the process and the rank.
    kept = [re.sub(r"^.*?NCCL INFO ", "", line)[:160] for line in said if _SAID.search(line)]
    outcome.numbers["lines of NCCL"] = list(dict.fromkeys(kept))[:_LINES]
    return outcome


def host(device: str) -> Outcome:
    """Time of the host in each call on 2 ranks, without waits."""
    outcome = Outcome()
    with outcome.attempt("2 ranks"):
        outcome.numbers["host time, us"] = launch(host_times, device, ranks=2)
    return outcome


def measured(sizes: dict[str, int], device: Any) -> dict[str, Any]:
    """Return times of all operations, and memory; a function for `samestep.launch`."""
    with joined(device) as world:
        found: dict[str, Any] = {"MiB outside of torch's allocator": _memory_by_operation(world)}
        for name, size in sizes.items():
            # Equal rows for all ranks, of whole groups of 16 bytes.
            elements = size // 4 // (4 * world.size) * (4 * world.size)
            found[name] = {
                operation: _timed(call, elements, world) for operation, call in _calls(world, elements).items()
            }
            for length in (elements, elements - 3):
                _require_sum(world, length)
        return found


def _calls(world: World, elements: int) -> Calls:
    """Return one call of each operation with a number of elements."""
    source = torch.zeros(elements + 1, device=world.device)
    target = torch.zeros(elements + 1, device=world.device)
    row = elements // world.size
    return {
        "all-reduce": lambda: dist.all_reduce(source[:elements]),
        "all-to-all": lambda: dist.all_to_all_single(target[:elements], source[:elements]),
        "all-gather": lambda: dist.all_gather_into_tensor(target[:elements], source[:row]),
        "exact reduction": _reduction(world, source[:elements]),
        "exact reduction, odd length": _reduction(world, source[: elements - 3]),
        "message to the next rank": lambda: _message(world, source[:elements], target[:elements]),
        "message, 4 bytes off": lambda: _message(world, source[1:], target[1:]),
    }


def _reduction(world: World, values: torch.Tensor) -> Callable[[], Any]:
    """Return a call that sums values over the ranks under `exact`."""
    reduction = ExactReduction(world, world.size)
    node = (reduction.own.start, reduction.own.stop)
    return lambda: reduction.wait(reduction.start({node: values}))


def _require_sum(world: World, length: int) -> None:
    """Require the right sum under `exact`."""
    total = _reduction(world, torch.full((length,), world.rank + 1.0, device=world.device))()
    expected = world.size * (world.size + 1) / 2
    if bool((total != expected).any()):
        raise ValueError(f"the sum over {world.size} ranks is {total.unique().tolist()}, not {expected:g}")


def _message(world: World, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next rank, and receive from the one before."""
    messages = [
        dist.P2POp(dist.irecv, received, group_peer=(world.rank - 1) % world.size),
        dist.P2POp(dist.isend, sent, group_peer=(world.rank + 1) % world.size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def _timed(call: Callable[[], Any], elements: int, world: World) -> dict[str, float]:
    call()
    synchronize(world.device)
    world.barrier()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    host_seconds = (time.perf_counter() - began) / _REPEATS
    synchronize(world.device)
    seconds = (time.perf_counter() - began) / _REPEATS
    return {
        "us": round(1e6 * seconds),
        "host us": round(1e6 * host_seconds),
        "GB/s": round(4 * elements / seconds / 1e9, 2),
    }


def _memory_by_operation(world: World) -> dict[str, int]:
    """Return the memory of the GPU outside of torch's allocator, after the first use of each operation."""
    found = {"before": _memory_outside(world.device)}
    for name, call in _calls(world, 1024 * world.size).items():
        call()
        synchronize(world.device)
        found[f"after {name}"] = _memory_outside(world.device)
    return found


def _memory_outside(device: torch.device) -> int:
    """Return MiB of a GPU that torch's allocator does not hold; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free - torch.cuda.memory_reserved(device)) / 2**20)


def host_times(device: Any) -> dict[str, float]:
    """Return microseconds of the host in each call; a function for `samestep.launch`."""
    with joined(device) as world:
        calls = _calls(world, _HOST_ELEMENTS)
        rows = torch.zeros(world.size, _HOST_ELEMENTS, device=world.device)
        own = torch.zeros(_HOST_ELEMENTS, device=world.device)
        calls["all-gather of a list"] = lambda: dist.all_gather(list(rows), own)
        found = {}
        for name, call in calls.items():
            call()
            times = []
            for _ in range(_REPEATS):
                synchronize(world.device)
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            found[name] = round(1e6 * median(times), 1)
        synchronize(world.device)
        return found
