"""Counts the operations of torch, each of which is one kernel or more on a GPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Counts operations other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count inside the block."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not self._is_paused:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))
