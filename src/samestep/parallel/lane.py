"""A lane beside the computation, in which communications run one after another.

A reduction in tree order takes several messages that depend on each other, and every rank must issue them in
the same order. On a CPU one thread does that while backward computes; on a GPU one stream, without a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch

from samestep.errors import PeerLostError

_Future = torch.futures.Future[torch.Tensor]


def done(value: torch.Tensor) -> _Future:
    """A future of what is there already."""
    future: _Future = torch.futures.Future()
    future.set_result(value)
    return future


class Lane:
    """Runs communications in the order in which they are given.

    Attributes:
        failure: the first error, so that whoever waits on a future can name the real cause.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failure: PeerLostError | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        else:
            self._queue: SimpleQueue[tuple[_Future, Callable[[], torch.Tensor]]] = SimpleQueue()
            # A daemon: a rank that fails must be able to leave while a message to it is still awaited.
            Thread(target=self._work, name="samestep-lane", daemon=True).start()

    def submit(self, communicate: Callable[[], torch.Tensor]) -> _Future:
        """Start `communicate` when all that came before it is done; its value comes through the future."""
        if self._device.type == "cuda":
            return self._on_stream(communicate)
        future: _Future = torch.futures.Future()
        self._queue.put((future, communicate))
        return future

    def raise_failure(self) -> None:
        """Raise what went wrong in the lane, if anything did."""
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        while True:
            future, communicate = self._queue.get()
            try:
                future.set_result(communicate())
            except Exception as error:  # boundary: the thread has no caller; who waits for the future gets it
                if isinstance(error, PeerLostError):
                    self.failure = self.failure or error
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own signature is wrong

    def _on_stream(self, communicate: Callable[[], torch.Tensor]) -> _Future:
        future: _Future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # A future remembers the stream it was fulfilled on; who waits for it waits for that stream.
            future.set_result(communicate())
        return future
