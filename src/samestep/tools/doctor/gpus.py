"""Checks of GPUs: nvidia-smi, torch's view, memory in use, links."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.tools.doctor.findings import Finding, judged
from samestep.units import format_bytes

_QUERY = "name,driver_version,memory.total,memory.used"
_NVIDIA_SMI_SECONDS = 20.0
# A desktop session uses up to this much of a GPU that also drives a display.
_DESKTOP_BYTES = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine; memory in bytes."""

    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True)
class Nvidia:
    """State of the NVIDIA driver."""

    driver: str | None = None  # version; None without a driver
    gpus: tuple[Gpu, ...] = ()
    error: str | None = None  # reason why nvidia-smi failed


@dataclass(frozen=True)
class TorchDevices:
    """GPUs as torch sees them."""

    gpus: tuple[str, ...] = ()  # names in torch's order
    unlinked: tuple[
        tuple[int, int], ...
    ] = ()  # pairs of GPUs without direct access to each other's memory
    error: str | None = None  # reason why torch cannot compute on a GPU


def read_nvidia() -> Nvidia:
    """Query nvidia-smi, without torch and without initializing a device."""
    if shutil.which("nvidia-smi") is None:
        return Nvidia()
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvidia(error=str(error))
    if done.returncode != 0:
        return Nvidia(error=(done.stdout + done.stderr).strip() or f"exit code {done.returncode}")
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> Nvidia:
    """Return the driver and the GPUs from the output of nvidia-smi, one line per GPU."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4]
    gpus = tuple(Gpu(name, _mib(total), _mib(used)) for name, _, total, used in rows)
    return Nvidia(rows[0][1] if rows else None, gpus)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0  # `[N/A]`


def check_gpus(nvidia: Nvidia, devices: TorchDevices | None) -> Iterator[Finding]:
    """Check that torch computes on the GPUs, that their memory is free, and that they access each other's memory."""
    if nvidia.error is not None:
        fix = "after a driver update, restart the machine; start a container with --gpus all"
        yield Finding("nvidia-smi", "fail", nvidia.error, "the driver responds", fix)
    if devices is None:  # without a self-test
        names = ", ".join(gpu.name for gpu in nvidia.gpus)
        yield Finding("GPUs", "info", f"{names or 'none'}, reported by the driver")
    else:
        yield judged(
            "GPUs",
            "fail" if len(devices.gpus) < len(nvidia.gpus) else "pass",
            f"{devices.error or ', '.join(devices.gpus) or 'none'}; {len(nvidia.gpus)} reported by the driver",
            "torch computes on each GPU",
            "unset CUDA_VISIBLE_DEVICES, unless intended; see torch build; nvidia-smi -q reports a lost GPU; without a "
            "kernel image, install torch for a newer CUDA",
        )
    for index, gpu in enumerate(nvidia.gpus):
        yield judged(
            f"memory of GPU {index}",
            "warn" if gpu.memory_used > _DESKTOP_BYTES else "pass",
            f"{format_bytes(gpu.memory_used)} of {format_bytes(gpu.memory_total)} in use",
            "GPU memory is free before a run",
            "nvidia-smi lists the processes; end those that are left over from another run",
        )
    if devices is not None and len(devices.gpus) > 1:
        pairs = ", ".join(f"{first} and {second}" for first, second in devices.unlinked)
        yield judged(
            "GPU links",
            "warn" if pairs else "pass",
            f"no direct access between GPUs {pairs}"
            if pairs
            else "each GPU accesses the memory of every other one",
            "GPUs copy directly to each other; otherwise NCCL copies through host memory, which is slower",
            "nvidia-smi topo -m shows the links; select linked GPUs with --devices",
        )
