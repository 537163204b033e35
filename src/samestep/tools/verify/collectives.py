"""Counts the collectives that a model issues while it computes a shard."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor")


class CollectiveCount:
    """Counts between `begin` and `end`, by thread; what the engine issues elsewhere is not a model's."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        # For the life of this process, which a trial has for itself.
        for name in _NAMES:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def begin(self) -> None:
        """A forward begins in this thread."""
        self._counts[threading.get_ident()] = 0

    def end(self) -> int:
        """How many there were since."""
        return self._counts.pop(threading.get_ident(), 0)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            thread = threading.get_ident()
            if thread in self._counts:
                self._counts[thread] += 1
            return function(*arguments, **options)

        return call
