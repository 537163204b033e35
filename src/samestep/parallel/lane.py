"""A lane beside the computation, in which communications run one after another.

A reduction in tree order takes several messages that depend on each other, and every rank must issue them in
the same order. On a CPU one thread does that while backward computes; on a GPU one stream, without a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from samestep.errors import PeerLostError


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
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestep-lane")

    def submit(self, communicate: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        """Start `communicate` when all that came before it is done; its value comes through the future."""
        if self._device.type == "cuda":
            return self._on_stream(communicate)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._thread.submit(self._fulfil, future, communicate)
        return future

    def raise_failure(self) -> None:
        """Raise what went wrong in the lane, if anything did."""
        if self.failure is not None:
            raise self.failure

    def _fulfil(self, future: torch.futures.Future[torch.Tensor], communicate: Callable[[], torch.Tensor]) -> None:
        try:
            future.set_result(communicate())
        except PeerLostError as error:
            self.failure = self.failure or error
            future.set_exception(error)  # type: ignore[arg-type]  # torch's own signature is wrong
        except Exception as error:  # boundary: the thread has no caller; who waits for the future gets it
            future.set_exception(error)  # type: ignore[arg-type]  # torch's own signature is wrong

    def _on_stream(self, communicate: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # A future remembers the stream it was fulfilled on; who waits for it waits for that stream.
            future.set_result(communicate())
        return future
