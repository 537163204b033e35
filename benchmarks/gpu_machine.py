"""Facts about a machine: versions, devices, links between GPUs, variables, and speeds of copies in NCCL."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_training import Outcome, synchronize

from samestep.distributed.env import relevant_variables

_QUERY = "index,name,pci.bus_id,driver_version,memory.total,mig.mode.current,ecc.mode.current,clocks.max.sm,power.limit"
# Not all variables: those of a launcher contain names of hosts.
_VARIABLES = ("CUBLAS_", "CUDA_", "CUDNN_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "SAMESTEP_", "TORCH")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal
_BYTES = 64 << 20  # of a message to itself
_REPEATS = 5
_HOST_REPEATS = 50


def versions(device: str) -> Outcome:
    """Versions, the first device, and the findings of `samestep doctor`."""
    outcome = Outcome({"torch": torch.__version__, "threads": torch.get_num_threads()})
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        outcome.numbers |= {
            "device": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        }
    command = [sys.executable, "-m", "samestep", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        outcome.failures.append(f"samestep doctor: exit code {done.returncode}, {done.stderr[-300:]}")
        return outcome
    failed = {finding["name"]: finding["value"] for finding in findings if finding["verdict"] == "fail"}
    outcome.numbers["doctor"] = dict(Counter(finding["verdict"] for finding in findings))
    # Free memory and disks of the machine decide the other findings, not the code.
    for name in ("self-test", "GPUs", "torch build"):
        outcome.require(name not in failed, f"samestep doctor: {name}: {failed.get(name)}")
    return outcome


def facts(device: str) -> Outcome:
    """`versions`; topology, processors and variables; and on a GPU speeds of copies in NCCL."""
    outcome = versions(device)
    outcome.numbers["processors"] = len(os.sched_getaffinity(0))
    outcome.numbers["/dev/shm, GiB free"] = round(shutil.disk_usage("/dev/shm").free / 2**30, 1)
    outcome.numbers["variables"] = {
        name: value for name, value in relevant_variables().items() if name.startswith(_VARIABLES)
    }
    if device == "cuda":
        outcome.numbers["devices"] = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader").splitlines()
        outcome.numbers["topology"] = _STYLE.sub("", _nvidia_smi("topo", "-m")).splitlines()
        with outcome.attempt("copies"):
            outcome.numbers["copies"] = _copies(torch.device("cuda", 0))
    return outcome


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def _copies(device: torch.device) -> dict[str, Any]:
    """Return speeds of messages of one rank to itself, by address, and the time of the host for one.

    NCCL copies 16 bytes at a time if both addresses are multiples of 16, otherwise single bytes.
    """
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    elements = _BYTES // 4
    source = torch.zeros(elements + 4, device=device)
    target = torch.zeros(elements + 4, device=device)

    dist.all_reduce(source[:1])  # connects

    def send(first: int) -> None:
        rows = slice(first, first + elements)
        messages = [dist.P2POp(dist.irecv, target[rows], 0), dist.P2POp(dist.isend, source[rows], 0)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    found: dict[str, Any] = {}
    for first in (0, 1, 2, 4):
        send(first)
        synchronize(device)
        began = time.perf_counter()
        for _ in range(_REPEATS):
            send(first)
        synchronize(device)
        seconds = (time.perf_counter() - began) / _REPEATS
        found[f"{4 * first} bytes off, GB/s"] = round(_BYTES / seconds / 1e9, 1)
    times = []
    for _ in range(_HOST_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        send(0)
        times.append(time.perf_counter() - began)
    found["host time of a send and a receive, us"] = round(1e6 * median(times), 1)
    dist.destroy_process_group()
    return found
