"""Modes of torch that belong to threads, for threads that compute a part of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from samestep.distributed.devices import accelerator_module, is_accelerator


class ThreadModes:
    """Modes of the thread that creates it: gradients, autocast, default device, hooks of saved tensors, stream.

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
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches))
            if self._hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            for mode in self._functions:
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
            yield
