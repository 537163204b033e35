"""Threads that stay for the next piece of work.

Libraries keep things for each thread, oneDNN its prepared kernels for one: what a new thread computes first takes
milliseconds longer, in every layer of a model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
_Queue = SimpleQueue[Work | None]
_PATIENCE = 5.0


class Threads:
    """Numbered threads, each started when it is first needed; all end with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[tuple[threading.Thread, _Queue]] = []
        weakref.finalize(self, _end, self._running)

    def submit(self, number: int, work: Work) -> None:
        """Have thread `number` do `work`, which raises nothing, after what it was given before."""
        while len(self._running) <= number:
            queue: _Queue = SimpleQueue()
            # Daemons: a rank that fails must be able to leave, whatever a model still waits for.
            name = f"{self._name}-{len(self._running)}"
            thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
            thread.start()
            self._running.append((thread, queue))
        self._running[number][1].put(work)

    def end(self) -> None:
        """End all threads when their work is done; more work starts them anew."""
        _end(self._running)


def _serve(queue: _Queue) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        work()
        del work  # it holds a model's activations, and the next one may be long in coming


def _end(running: list[tuple[threading.Thread, _Queue]]) -> None:
    for _, queue in running:
        queue.put(None)
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)
    running.clear()
