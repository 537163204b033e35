"""Errors of NCCL and gloo: whether another rank was lost, the reason, and a fix."""

from __future__ import annotations

import re
import sys

# gloo's errors have no type of their own.
_LOST_BY_GLOO = re.compile(
    "gloo/|connection|pair closure|timed out|timeout|broken pipe", re.IGNORECASE
)
# All errors of NCCL have one type.
_LOST_BY_NCCL = re.compile(
    "remote process exited|remote error|connection closed|connection reset|likely closed|broken pipe|timeout|aborted",
    re.IGNORECASE,
)
_FIXES = (
    (
        re.compile("shared memory segment|/dev/shm|no space left", re.IGNORECASE),
        "docker run --shm-size=8g or --ipc=host; df -h /dev/shm prints the size",
    ),
    (
        re.compile("duplicate gpu", re.IGNORECASE),
        "start one rank per GPU; --share-gpu, or samestep.init(share_gpu=True), lets ranks share GPUs",
    ),
    (
        re.compile("unhandled cuda error", re.IGNORECASE),
        "look at the CUDA error, which NCCL only passes on; NCCL_DEBUG=INFO prints the call",
    ),
    (
        re.compile("unhandled system error", re.IGNORECASE),
        "NCCL_DEBUG=INFO prints the cause; NCCL_SOCKET_IFNAME=eth0 selects the network interface, NCCL_IB_DISABLE=1 "
        "avoids InfiniBand",
    ),
)
_LAST_ERROR = "Last error:"  # precedes NCCL's own text in torch's


def is_backend_error(error: BaseException) -> bool:
    """Whether an error comes from NCCL, or from another backend with torch's type of error."""
    distributed = sys.modules.get("torch.distributed")  # the launcher has no torch
    return distributed is not None and isinstance(error, distributed.DistBackendError)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a backend is the loss of another rank."""
    if is_backend_error(error):
        return _LOST_BY_NCCL.search(str(error)) is not None
    distributed = sys.modules["torch.distributed"]
    return isinstance(error, distributed.DistError) or (
        type(error) is RuntimeError and _LOST_BY_GLOO.search(str(error)) is not None
    )


def reason_of(message: str) -> str:
    """Return the first line of NCCL's own text in the message of an error, or of the message."""
    _, _, own = message.rpartition(_LAST_ERROR)
    return next(iter(own.strip().splitlines() or message.strip().splitlines()), "")


def fix_of(message: str) -> str | None:
    """Return the fix of an error of NCCL that is not the loss of another rank, or None."""
    return next((fix for pattern, fix in _FIXES if pattern.search(message)), None)
