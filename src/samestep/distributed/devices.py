"""Devices of a launch and of one rank: selection and measurements.

No other module calls `torch.cuda` or compares a device with `cuda`. torch is imported late: the
launcher works without.

`CUDA_VISIBLE_DEVICES` lists the devices that CUDA may use: comma-separated numbers, or names of
devices or of their partitions (`GPU-...`, `MIG-...`; CUDA C++ Programming Guide, "CUDA Environment
Variables").
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.config import DeviceKind, StrategyConfig, resolve_mesh
from samestep.config.exclusions import require_compatible
from samestep.distributed.env import Sharing
from samestep.distributed.resources import usable_processors
from samestep.errors import InputError
from samestep.number_text import plural

if TYPE_CHECKING:
    import torch

ACCELERATOR = "cuda"  # the kind of device that a rank uses if there is one
_POSITION = re.compile(r"[0-9]{1,4}")
_MOST_ON_CORES = 8  # default ranks of a machine without GPUs
_device_error = partial(InputError, code="E_DEVICES")
_UNAVAILABLE: tuple[type[Exception], ...] = (RuntimeError, ImportError)
with suppress(ImportError):  # torch's functions that need pynvml raise on their own
    from pynvml import NVMLError

    _UNAVAILABLE += (NVMLError,)


def is_accelerator(device: torch.device | None) -> bool:
    """Whether a device computes asynchronously, with streams, memory and generators of its own."""
    return device is not None and device.type == ACCELERATOR


def accelerator_module() -> Any:
    """Return torch's module for accelerators, such as `torch.cuda`; importing it uses no device."""
    import torch

    return torch.get_device_module(ACCELERATOR)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the facts on which rounding depends beside the code: device, torch, threads."""
    import torch

    if is_accelerator(device):
        name = accelerator_module().get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
        with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # proc(5)
            models = (line.partition(": ")[2] for line in file if line.startswith("model name"))
            name = next(models, name).strip()
        name += f", {torch.backends.cpu.get_cpu_capability()}"  # the instructions of kernels
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _visible_devices(setting: str | None, count: int) -> tuple[str, ...]:
    """Return the names of the `count` devices that torch counts under `CUDA_VISIBLE_DEVICES`."""
    if setting is None:
        return tuple(map(str, range(count)))
    # CUDA ignores everything after the first unknown entry, such as -1; torch's count stops there
    # too.
    return tuple(entry.strip() for entry in setting.split(","))[:count]


def parse_devices(text: str, setting: str | None, count: int) -> tuple[str, ...]:
    """Return the value of `CUDA_VISIBLE_DEVICES` for each device of `--devices`, in order.

    For ranks, the first selected device becomes device 0, as with other launchers.

    Args:
        text: positions among the devices visible to this process, such as `0,2`.
        setting: `CUDA_VISIBLE_DEVICES` of this process, or None.
        count: number of devices that torch counts.

    Raises:
        InputError: the list is invalid, or a device is missing or repeated.
    """
    parts = text.split(",")
    if not all(_POSITION.fullmatch(part) for part in parts):
        raise _device_error(
            f"--devices {text}",
            "comma-separated positions among the devices visible to this process, from 0",
            "--devices 0,2; put names of devices into CUDA_VISIBLE_DEVICES",
        )
    positions = [int(part) for part in parts]
    if max(positions) >= count or len(set(positions)) < len(positions):
        raise _device_error(
            f"--devices {text}, but torch sees {count}",
            f"different positions from 0 to {count - 1}, counted within CUDA_VISIBLE_DEVICES if it "
            "is set",
            "samestep doctor lists the devices",
        )
    names = _visible_devices(setting, count)
    return tuple(names[position] for position in positions)


def require_default_device() -> None:
    """Require that new tensors are on the CPU, where data and messages are prepared.

    Raises:
        InputError: torch has another default device.
    """
    import torch

    if (default := torch.get_default_device()).type != "cpu":
        raise _device_error(
            f"torch's default device is {default}",
            "new tensors on the CPU by default; driver and loader move model and data to the "
            "device of a rank",
            "leave out torch.set_default_device, and write torch.zeros(..., device=inputs.device) "
            "in a forward",
        )


def default_processes(gpus: int, devices_per_rank: int = 1) -> int:
    """Return the default number of ranks: one per GPU, or one per core without GPUs, at most 8."""
    if gpus:
        return max(1, gpus // devices_per_rank)
    return min(usable_processors(), _MOST_ON_CORES)


def select_first_device(
    kind: DeviceKind,
    strategy: StrategyConfig,
    size: int,
    local_rank: int,
    *,
    sharing: Sharing | None,
    sees_own: bool,
    can_see_own: bool,
) -> torch.device:
    """Return the first device of this rank, and make a GPU torch's present one.

    Args:
        kind: kind of device; `auto` is a GPU if there is one.
        strategy: division of the model, which decides on the number of devices per rank.
        size: number of ranks.
        local_rank: rank on this machine.
        sharing: backend of ranks that may share GPUs.
        sees_own: whether the devices of other ranks are hidden.
        can_see_own: whether they are hidden if this rank sees no more devices than it needs.

    Raises:
        InputError: too few GPUs, or the ranks do not fit the strategy.
    """
    import torch

    available = 0
    if kind != "cpu":
        available = accelerator_module().device_count()
    if kind == "cpu" or (kind == "auto" and available == 0):
        return torch.device("cpu")
    per_rank = 1
    if strategy.name == "device_map":
        per_rank = strategy.devices or 1
    # srun --gpus-per-task=1 and similar options hide the devices of other ranks, too.
    if sees_own or (can_see_own and available == per_rank):
        local_rank = 0
    index = first_gpu_index(local_rank, per_rank, available, share=sharing is not None)
    device = torch.device(ACCELERATOR, index)
    shape = resolve_mesh(strategy, size)
    require_compatible({"sharing": sharing, "pipeline": shape.pipeline})
    accelerator_module().set_device(device)
    return device


def rank_devices(
    strategy: str, requested: int | None, device: torch.device, ranks: int
) -> tuple[torch.device, ...]:
    """Return the devices of this rank in order; the first is `device`.

    `requested` is `strategy.devices`, or None for all devices of the only rank. On a CPU all
    entries are the CPU: threads, or stand-ins for the devices of model parts.

    Raises:
        InputError: `strategy.devices` is needed and not set, or exceeds the available devices.
    """
    import torch

    number_error = partial(_device_error, fix="set strategy.devices: 2")
    if not is_accelerator(device):
        if requested is None:
            problem = f"strategy {strategy} on a CPU without a number of devices"
            raise number_error(problem, "a number of simulated devices on a machine without GPUs")
        return (device,) * requested
    if requested is None and ranks > 1:
        problem = f"strategy {strategy} on {ranks} ranks without a number of devices"
        raise number_error(problem, "a number of GPUs per rank, equal on all ranks of a machine")
    indices = gpu_range(device.index, requested, accelerator_module().device_count())
    return tuple(torch.device(ACCELERATOR, index) for index in indices)


def gpu_range(first: int, requested: int | None, available: int) -> range:
    """Return the indices of a rank's GPUs from `first`: `requested` ones, or all if None.

    Raises:
        InputError: there are fewer.
    """
    left = available - first
    if requested is None:
        return range(first, available)
    if requested > left:
        raise _device_error(
            f"strategy.devices is {requested}, but torch sees {plural(left, 'GPU')} here",
            "one GPU per device, not shared with another rank",
            f"set strategy.devices: {left}",
        )
    return range(first, first + requested)


def first_gpu_index(
    local_rank: int, gpus_per_rank: int, available: int, *, share: bool = False
) -> int:
    """Return the index of a rank's first GPU: in the order of local ranks.

    With `share`, ranks without GPUs of their own begin with the first one again.

    Raises:
        InputError: too few GPUs.
    """
    places = available // gpus_per_rank
    if places == 0 or (local_rank >= places and not share):
        fix = "use --device cpu"
        if places:
            fix = f"use --processes {places}, --share-gpu, or --device cpu"
        raise _device_error(
            f"rank {local_rank} of this machine has no GPU of its own: torch sees "
            f"{plural(available, 'GPU')}",
            f"{plural(gpus_per_rank, 'GPU')} per rank",
            fix,
        )
    return local_rank % places * gpus_per_rank


def own_devices(
    local_rank: int, gpus_per_rank: int, setting: str | None, available: int, *, share: bool
) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` under which a rank sees its own devices alone.

    `setting` is the present value, under which torch counts `available` devices.

    Raises:
        InputError: too few GPUs.
    """
    first = first_gpu_index(local_rank, gpus_per_rank, available, share=share)
    return ",".join(_visible_devices(setting, available)[first : first + gpus_per_rank])


