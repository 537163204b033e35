"""Fixes for exceptions that a rank did not expect: memory, resources, kernels, NCCL."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from samestep.distributed import backend_errors
from samestep.distributed.devices import gpu_memory
from samestep.errors import message_of
from samestep.units import format_bytes

_OUT_OF_MEMORY = re.compile("out of memory|allocate memory|not enough memory", re.IGNORECASE)
MEMORY_FIX = "use less memory per rank: more processes, a smaller batch or model, accumulate: 4, fewer loader workers"
GPU_MEMORY_FIXES = (
    "bf16: step.precision: bf16, or torch.autocast",
    "fewer rows at a time: accumulate: 4, or a smaller batch",
    "activation checkpointing: step.recompute, or torch.utils.checkpoint",
    "strategy fsdp on several GPUs; then also offload: true",
)
FRAGMENTS_FIX = "less fragmentation: PYTORCH_ALLOC_CONF=expandable_segments:True"
_FRAGMENTS_BYTES = 10**9  # reserved and not allocated
_RESOURCE_FIXES = (
    (
        re.compile(
            "out of shared memory|unable to (allocate|mmap|open) shared memory", re.IGNORECASE
        ),
        "docker run --shm-size=8g or --ipc=host; or --workers 0, which needs no shared memory",
    ),
    (
        re.compile("Resource temporarily unavailable|can't start new thread"),
        "raise the limits of processes and address space (ulimit -u, ulimit -v, docker run --pids-limit)",
    ),
    (
        re.compile("Too many open files|received 0 items of ancdata"),
        "ulimit -n 65536, or LimitNOFILE= of the service",
    ),
)
# torch raises a plain RuntimeError: only its text has the operator.
_NO_DETERMINISTIC_KERNEL = re.compile(
    "(?P<operator>.+) does not have a deterministic implementation"
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory, of the machine or of a GPU."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(message_of(error)) is not None


def operator_without_kernel(error: BaseException) -> str | None:
    """Return the operator for which torch has no deterministic kernel, if this is the error; otherwise None."""
    match = (
        _NO_DETERMINISTIC_KERNEL.match(message_of(error)) if type(error) is RuntimeError else None
    )
    if match:
        return match["operator"]
    return None


def fix_lines(error: BaseException) -> Iterator[str]:
    """Yield the lines of a report with facts and fixes, without indent."""
    message = message_of(error)
    operator = operator_without_kernel(error)
    if operator is not None:
        replacement = next(
            (text for name, text in _REPLACEMENTS if operator.startswith(name)), "another operator"
        )
        yield "expected: operators with a deterministic kernel, which `exact` requests from torch"
        yield f"fix:      reduction fast ({_FAST}), or {replacement} in place of {operator}"
    if is_out_of_memory(error):
        if _is_of_gpu(error):
            yield from _gpu_memory_lines()
        else:
            yield f"fix:      {MEMORY_FIX}"
    elif backend_errors.is_backend_error(error) and (fix := backend_errors.fix_of(message)):
        yield f"fix:      {fix}"
    for pattern, fix in _RESOURCE_FIXES:
        if pattern.search(message):
            yield f"fix:      {fix}"


def _is_of_gpu(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # the launcher has no torch
    types = (torch.OutOfMemoryError, torch.AcceleratorError) if torch is not None else ()
    return isinstance(error, types) or backend_errors.is_backend_error(error)


def _gpu_memory_lines() -> Iterator[str]:
    memory = gpu_memory()
    fixes = list(GPU_MEMORY_FIXES)
    if memory is not None:
        allocated, _, reserved, free, total = map(format_bytes, memory)
        yield f"memory:   {allocated} allocated, {reserved} reserved by torch; {free} of {total} free"
        if memory.reserved - memory.allocated > _FRAGMENTS_BYTES:
            fixes.append(FRAGMENTS_FIX)
    for number, fix in enumerate(fixes, start=1):
        yield f"{'fix:' if number == 1 else '':<9} {number}. {fix}"
