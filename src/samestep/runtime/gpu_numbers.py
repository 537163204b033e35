"""What a GPU says of itself: memory, how busy it is, how warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNTOLD: tuple[type[Exception], ...] = (RuntimeError, ImportError)
try:
    from pynvml import NVMLError
except ImportError:
    pass  # torch's functions that need it say so when they are called
else:
    _UNTOLD += (NVMLError,)


def gpu_numbers(device: torch.device) -> dict[str, Any] | None:
    """`name`, `memory_bytes` and `memory_total_bytes` of the whole device, `use_percent`, `temperature_c`,
    `peak_allocated_bytes` of this process's tensors; None for each that nobody tells.

    torch finds the device that NVML means; without the package `nvidia-ml-py` there is no use and no temperature. None
    in all for a device that is no GPU, and before the process has used it.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    memory = _told(_memory, device)
    return {
        "name": _told(torch.cuda.get_device_name, device),
        "memory_bytes": memory[0] if memory else None,
        "memory_total_bytes": memory[1] if memory else None,
        "use_percent": _told(torch.cuda.utilization, device),
        "temperature_c": _told(torch.cuda.temperature, device),
        "peak_allocated_bytes": _told(torch.cuda.max_memory_allocated, device),
    }


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are taken, by whomever, and bytes in all."""
    # NVML first: asking CUDA from a thread may come in the way of what another one captures.
    used = _told(torch.cuda.device_memory_used, device)
    if used is not None:
        return used, torch.cuda.get_device_properties(device).total_memory
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _told(ask: Callable[[torch.device], Any], device: torch.device) -> Any:
    try:
        return ask(device)
    except _UNTOLD:
        return None
