"""Data, model and loss of a small recipe, into which the file `fault.json` brings one fault: (rank, step, kind).

A fault happens once: its file is renamed to `fired.json` when it does, so that a run that is started again gets on.
Steps are counted from the start of the process, as training calls of the loss: one a step where a rank has one shard.
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
from torch import nn
from torch.utils.data import get_worker_info

import recorded
from samestep import Loss
from samestep.recipes.splits import Splits

SECONDS_OF_A_PAUSE = 1.5
_calls = [0]
_models: list[nn.Module] = []
_between_steps: list[Callable[[], None]] = []


class Indexed(recorded.Indexed):
    """Of which one sample may have a fault."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40 and (fault := _taken({"kill a worker", "bad sample", "data that never comes"})):
            if fault["kind"] == "kill a worker":
                assert get_worker_info() is not None
                os.kill(os.getpid(), signal.SIGKILL)
            if fault["kind"] == "bad sample":
                raise ValueError("the image file is truncated")
            time.sleep(1000)
        return super().__getitem__(index)


def load() -> Splits:
    """Samples to train on, and a few of the same to evaluate on."""
    splits = recorded.load()
    return Splits(train=Indexed(102), evaluation=splits.evaluation, classes=splits.classes)


class Net(recorded.Net):
    """A model to which something may happen between two steps."""

    def __init__(self) -> None:
        super().__init__()
        _models[:] = [self]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        while _between_steps:
            _between_steps.pop()()
        outputs: torch.Tensor = super().forward(images)
        return outputs


def loss(outputs: torch.Tensor, indices: torch.Tensor) -> Loss:
    """Cross entropy; where the fault is, it happens first."""
    value = recorded.cross_entropy(outputs, indices % recorded.CLASSES)
    if outputs.requires_grad:
        _calls[0] += 1
        Path(f"step-of-{dist.get_rank()}").write_text(str(_calls[0]), encoding="utf-8")
        time.sleep(_pace())
        fault = _taken(set(_IN_A_STEP) | {"not a number"}, _calls[0])
        if fault is not None and fault["kind"] == "not a number":
            return Loss(value.sum * float("nan"), value.count)
        if fault is not None:
            _IN_A_STEP[fault["kind"]]()
    elif (fault := _taken({"raise in evaluation", "wait in evaluation"})) is not None:
        if fault["kind"] == "raise in evaluation":
            raise ArithmeticError("the sum does not add up")
        time.sleep(1)
    return value


def _taken(kinds: set[str], step: int | None = None) -> dict[str, Any] | None:
    """The fault that is to happen here and now, which nobody else will find any more."""
    file = Path("fault.json")
    try:
        fault = json.loads(file.read_text(encoding="utf-8"))
        rank = dist.get_rank() if dist.is_initialized() else fault["rank"]  # a loader's worker has none
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
    subprocess.Popen(["sh", "-c", f"sleep {SECONDS_OF_A_PAUSE}; kill -CONT {os.getpid()}"])
    _kill(signal.SIGSTOP)


def _raise() -> None:
    raise ArithmeticError("the sum does not add up")


def _use_up_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
    torch.zeros(2**30)


def _pace() -> float:
    """Seconds that each training call takes on purpose, of all ranks or, as `SECONDS RANK`, of one."""
    try:
        seconds, *rank = Path("pace").read_text(encoding="utf-8").split()
    except (FileNotFoundError, ValueError):
        return 0.0
    return float(seconds) if not rank or int(rank[0]) == dist.get_rank() else 0.0


def _drift() -> None:
    with torch.no_grad():
        next(_models[0].parameters()).view(-1)[0] += 1


def _limit_files() -> None:
    """No file may be as long as the optimizer's state, which is the longest."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, resource.RLIM_INFINITY))


def _die_in(name: str) -> None:
    """End this process when it calls a function of `os`, which it does when it saves."""
    setattr(os, name, lambda *arguments, **named: _kill(signal.SIGKILL))


def _disk_says(number: int) -> None:
    """Every call of this process that would change a disk fails, as the kernel says it; see errno(3)."""

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*arguments: Any, **named: Any) -> Any:
            if call is not real_open or arguments[1] & os.O_CREAT:
                raise OSError(number, os.strerror(number))
            return call(*arguments, **named)

        return fails

    real_open = os.open
    for name in ("mkdir", "open", "write", "rename", "replace", "symlink"):
        setattr(os, name, wrapped(getattr(os, name)))


def _lose_folder() -> None:
    Path("runs/a/checkpoints").rename("runs/a/elsewhere")
    Path("runs/a/checkpoints").write_text("", encoding="utf-8")


_IN_A_STEP: dict[str, Callable[[], None]] = {
    "kill": lambda: _kill(signal.SIGKILL),
    "stop": lambda: _kill(signal.SIGSTOP),
    "pause": _pause,
    "raise": _raise,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(5)": lambda: os._exit(5),
    "segmentation fault": lambda: print(ctypes.string_at(0)),
    "abort": os.abort,
    "memory limit": _use_up_memory,
    "sleep": lambda: time.sleep(1000),
    "drift": lambda: _between_steps.append(_drift),
    "file size limit": _limit_files,
    "disk full": lambda: _disk_says(errno.ENOSPC),
    "disk read-only": lambda: _disk_says(errno.EROFS),
    "kill at fsync": lambda: _die_in("fsync"),
    "kill at rename": lambda: _die_in("rename"),
    "kill at replace": lambda: _die_in("replace"),
    "folder lost": _lose_folder,
}
