"""Memory of a rank: peak, held tensors, limit."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.engine.engine import Engine
from samestep.errors import InputError
from samestep.units import format_bytes

_RESERVED_BYTES = 32 << 20  # least memory of a rank in addition to that in use before the model


def held_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, gradients, buffers and optimizer state on this rank."""
    parameters = list(engine.local_parameters.local.values())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in engine.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    tensors = [*parameters, *gradients, *engine.model.buffers(), *state]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_meta)


def limit_memory(memory: int, device: torch.device) -> None:
    """Limit the memory of the GPU or of this process; allocations above the limit fail.

    Raises:
        InputError: this process uses more already.
    """
    if is_accelerator(device):
        total = accelerator_module().get_device_properties(device).total_memory
        accelerator_module().set_per_process_memory_fraction(min(1.0, memory / total), device)
        return
    # Heap and private mappings (getrlimit(2)): a limit of the address space would count reservations. Their size is
    # available on Linux only.
    minimum = getattr(psutil.Process().memory_info(), "data", 0) + _RESERVED_BYTES
    if memory < minimum:
        raise InputError(
            f"--memory {format_bytes(memory)}: a rank needs {format_bytes(minimum)} before the model is built",
            expected="the total memory of a rank, including Python and torch",
            fix=f"--memory {2 * minimum >> 20}MiB",
            code="E_MEMORY_LIMIT",
        )
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, of the process on a CPU."""
    if is_accelerator(device):
        return int(accelerator_module().max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
