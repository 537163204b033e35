"""CUDA graphs simulated on CPU tensors: a recording of torch's operations, which a replay computes in the same memory.

As with a CUDA graph, Python code does not run in a replay, and tensors keep their memory. Random numbers of tensors
come from a generator of the device, apart from that of the host. Waits of the host for a value raise an error in a
recording, after which the generator is unusable, and in the debug mode of torch for waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from samestep.distributed import devices

_ATEN = torch.ops.aten
_WAITS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN._unique2.default,
    _ATEN.equal.default,
}


class _Stream:
    """Queue of work, which is done at once."""

    def wait_stream(self, stream: "_Stream") -> None:
        pass


class _Graph:
    """Recorded operations with arguments and results."""

    def __init__(self, accelerator: "GraphAccelerator") -> None:
        self._accelerator, self.calls = accelerator, list[tuple[bool, Any, Any, Any, Any]]()

    def replay(self) -> None:
        accelerator = self._accelerator
        accelerator.replays += 1
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            for needs_gradient, function, args, kwargs, results in self.calls:
                with torch.set_grad_enabled(needs_gradient):  # some CPU functions keep values for a backward
                    new = accelerator.compute(function, args, kwargs)
                for old, value in zip(tree_leaves(results), tree_leaves(new), strict=True):
                    if isinstance(old, torch.Tensor) and _memory(old) != _memory(value):  # no view of an argument
                        old.copy_(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GraphAccelerator(TorchDispatchMode):
    """Functions of `torch.cuda` for graphs, random numbers and waits, for CPU tensors.

    Attributes:
        graphs: number of recordings.
        replays: number of replays.
        free: bytes of memory that are free; the stream of the recordings needs 1 MiB more at each call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graphs = self.replays = self._reserved = 0
        self.free = 2**30
        self._recording: _Graph | None = None
        self._stream, self._mode, self._is_usable = _Stream(), 0, True
        self._generator = torch.Generator()
        self._seed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WAITS and self._mode:
            raise RuntimeError("called a synchronizing CUDA operation")
        if func in _WAITS and self._recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        result = self.compute(func, args, kwargs)
        if self._recording is not None:
            self._recording.calls.append((torch.is_grad_enabled(), func, args, kwargs, result))
        return result

    def compute(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation, with random numbers of the device."""
        if torch.Tag.nondeterministic_seeded not in function.tags or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        if not self._is_usable and self._recording is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        host = torch.get_rng_state()
        torch.set_rng_state(self._generator.get_state())
        try:
            return function(*args, **kwargs)
        finally:
            self._generator.set_state(torch.get_rng_state())
            torch.set_rng_state(host)

    @property
    def is_recording(self) -> bool:
        """Whether operations are recorded now."""
        return self._recording is not None

    def CUDAGraph(self) -> _Graph:  # noqa: N802  # torch's name
        return _Graph(self)

    @contextmanager
    def graph(self, graph: _Graph, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        self.graphs += 1
        self._recording, self._is_usable = graph, False
        try:
            yield
            self._is_usable = True
        finally:
            self._recording = None

    def manual_seed(self, seed: int) -> None:
        if self._recording is None:
            self._seed = seed
            self._generator.manual_seed(seed)
        elif seed != self._seed:
            raise RuntimeError("set_current_seed can be called during stream capture only if new seed is the same")

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self._generator.set_state(state)

    def is_available(self) -> bool:
        return False  # torch's optimizers (2.14) query the capture of a real accelerator otherwise

    def get_device_name(self, device: torch.device) -> str:
        return "simulated accelerator"

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802  # torch's name
        return _Stream()

    def current_stream(self, device: torch.device) -> _Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def empty_cache(self) -> None:
        pass

    def memory_reserved(self, device: torch.device) -> int:
        self._reserved += 2**20
        return self._reserved

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2**31

    def get_sync_debug_mode(self) -> int:
        return self._mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self._mode = {"default": 0, "error": 2}.get(mode, mode)  # type: ignore[arg-type]


@contextmanager
def simulated_graphs() -> Iterator[GraphAccelerator]:
    """Use the CPU as an accelerator with graphs inside the block, for one rank."""
    accelerator = GraphAccelerator()
    devices._graph_stream.cache_clear()
    with pytest.MonkeyPatch.context() as patch, accelerator:
        patch.setattr(devices, "ACCELERATOR", "cpu")
        patch.setattr(torch, "get_device_module", lambda kind=None: accelerator)
        yield accelerator
    devices._graph_stream.cache_clear()
