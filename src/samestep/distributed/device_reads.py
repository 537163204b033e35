"""Reads of values from the device of this rank, marked as waits for other ranks.

With NCCL, a collective returns on the host before the other ranks take part, and the host waits at
its next read. Without marks, the report of a hang could not distinguish these ranks from the one
that they wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.status import RankStatus


class DeviceReads:
    """Reads of values by all threads of this process."""

    # Status of this rank, which shows the wait; None outside of `samestep.init()`.
    rank_status: RankStatus | None = None

    def waiting(self, device: torch.device) -> AbstractContextManager[None]:
        """Mark a block that waits for a device; no mark for a CPU."""
        if self.rank_status is None or not is_accelerator(device):
            return nullcontext()
        return self.rank_status.waiting("a read of the device")

    def values(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as nested lists of Python numbers, or as one number."""
        with self.waiting(tensor.device):
            return tensor.tolist()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the CPU: the same one, or a copy."""
        with self.waiting(tensor.device):
            return tensor.cpu()

    def finish(self, device: torch.device) -> None:
        """Wait for all queued work of a device: later reads wait for later work alone."""
        if is_accelerator(device):
            with self.waiting(device):
                accelerator_module().synchronize(device)


# The only instance: the threads of a rank share its devices.
device_reads = DeviceReads()
