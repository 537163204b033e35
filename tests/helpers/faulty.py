"""Data, model and loss of a small recipe with fault injection: `fault.json` has rank, step and kind of a fault.

A fault happens once: the file is renamed to `fired.json`, so that a restarted run continues. Steps are counted as
training calls of the loss since the start of the process: one per step.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from helpers import recorded
from samestep.zoo.losses import cross_entropy
from samestep.zoo.splits import Splits

PAUSE_SECONDS = 1.5
_calls = [0]


class Indexed(recorded.Indexed):
    """Dataset in which one sample can have a fault."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40 and (fault := take_fault({"kill a worker", "hang in dataset"})):
            if fault["kind"] == "kill a worker":
                assert get_worker_info() is not None
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return super().__getitem__(index)


def load() -> Splits:
    """Return training samples, and some of them for evaluation."""
    splits = recorded.load()
    return Splits(train=Indexed(102), evaluation=splits.evaluation, classes=splits.classes)


def loss(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, after the injected fault if there is one for this call."""
    value = cross_entropy(outputs, indices % recorded.CLASSES)
    if outputs.requires_grad:
        _calls[0] += 1
        Path(f"step-of-{dist.get_rank()}").write_text(str(_calls[0]), encoding="utf-8")
        time.sleep(_pace())
        fault = take_fault(set(_STEP_FAULTS) | {"nan"}, _calls[0])
        if fault is not None and fault["kind"] == "nan":
            return value * float("nan")
        if fault is not None:
            _STEP_FAULTS[fault["kind"]]()
    elif (fault := take_fault({"raise in evaluation", "wait in evaluation"})) is not None:
        if fault["kind"] == "raise in evaluation":
            raise ArithmeticError("the sum does not add up")
        time.sleep(1)
    return value


def take_fault(kinds: set[str], step: int | None = None) -> dict[str, Any] | None:
    """Return the fault for this rank and step, and remove it for all other processes."""
    file = Path("fault.json")
    try:
        fault = json.loads(file.read_text(encoding="utf-8"))
        rank = dist.get_rank() if dist.is_initialized() else fault["rank"]  # a loader worker has no rank
        if fault["kind"] not in kinds or fault["rank"] not in (rank, "any") or fault.get("step") not in (step, None):
            return None
        file.rename("fired.json")
        os.utime("fired.json")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return dict(fault)


def _kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _pause() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {os.getpid()}"])
    _kill(signal.SIGSTOP)


def _raise() -> None:
    raise ArithmeticError("the sum does not add up")


def _raise_undecodable() -> None:
    raise ArithmeticError(b"caf\xe9 \xff".decode(errors="surrogateescape"))


def _exceed_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
    torch.zeros(2**30)


def _pace() -> float:
    """Return the delay of each training call in seconds: `SECONDS` for all ranks, `SECONDS RANK` for one."""
    try:
        seconds, *rank = Path("pace").read_text(encoding="utf-8").split()
    except (FileNotFoundError, ValueError):
        return 0.0
    return float(seconds) if not rank or int(rank[0]) == dist.get_rank() else 0.0


def _limit_files() -> None:
    """Limit the size of files to less than the optimizer state, which is the largest file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, resource.RLIM_INFINITY))


def _kill_in_rename() -> None:
    """Kill this process when it calls `os.rename` during a save."""
    os.rename = lambda *arguments, **options: _kill(signal.SIGKILL)


def _fill_disk() -> None:
    """Let every call of this process that changes a disk fail as on a full disk."""

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*arguments: Any, **options: Any) -> Any:
            if call is not real_open or arguments[1] & os.O_CREAT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        return fails

    real_open = os.open
    for name in ("mkdir", "open", "write", "rename", "replace", "symlink"):
        setattr(os, name, wrapped(getattr(os, name)))


def _lose_folder() -> None:
    Path("runs/a/checkpoints").rename("runs/a/elsewhere")
    Path("runs/a/checkpoints").write_text("", encoding="utf-8")


_STEP_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: _kill(signal.SIGKILL),
    "stop": lambda: _kill(signal.SIGSTOP),
    "pause": _pause,
    "raise": _raise,
    "raise undecodable": _raise_undecodable,
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(5)": lambda: os._exit(5),
    "segmentation fault": lambda: print(ctypes.string_at(0)),
    "memory limit": _exceed_memory,
    "sleep": lambda: time.sleep(1000),
    "file size limit": _limit_files,
    "disk full": _fill_disk,
    "kill at rename": _kill_in_rename,
    "folder lost": _lose_folder,
}