def gpu_names() -> list[str]:
    """Return the names of the visible GPUs, in torch's order."""
    module = accelerator_module()
    return [module.get_device_name(number) for number in range(module.device_count())]


def gpu_stats(device: torch.device) -> dict[str, Any] | None:
    """Return measurements of a GPU that this process has used; None for another device.

    These are `name`, `memory_bytes`, `memory_total_bytes`, `use_percent` and `temperature_c` of the
    whole device, and `peak_allocated_bytes` of the tensors of this process. Unavailable values are
    None; utilization and temperature need the package `nvidia-ml-py`.
    """
    module = accelerator_module()
    if not is_accelerator(device) or not module.is_initialized():
        return None

    def value(read: Callable[[torch.device], Any]) -> Any:
        try:
            return read(device)
        except _UNAVAILABLE:
            return None

    # NVML first: a CUDA call from this thread may interfere with a graph capture in another thread.
    used = value(module.device_memory_used)
    properties = value(module.get_device_properties)
    total = properties and properties.total_memory
    if used is None and (memory := value(module.mem_get_info)) is not None:
        free, total = memory
        used = total - free
    return {
        "name": value(module.get_device_name),
        "memory_bytes": used,
        "memory_total_bytes": total,
        "use_percent": value(module.utilization),
        "temperature_c": value(module.temperature),
        "peak_allocated_bytes": value(module.max_memory_allocated),
    }


class GpuMemory(NamedTuple):
    """Memory of a GPU in bytes."""

    allocated: int  # tensors of this process
    peak: int  # most that they had since the start of the process
    reserved: int  # held by torch for tensors of this process, allocated or not
    free: int  # used by no process
    total: int

    @property
    def other(self) -> int:
        """Memory of the context, of NCCL's connections, and of other processes."""
        return self.total - self.free - self.reserved


def gpu_memory() -> GpuMemory | None:
    """Return the memory of the present GPU; None if this process has used none, or on an error."""
    module = accelerator_module()
    if not module.is_initialized():
        return None
    try:
        allocated = module.memory_allocated()
        free, total = module.mem_get_info()
    except _UNAVAILABLE:
        return None
    peak = module.max_memory_allocated()
    return GpuMemory(allocated, peak, module.memory_reserved(), free, total)
