"""Persistent worker threads with the caller's thread state, and tasks in lockstep.

Threads persist because libraries keep state per thread, such as oneDNN's prepared kernels: a new thread needs
milliseconds more in every layer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.rng import IsolatedGenerators, preserved_generators

Result = TypeVar("Result")
_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_JOIN_SECONDS = 5.0


class Threads:
    """Numbered threads, each started at its first use; all end with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[tuple[threading.Thread, _Queue]] = []
        weakref.finalize(self, _end, self._running)

    def submit(self, number: int, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work` in thread `number`, and return the future result."""
        while len(self._running) <= number:
            queue: _Queue = SimpleQueue()
            # Daemon threads: a failed rank must be able to exit while a model still waits.
            name = f"{self._name}-{len(self._running)}"
            thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
            thread.start()
            self._running.append((thread, queue))
        future: Future[Result] = Future()
        self._running[number][1].put((future, work))
        return future

    def end(self) -> None:
        """End all threads after their queued work; `submit` starts new ones."""
        _end(self._running)


def _serve(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:  # boundary: raised by the future in the thread that waits for the result
            future.set_exception(error)
        del item, future, work  # hold a model's activations until the next item otherwise


def _end(running: list[tuple[threading.Thread, _Queue]]) -> None:
    for _, queue in running:
        queue.put(None)
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
    running.clear()


class ThreadState:
    """Gradient mode, autocast, default device, stream and context variables of the constructing thread."""

    def __init__(self, device: torch.device) -> None:
        self._context = copy_context()
        self._grad_enabled = torch.is_grad_enabled()
        self._default_device = torch.get_default_device()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}
        ]
        self._stream = accelerator_module().current_stream(device) if is_accelerator(device) else None

    def run(self, task: Callable[[], Result]) -> Result:
        """Call `task` in the current thread, another one, with the stored state."""
        return self._context.copy().run(self._run, task)

    def _run(self, task: Callable[[], Result]) -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            # With multithreading, all backwards on a GPU share one thread, where waiting for each other is a deadlock.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._stream is not None:
                stack.enter_context(accelerator_module().device(self._stream.device))
                stack.enter_context(accelerator_module().stream(self._stream))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for kind, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            # All threads share one cache, cleared by the first thread that leaves autocast. With the cache, the number
            # of threads would decide which tensors are cast again, and so the rounding of gradients.
            torch.set_autocast_cache_enabled(False)
            return task()


Task = Callable[["Track"], None]


class _Cancelled(BaseException):
    """Ends a task after a failure elsewhere in the lockstep; not an `Exception`, so models do not catch it."""


class Track:
    """One task of a lockstep."""

    def __init__(
        self, task: Task, state: ThreadState, device: torch.device, submit: Callable[[Callable[[], None]], Future[None]]
    ) -> None:
        self._task, self._state, self._submit = task, state, submit
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._future: Future[None] | None = None
        self._cancelled = False
        self._result: Any = None
        self.generators = IsolatedGenerators(device)
        self.message: Any = None  # contribution to the exchange at which the task waits; None after its end
        self.done = False

    def exchange(self, message: Any) -> Any:
        """Wait until all tasks have contributed, and return the result; called in the task's thread."""
        if not self._cancelled:  # a model may catch the cancellation and call this again
            self.message = message
            self._pause.release()
            self._turn.acquire()
        if self._cancelled:
            raise _Cancelled
        result, self._result = self._result, None
        return result

    def resume(self, result: Any) -> None:
        """Run the task to its next exchange or its end; followed by `wait`."""
        self.generators.begin_turn()
        self._result, self.message = result, None
        if self._future is None:
            self._future = self._submit(self._work)
        else:
            self._turn.release()

    def wait(self) -> None:
        """Wait until the running task has reached an exchange or ended."""
        self._pause.acquire()

    def raise_failure(self) -> None:
        """Raise the task's error, if the task has ended with one."""
        if self.done and self._future is not None:
            # No reference stays: graphs of the microbatch hold this track, and the error holds frames with the graphs.
            futures, self._future = [self._future], None
            futures.pop().result()

    def end(self) -> None:
        """Cancel the task, which waits at an exchange."""
        if self._future is not None and not self.done:
            self._cancelled = True
            self._turn.release()
            self._pause.acquire()
        self._future = None

    def _work(self) -> None:
        try:
            with suppress(_Cancelled):
                self._state.run(lambda: self._task(self))
        finally:
            self.message, self.done = None, True
            self._pause.release()


def run_in_lockstep(
    tasks: Sequence[Task], exchange: Callable[[list[Any]], Any], device: torch.device, threads: Threads
) -> None:
    """Run all `tasks` to their ends, each in its own thread; no task is left running in any case.

    The lockstep suspends a model in the middle of its forward or backward and continues with the next microbatch.
    Python can suspend arbitrary code only in a thread; nothing runs at the same time. Each task has its own random
    generators, as if the task ran alone. The process's generators are unchanged afterwards.

    Args:
        tasks: in the order of their turns; each is called with its track.
        exchange: called in this thread when every task waits or has ended, with the messages in order (None for ended
            tasks); all tasks receive its result. Called once more after the end of all tasks.
        device: device of the random generators and streams.
        threads: ended on failure, reused otherwise.

    Raises:
        BaseException: the error of the first failed task, or of `exchange`.
    """
    state = ThreadState(device)
    tracks = [Track(task, state, device, partial(threads.submit, number)) for number, task in enumerate(tasks)]
    running: Track | None = None
    result: Any = None
    try:
        with preserved_generators(device):
            while not all(track.done for track in tracks):
                for track in tracks:
                    if not track.done:
                        running = track
                        track.resume(result)
                        track.wait()
                        running = None
                        track.raise_failure()
                        track.generators.end_turn()
                result = exchange([track.message for track in tracks])
    except BaseException:
        if running is not None:
            running.wait()
        for track in tracks:
            track.end()
        threads.end()
        raise
