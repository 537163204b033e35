"""What torch keeps for each thread, so that work handed to another thread computes what it would have here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context

import torch


class ThreadState:
    """Gradient mode, autocast, default device, stream and context variables of the thread that makes it."""

    def __init__(self, device: torch.device) -> None:
        self._context = copy_context()
        self._grad_enabled = torch.is_grad_enabled()
        self._default_device = torch.get_default_device()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type}
        ]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(self, task: Callable[[], None]) -> None:
        """Call `task` in the current thread, which must be a new one, as if the first thread did."""
        self._context.copy().run(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            # Else backward on a GPU runs in one thread that all share, where waiting for each other is a deadlock.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for kind, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            # The cache is one for all threads, and whoever leaves autocast first empties it: what is cast anew, and so
            # where gradients are rounded, would depend on how many threads there are.
            torch.set_autocast_cache_enabled(False)
            task()
