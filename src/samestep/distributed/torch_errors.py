"""Errors of torch, NCCL and gloo: whether a rank was lost, the reason, and fixes for reports."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from samestep.distributed.devices import gpu_memory
from samestep.number_text import format_bytes
from samestep.report_text import message_of

# gloo's errors have no type of their own.
_LOST_BY_GLOO = re.compile(
    "gloo/|connection|pair closure|timed out|timeout|broken pipe", re.IGNORECASE
)
# All errors of NCCL have one type.
_LOST_BY_NCCL = re.compile(
    "remote process exited|remote error|connection closed|connection reset|likely closed"
    "|broken pipe|timeout|aborted",
    re.IGNORECASE,
)
_LAST_ERROR = "Last error:"  # precedes NCCL's own text in torch's
_OUT_OF_MEMORY = re.compile("out of memory|allocate memory|not enough memory", re.IGNORECASE)
# torch raises a plain RuntimeError: only its text has the operator.
_NO_DETERMINISTIC_KERNEL = re.compile(
    "(?P<operator>.+) does not have a deterministic implementation"
)

MEMORY_FIX = (
    "use less memory per rank: more processes, a smaller batch or model, accumulate: 4, fewer "
    "loader workers"
)
GPU_MEMORY_FIXES = (
    "bf16: step.precision: bf16, or torch.autocast",
    "fewer rows at a time: accumulate: 4, or a smaller batch",
    "activation checkpointing: step.recompute, or torch.utils.checkpoint",
    "strategy fsdp on several GPUs; then also offload: true",
)
FRAGMENTS_FIX = "less fragmentation: PYTORCH_ALLOC_CONF=expandable_segments:True"
_FRAGMENTS_BYTES = 10**9  # reserved and not allocated
_SHARED_MEMORY = "docker run --shm-size=8g or --ipc=host; "
# Regular expressions of messages in any case, with fixes.
_BACKEND_FIXES = (
    (
        "shared memory segment|/dev/shm|no space left",
        f"{_SHARED_MEMORY}df -h /dev/shm prints the size",
    ),
    (
        "duplicate gpu",
        "start one rank per GPU; --share-gpu, or samestep.init(share_gpu=True), lets ranks share "
        "GPUs",
    ),
    (
        "unhandled cuda error",
        "look at the CUDA error, which NCCL only passes on; NCCL_DEBUG=INFO prints the call",
    ),
    (
        "unhandled system error",
        "NCCL_DEBUG=INFO prints the cause; NCCL_SOCKET_IFNAME=eth0 selects the network interface, "
        "NCCL_IB_DISABLE=1 avoids InfiniBand",
    ),
)
_RESOURCE_FIXES = (
    (
        "(?i:out of shared memory|unable to (allocate|mmap|open) shared memory)",
        f"{_SHARED_MEMORY}or --workers 0, which needs no shared memory",
    ),
    (
        "Resource temporarily unavailable|can't start new thread",
        "raise the limits of processes and address space (ulimit -u, ulimit -v, docker run "
        "--pids-limit)",
    ),
    (
        "invalid device ordinal",
        "cuda:0 is the device of each process; --devices-per-process of samestep run gives each "
        "several",
    ),
    (
        "Too many open files|received 0 items of ancdata",
        "ulimit -n 65536, or LimitNOFILE= of the service",
    ),
)
_FAST = "step.reduction: fast, or samestep run without --exact"
_REPLACEMENTS = (
    ("adaptive_avg_pool", "avg_pool2d, or a mean over height and width"),
    ("adaptive_max_pool", "max_pool2d"),
    ("upsample_", "nearest-neighbor upsampling, or a transposed convolution"),
    (
        "nll_loss2d",
        "the loss of rows: cross_entropy(outputs.movedim(1, -1).flatten(0, -2), targets.flatten())",
    ),
    ("reflection_pad", "padding with zeros"),
    ("replication_pad", "padding with zeros"),
    ("put_", "index_put_ or scatter"),
)


def is_backend_error(error: BaseException) -> bool:
    """Whether an error comes from NCCL, or from another backend with torch's type of error."""
    distributed = sys.modules.get("torch.distributed")  # the launcher has no torch
    return distributed is not None and isinstance(error, distributed.DistBackendError)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a backend is the loss of another rank."""
    if is_backend_error(error):
        return _LOST_BY_NCCL.search(str(error)) is not None
    distributed = sys.modules["torch.distributed"]
    # Not subclasses of RuntimeError, whose texts can have one of these words by chance.
    return isinstance(error, distributed.DistError) or (
        type(error) is RuntimeError and _LOST_BY_GLOO.search(str(error)) is not None
    )


def reason_of(message: str) -> str:
    """Return the first line of NCCL's own text in the message of an error, or of the message."""
    _, _, own = message.rpartition(_LAST_ERROR)
    return next(iter(own.strip().splitlines() or message.strip().splitlines()), "")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory, of the machine or of a GPU."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(message_of(error)) is not None


def operator_without_kernel(error: BaseException) -> str | None:
    """Return the operator for which torch has no deterministic kernel, if this is the error."""
    if type(error) is RuntimeError:
        match = _NO_DETERMINISTIC_KERNEL.match(message_of(error))
        if match:
            return match["operator"]
    return None


def fix_lines(error: BaseException) -> Iterator[str]:
    """Yield the lines of a report with facts and fixes, without indent."""
    message = message_of(error)
    operator = operator_without_kernel(error)
    if operator is not None:
        texts = (text for name, text in _REPLACEMENTS if operator.startswith(name))
        replacement = next(texts, "another operator")
        yield "expected: operators with a deterministic kernel, which `exact` requests from torch"
        yield f"fix:      reduction fast ({_FAST}), or {replacement} in place of {operator}"
    if is_out_of_memory(error):
        torch = sys.modules.get("torch")
        if is_backend_error(error) or (
            torch and isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
        ):
            yield from _gpu_memory_lines()
        else:
            yield f"fix:      {MEMORY_FIX}"
    elif is_backend_error(error):
        matches = (fix for text, fix in _BACKEND_FIXES if re.search(text, message, re.IGNORECASE))
        # One fix: the table begins with causes, and ends with classes of errors.
        yield from (f"fix:      {fix}" for fix in list(matches)[:1])
    for fix in resource_fixes(message):
        yield f"fix:      {fix}"


def resource_fixes(message: str) -> list[str]:
    """Return the fixes of limits of the machine that a message names."""
    return [fix for text, fix in _RESOURCE_FIXES if re.search(text, message)]


def _gpu_memory_lines() -> Iterator[str]:
    memory = gpu_memory()
    fixes = list(GPU_MEMORY_FIXES)
    if memory is not None:
        allocated, _, reserved, free, total = map(format_bytes, memory)
        yield (
            f"memory:   {allocated} allocated, {reserved} reserved by torch; {free} of {total} free"
        )
        if memory.reserved - memory.allocated > _FRAGMENTS_BYTES:
            fixes.append(FRAGMENTS_FIX)
    yield f"fix:      1. {fixes[0]}"
    for number, fix in enumerate(fixes[1:], start=2):
        yield f"          {number}. {fix}"
