"""Computation of several slices of a divided call in one process, in lock step.

Each slice runs in a thread of its own, but only one thread runs at a time: a slice runs until it
joins the others or ends, then the next slice runs. Tensors of all slices belong to one autograd
graph.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.reduce.fast import Sums
from samestep.view.region import Joined, Parts


class ThreadModes:
    """Modes of the thread that creates it: gradients, autocast, device, hooks, stream.

    Args:
        device: device of the call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]
        self._caches = torch.is_autocast_cache_enabled()
        # Private, in torch 2.11 and 2.13.
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._functions = torch.overrides._get_current_function_mode_stack()
        self._stream = None
        if is_accelerator(device):
            self._stream = accelerator_module().current_stream(device)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the modes in another thread during the block."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(accelerator_module().device(self._device))
                stack.enter_context(accelerator_module().stream(self._stream))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            # After inference mode, which switches gradients off.
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches))
            if self._hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            for mode in self._functions:
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
            yield


class SliceThread(threading.Thread):
    """Thread of one slice after the other."""

    def __init__(self) -> None:
        # Not a thread of a pool of Python: these end before functions of atexit, which may call the
        # model again.
        super().__init__(name="slice of a call", daemon=True)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy = threading.Lock()  # semaphores take several times as long
        self.start()

    def begin(self, task: Callable[[], None]) -> None:
        """Begin a task; the one before has ended."""
        self._busy.acquire()
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait for the end of the task."""
        with self._busy:
            return

    def end(self) -> None:
        """End the thread, which has no task."""
        self._tasks.put(None)
        self.join()

    def run(self) -> None:
        """Run tasks until the thread ends."""
        while task := self._tasks.get():
            task()
            del task  # it refers to tensors
            self._busy.release()


class SliceThreads:
    """Threads for the slices of calls, which wait between calls.

    cuDNN keeps its plans by thread: with new threads, every convolution of every call took 2 ms to
    select its kernel.
    """

    def __init__(self) -> None:
        self._idle: list[SliceThread] = []

    def take(self) -> SliceThread:
        """Return an idle thread, the one that has waited longest."""
        # First in, first out: a slice gets the thread with the plans of the last call.
        while self._idle:
            thread = self._idle.pop(0)
            if thread.is_alive():  # a fork of the process has no threads
                return thread
        return SliceThread()

    def give_back(self, thread: SliceThread) -> None:
        """Keep a thread whose task has ended for the next call."""
        self._idle.append(thread)

    def end(self) -> None:
        """End the threads."""
        for thread in self._idle:
            if thread.is_alive():
                thread.end()
        self._idle.clear()


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
        """Prepare a slice; `run_in_lockstep` gives it a thread.

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
        self._resumed = threading.Lock()  # the other thread releases these
        self._paused = threading.Lock()
        self._resumed.acquire()
        self._paused.acquire()
        self._ended = False
        self.sums: Sums | None = None
        self.parts: Sequence[Part] = ()
        self._processors = torch.get_num_threads()
        # With context variables of the script, which a new thread would not have.
        self._run_in_context = partial(copy_context().run, self._run)
        self._thread: SliceThread | None = None

    def begin(self, thread: SliceThread) -> None:
        """Begin in a thread, which waits for its first turn."""
        self._thread = thread
        thread.begin(self._run_in_context)

    def join(self, compute: Joined, value: Any) -> Any:
        """Wait for all parts; return the result for this one. The first one computes it."""
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
        # The first part is also the first that runs again, after all have arrived.
        if self is self.parts[0]:
            assert self.sums is not None
            values = [part.value for part in self.parts]
            try:
                results = compute(self.sums, values)
            except Exception as error:
                # boundary: raised in the thread of the scheduler; the script must not catch it
                self.error = error
                self._ended = True
                raise _Ended from None
            for part, result in zip(self.parts, results, strict=True):
                part.joined.append(result)
        return self.joined[-1]

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

    def end(self, threads: SliceThreads) -> None:
        """End the slice, and give its thread back."""
        self._ended = True
        self._resumed.release()
        if self._thread is not None:
            self._thread.wait()
            threads.give_back(self._thread)
        # All of these refer to the part: with cycles, tensors would be freed late, by the garbage
        # collector.
        self.parts = ()
        self.result = None
        del self._compute, self._turn, self._run_in_context

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


def run_in_lockstep(
    parts: Sequence[Part], sums: Sums, threads: SliceThreads | None = None
) -> list[Any]:
    """Run the parts to their ends, and return their results. No part is left, whatever happens.

    Args:
        parts: the slices that are computed here.
        sums: sums over all slices.
        threads: threads that are kept for the next call; without them, no thread is left.

    Raises:
        OutOfStep: the parts joined at different places.
        BaseException: the error of the first part that failed.
    """
    kept = threads or SliceThreads()
    try:
        for part in parts:
            part.sums = sums
            part.parts = parts
            part.begin(kept.take())
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
            part.end(kept)
        if threads is None:
            kept.end()


def nodes_of(values: Any) -> set[Any]:
    """Return the nodes of the tensors among some values."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def order_nodes(parts: Sequence[Part], outputs: Sequence[Any], inputs: Iterable[Any]) -> None:
    """Give the nodes of slices new numbers, above those of this thread.

    Autograd runs the newest node first, by numbers that each thread counts for itself. The bits of
    the gradient of a tensor with three uses depend on that order, so nodes receive the numbers that
    one thread would give them: those before the first join, slice by slice, then those of the join,
    and so on. The order within a slice is then that of a slice alone.

    Private: `_sequence_nr`, `_set_sequence_nr` and `_get_sequence_nr` of torch 2.11 and 2.13.

    Args:
        parts: the slices, which have run to their ends.
        outputs: results of each slice.
        inputs: nodes where the graphs of all slices begin.
    """
    joins = len(parts[0].marks)
    joined = [nodes_of([part.joined[number] for part in parts]) for number in range(joins)]
    stop = set(inputs).union(*joined)
    keyed: list[tuple[tuple[int, ...], Any]] = []
    for number, nodes in enumerate(joined):
        keyed += [((number, 1, 0, node._sequence_nr()), node) for node in nodes]
    for position, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        for node in _walk(nodes_of([part.roots, output]), stop):
            number = node._sequence_nr()
            keyed.append(((bisect_right(part.marks, number), 0, position, number), node))
    keyed.sort(key=lambda pair: pair[0])
    start: int = torch._C._autograd._get_sequence_nr()
    for number, (_, node) in enumerate(keyed, start):
        node._set_sequence_nr(number)
    with torch.enable_grad():  # later nodes of this thread have numbers above these
        leaf = torch.zeros((), requires_grad=True)
        for _ in keyed:
            leaf.neg()


def _walk(roots: set[Any], stop: set[Any]) -> list[Any]:
    """Return the nodes below some nodes, without those of `stop` and the nodes of leaves."""
    seen = set(stop)
    collected = []
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        collected.append(node)
        todo.extend(below for below, _ in node.next_functions)
    return collected
