"""GPU checks: nvidia-smi, torch's view, CUDA_VISIBLE_DEVICES, memory in use."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.tools.doctor.findings import Finding, judged
from samestep.units import format_bytes

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_NVIDIA_SMI_SECONDS = 20.0
_FIELDS = "uuid,name,driver_version,memory.total,memory.used"
# A desktop session uses up to this much of a GPU that also drives a display.
_DESKTOP_BYTES = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine; memory in bytes."""

    uuid: str
    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True)
class Nvidia:
    """State of the NVIDIA driver."""

    driver: str | None = None  # version; None without a driver
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[tuple[int, str], ...] = ()  # process id and GPU uuid of each process that uses GPU memory
    error: str | None = None  # reason why nvidia-smi failed


@dataclass(frozen=True)
class TorchDevices:
    """GPUs as torch sees them."""

    gpus: tuple[str, ...] = ()  # names in torch's order
    error: str | None = None  # reason why torch cannot compute on a GPU


def read_nvidia() -> Nvidia:
    """Query nvidia-smi, without torch and without initializing a device."""
    driver = None
    if _KERNEL_MODULE.is_file() and (match := _DRIVER_VERSION.search(_KERNEL_MODULE.read_text(encoding="utf-8"))):
        driver = match[1]
    if shutil.which("nvidia-smi") is None:
        return Nvidia(driver)
    answer = _nvidia_smi(f"--query-gpu={_FIELDS}")
    if answer.returncode != 0:
        return Nvidia(driver, error=(answer.stdout + answer.stderr).strip() or f"exit code {answer.returncode}")
    smi_driver, gpus = parse_gpus(answer.stdout)
    return Nvidia(driver or smi_driver, gpus, parse_processes(_nvidia_smi("--query-compute-apps=pid,gpu_uuid").stdout))


def _nvidia_smi(query: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def parse_gpus(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver version and the GPUs from `--query-gpu` output."""
    rows = _rows(text, 5)
    gpus = tuple(Gpu(uuid, name, _mib(total), _mib(used)) for uuid, name, _, total, used in rows)
    return (rows[0][2] if rows else None), gpus


def parse_processes(text: str) -> tuple[tuple[int, str], ...]:
    """Return (process id, GPU uuid) pairs from `--query-compute-apps` output."""
    return tuple((int(pid), uuid) for pid, uuid in _rows(text, 2) if pid.isdecimal())


def _rows(text: str, width: int) -> list[Sequence[str]]:
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == width]


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0  # `[N/A]`


def check_gpus(nvidia: Nvidia, devices: TorchDevices | None) -> Iterator[Finding]:
    """Check that torch computes on the GPUs of the machine."""
    if nvidia.error is not None:
        yield Finding(
            "nvidia-smi",
            "fail",
            nvidia.error,
            "the driver responds",
            "after a driver update, restart the machine; start a container with --gpus all",
        )
    devices = devices or TorchDevices()
    if devices.error is not None and (nvidia.driver is not None or nvidia.gpus):
        yield Finding(
            "GPUs",
            "fail",
            f"torch cannot use the GPUs: {devices.error}",
            "torch computes on each GPU",
            "see the findings on CUDA, driver and CUDA_VISIBLE_DEVICES; nvidia-smi -q reports a lost GPU; without a "
            "kernel image, install a torch build for a newer CUDA",
        )
    elif devices.gpus:
        yield Finding("GPUs", "pass", ", ".join(devices.gpus))
    elif nvidia.gpus:
        yield Finding("GPUs", "info", ", ".join(gpu.name for gpu in nvidia.gpus) + " (reported by the driver)")
    else:
        yield Finding("GPUs", "info", "none; ranks compute on the CPU")


def check_visible_devices(variables: Mapping[str, str], nvidia: Nvidia) -> Iterator[Finding]:
    """Check that CUDA_VISIBLE_DEVICES names existing devices, each once."""
    if _VISIBLE not in variables:
        return
    value, count = variables[_VISIBLE], len(nvidia.gpus)
    entries = [entry.strip() for entry in value.split(",")]
    duplicates = sorted({entry for entry in entries if entries.count(entry) > 1})
    if not value.strip():
        yield Finding(
            _VISIBLE,
            "warn",
            "set and empty: processes see no GPU",
            "the devices for this process; unset for all devices",
            f"unset {_VISIBLE}, unless ranks compute on the CPU (--device cpu)",
        )
    elif duplicates:
        yield Finding(
            _VISIBLE,
            "fail",
            f"{value} repeats {', '.join(duplicates)}: torch sees no GPU",
            "each device once",
            f"export {_VISIBLE}={','.join(dict.fromkeys(entries))}",
        )
    else:
        is_unknown = count and any(entry.isdecimal() and int(entry) >= count for entry in entries)
        yield judged(
            _VISIBLE,
            "fail" if is_unknown else "pass",
            f"{value}, but the machine has {count} GPUs, numbered from 0" if is_unknown else value,
            "existing devices; CUDA ignores every entry after an unknown one",
            f"export {_VISIBLE}={','.join(map(str, range(count)))}, or unset {_VISIBLE}",
        )


def check_gpu_memory(nvidia: Nvidia) -> Iterator[Finding]:
    """Check that other processes do not use the memory of the GPUs."""
    used = [(index, gpu) for index, gpu in enumerate(nvidia.gpus) if gpu.memory_used > _DESKTOP_BYTES]
    for index, gpu in used:
        pids = ", ".join(str(pid) for pid, uuid in nvidia.processes if uuid == gpu.uuid)
        owner = f"process {pids}" if pids else "a process that is not visible here"
        yield Finding(
            f"memory of GPU {index}",
            "warn",
            f"{format_bytes(gpu.memory_used)} of {format_bytes(gpu.memory_total)} used by {owner}",
            "GPU memory is free before a run",
            "if the process is left over from another run: kill PID (ps -fp PID shows its owner)",
        )
    if nvidia.gpus and not used:
        yield Finding("memory of GPUs", "pass", "free")
