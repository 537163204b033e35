"""Computation of all parts of a divided call in one process, in lock step: sums over the parts need no ranks.

Each part runs in a thread of its own, but only one thread runs at a time: a part runs until it asks for a total or
ends, then the next part runs. Tensors of all parts belong to one autograd graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import torch


class OutOfStep(Exception):
    """The parts asked for different totals."""


class _Ended(BaseException):
    """Ends the thread of a part; no handler of the script catches it as an `Exception`."""


class Part:
    """One part of a divided call, and its `Exchange` with the others.

    Attributes:
        result: result of the part.
    """

    joins_graph = True

    def __init__(self, compute: Callable[[Part], Any], turn: Callable[[], AbstractContextManager[None]]) -> None:
        """Prepare a thread; `run_in_lockstep` starts it.

        Args:
            compute: the computation. Grad mode and function modes belong to threads: it sets them itself.
            turn: context of the scheduler around each time that the part runs: installs its own state.
        """
        self.result: Any = None
        self.error: BaseException | None = None
        self.values: torch.Tensor | None = None
        self.total_of_all: torch.Tensor | None = None
        self._compute = compute
        self._turn = turn
        self._resumed = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._ended = False
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="part of a trial", daemon=True)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all parts."""
        if self._ended:  # the script has caught the exception that ends it
            raise _Ended
        self.values = values
        self._paused.release()
        self._resumed.acquire()
        if self._ended:
            raise _Ended
        assert self.total_of_all is not None
        total = self.total_of_all if torch.is_grad_enabled() else self.total_of_all.detach()
        return total.clone()  # this part may write into it

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all parts, without a graph."""
        return self.total(values.detach())

    def start(self) -> None:
        """Start the thread, which waits for its first turn."""
        self._thread.start()

    def advance(self) -> None:
        """Run until the part asks for a total or ends.

        Raises:
            BaseException: the error of the part.
        """
        self.values = None
        with self._turn():
            self._resumed.release()
            self._paused.acquire()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the thread."""
        self._ended = True
        self._resumed.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        self._resumed.acquire()
        if self._ended:
            return
        try:
            self.result = self._compute(self)
        except _Ended:
            pass
        except BaseException as error:  # boundary: raised in the thread of the scheduler
            self.error = error
        self._paused.release()


def run_in_lockstep(parts: Sequence[Part]) -> None:
    """Run the parts to their ends. No thread is left, whatever happens.

    Raises:
        OutOfStep: the parts asked for different totals.
        BaseException: the error of the first part that failed.
    """
    try:
        for part in parts:
            part.start()
        while True:
            for part in parts:
                part.advance()
            if all(part.values is None for part in parts):
                return
            _share([part.values for part in parts], parts)
    finally:
        for part in parts:
            part.end()


def _share(values: Sequence[torch.Tensor | None], parts: Sequence[Part]) -> None:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        raise OutOfStep("parts of the rows exchange different numbers of values")
    if len({(value.shape, value.dtype) for value in present}) > 1:
        raise OutOfStep("parts of the rows exchange values of different shapes or dtypes")
    with torch.enable_grad():
        total = present[0]
        for value in present[1:]:
            total = total + value
    for part in parts:
        part.total_of_all = total
