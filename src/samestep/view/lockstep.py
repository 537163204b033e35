"""Computation of several slices of a divided call in one process, in lock step.

Each slice runs in a thread of its own, but only one thread runs at a time: a slice runs until it
joins the others or ends, then the next slice runs. Tensors of all slices belong to one autograd
graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import torch

from samestep.view.crossings import Parts, Sums, totals
from samestep.view.region import Joined


class OutOfStep(Exception):
    """The parts joined at different places."""


class _Ended(BaseException):
    """Ends the thread of a part; no handler of the script catches it as an `Exception`."""


class Part:
    """One slice of a divided call, and its `Exchange` with the others.

    Attributes:
        result: result of the slice, until `run_in_lockstep` returns it.
        error: exception that ended it.
        value: its value for the others, while it waits for them.
        is_waiting: whether it waits for them.
        marks: numbers of the nodes of a graph that its thread would have made next, at each join.
        joined: its result of each join.
        roots: its value at each join.
    """

    def __init__(
        self, compute: Callable[[Part], Any], turn: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Prepare a thread; `run_in_lockstep` starts it.

        Args:
            compute: the computation. Grad mode and function modes belong to threads: it sets them
                itself.
            turn: context of the scheduler around each time that the part runs: installs its own
                state.
        """
        self.result: Any = None
        self.error: BaseException | None = None
        self.value: Any = None
        self.is_waiting = False
        self.marks: list[int] = []
        self.joined: list[Any] = []
        self.roots: list[Any] = []
        self._compute = compute
        self._turn = turn
        # Locks that the other thread releases: semaphores take several times as long.
        self._resumed = threading.Lock()
        self._paused = threading.Lock()
        self._resumed.acquire()
        self._paused.acquire()
        self._ended = False
        self._sums: Sums | None = None
        self._parts: Sequence[Part] = ()
        self._processors = torch.get_num_threads()
        run = copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="slice of a call", daemon=True
        )

    def join(self, compute: Joined, value: Any) -> Any:
        """Wait for all parts, and return the result for this one. The first part computes in its turn."""
        if self._ended:  # the script has caught the exception that ends it
            raise _Ended
        self.value = value
        self.roots.append(value)
        self.marks.append(torch._C._autograd._get_sequence_nr())  # private, in torch 2.11 and 2.13
        self.is_waiting = True
        self._paused.release()
        self._resumed.acquire()
        if self._ended:
            raise _Ended
        if self is self._parts[0]:
            self._compute_for_all(compute)
        return self.joined[-1]

    def _compute_for_all(self, compute: Joined) -> None:
        assert self._sums is not None
        values = [part.value for part in self._parts]
        try:
            results = compute(self._sums, values)
        except (
            Exception
        ) as error:  # boundary: raised in the thread of the scheduler; the script must not catch it
            self.error = error
            self._ended = True
            raise _Ended from None
        for part, result in zip(self._parts, results, strict=True):
            part.joined.append(result)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all slices. Differentiable."""
        total: torch.Tensor = self.join(totals, values)
        return total

    def start(self, sums: Sums, parts: Sequence[Part]) -> None:
        """Start the thread, which waits for its first turn."""
        self._sums = sums
        self._parts = parts
        self._thread.start()

    def advance(self) -> None:
        """Run until the part joins the others or ends.

        Raises:
            BaseException: the error of the part.
        """
        self.is_waiting = False
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
        # All of these refer to the part: with cycles, tensors would be freed late, by the garbage
        # collector.
        self._parts = ()
        self.result = None
        del self._compute, self._turn

    def _run(self) -> None:
        self._resumed.acquire()
        if self._ended:
            return
        # Libraries below torch count threads for each thread; another number can have other bits.
        torch.set_num_threads(self._processors)
        try:
            self.result = self._compute(self)
        except _Ended:
            pass
        except BaseException as error:  # boundary: raised in the thread of the scheduler
            self.error = error
        self._paused.release()


class AllHere:
    """Sums over parts that are all slices of a batch."""

    def sum(self, parts: Parts) -> torch.Tensor:
        """Return the sum of the parts.

        Raises:
            OutOfStep: the parts have different shapes or dtypes.
        """
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise OutOfStep("parts of the rows exchange values of different shapes or dtypes")
        total = parts[0].detach().clone()
        for part in parts[1:]:
            total += part.detach()
        return total


def run_in_lockstep(parts: Sequence[Part], sums: Sums) -> list[Any]:
    """Run the parts to their ends, and return their results. No thread is left, whatever happens.

    Args:
        parts: the slices that are computed here.
        sums: sums over all slices.

    Raises:
        OutOfStep: the parts joined at different places.
        BaseException: the error of the first part that failed.
    """
    try:
        for part in parts:
            part.start(sums, parts)
        while True:
            for part in parts:
                part.advance()
            waiting = sum(part.is_waiting for part in parts)
            if not waiting:
                return [part.result for part in parts]
            if waiting < len(parts):
                raise OutOfStep("parts of the rows exchange different numbers of values")
    finally:
        for part in parts:
            part.end()
