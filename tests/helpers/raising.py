"""Exceptions that are hard to report, as faults of a rank or of a loader worker; see `faulty.py` for `fault.json`."""

import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from helpers import faulty, recorded
from samestep.zoo.losses import cross_entropy
from samestep.zoo.splits import Splits

_CALL = 2  # of the loss in a process, one per step: the runs before it have saved one step more each
# Number of a sample since the start of a loader worker: after the first batch, which copies of the worker read too.
_SAMPLE = 18
_calls: list[int] = []
FORGED = "error: rank 7 failed: all weights are lost [E_FORGED]"


class Unprintable(Exception):
    """Exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Unnamed(type):
    """Metaclass of classes without an attribute `__name__`."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise AttributeError("no name")


def _raise_unprintable() -> None:
    raise Unprintable


def _raise_nameless() -> None:
    raise Unnamed(f"\n{FORGED}", (Exception,), {"__module__": "builtins"})("a problem")


def _raise_long() -> None:
    raise ValueError("x" * 100_000_000)


def _raise_many_lines() -> None:
    raise ValueError("\n".join(f"line {number}" for number in range(100_000)))


def _raise_chain() -> None:
    error: Exception | None = None
    for number in range(2000):
        try:
            raise ValueError(f"cause {number}") from error
        except ValueError as caught:
            error = caught
    assert error is not None
    raise error


def _raise_invalid_utf8() -> None:
    raise OSError(2, "no such file", b"/data/caf\xe9.png".decode(errors="surrogateescape"))


def _raise_forged() -> None:
    error = ValueError(f"\x1b[2J\x1b]0;title\x07a problem\r{FORGED}\n{FORGED}\n\u202e{FORGED}\x85{FORGED}")
    error.add_note(FORGED)
    raise error


def _exit_with_text() -> None:
    sys.exit(f"no file \x1b[31mdata.csv\n{FORGED}")


def _raise_local() -> None:
    class Local(Exception):
        """Class that no other process can import."""

    raise Local("only here")


def hang() -> None:
    """Do not return."""
    time.sleep(1000)


_EXCEPTIONS: dict[str, Callable[[], None]] = {
    "unprintable": _raise_unprintable,
    "nameless": _raise_nameless,
    "long": _raise_long,
    "many lines": _raise_many_lines,
    "chain": _raise_chain,
    "invalid UTF-8": _raise_invalid_utf8,
    "forged": _raise_forged,
    "exit with text": _exit_with_text,
}
_WORKER_FAULTS: dict[str, Callable[[], None]] = {
    "unprintable in a worker": _raise_unprintable,
    "local class in a worker": _raise_local,
    "hang in a worker": hang,
    "unpicklable sample": lambda: None,
}


class Indexed(recorded.Indexed):
    """Dataset with faults in a loader worker."""

    _calls = count(1)  # not a number, which would be a memory of the data set

    def __getitem__(self, index: int) -> Any:
        is_due = next(self._calls) == _SAMPLE and get_worker_info() is not None
        fault = faulty.take_fault(set(_WORKER_FAULTS)) if is_due else None
        if fault is None:
            return super().__getitem__(index)
        _WORKER_FAULTS[fault["kind"]]()
        return (number for number in range(3)), index  # a generator cannot be pickled


def collate(samples: list[Any]) -> Any:
    """Return a microbatch; samples that are not tensors stay as they are."""
    return default_collate(samples) if all(isinstance(image, torch.Tensor) for image, _ in samples) else samples


def load() -> Splits:
    """Return training samples, and some of them for evaluation."""
    splits = recorded.load()
    return Splits(train=Indexed(102), evaluation=splits.evaluation, classes=splits.classes, collate=collate)


def loss(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, after the injected exception if there is one for this rank."""
    if outputs.requires_grad:
        _calls.append(1)
        if len(_calls) == _CALL and (fault := faulty.take_fault(set(_EXCEPTIONS))) is not None:
            _EXCEPTIONS[fault["kind"]]()
    return cross_entropy(outputs, indices % recorded.CLASSES)
