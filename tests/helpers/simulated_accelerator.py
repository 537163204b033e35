"""An accelerator simulated on CPU tensors: streams whose order is checked, and counts of streams, waits and copies.

Work runs at once, so values are right whatever the order. torch's CUDA sanitizer (`torch.cuda._sanitizer`), which is
plain Python, receives each operation with its stream, and finds accesses to one tensor without an order between them.
Copies to page-locked memory are the exception: the host reads them once it has waited for a later event.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.data import batch
from samestep.distributed import devices


class DeviceTensor(torch.Tensor):
    """Tensor in the memory of the accelerator."""

    streams: tuple["Stream", ...] = ()  # streams that use the memory, other than the one that allocated it

    def record_stream(self, stream: "Stream") -> None:
        self.streams = (*self.streams, stream)


class Event:
    """Point in the work of a stream."""

    def __init__(self, accelerator: "SimulatedAccelerator", number: int) -> None:
        self._accelerator, self.number = accelerator, number

    def synchronize(self) -> None:
        self._accelerator.counts["synchronize"] += 1
        self._accelerator.finish_copies(self.number)


class TimedEvent(Event):
    """Event with a time."""

    def record(self, stream: "Stream") -> None:
        self.number, self._seconds = self._accelerator.record(stream), time.perf_counter()

    def elapsed_time(self, end: "TimedEvent") -> float:
        """Return the milliseconds until a later event."""
        return 1e3 * (end._seconds - self._seconds)


class Stream:
    """Queue of work; `wait_event` orders it after the work of another stream."""

    def __init__(self, accelerator: "SimulatedAccelerator", number: int) -> None:
        self._accelerator, self.number = accelerator, number

    def record_event(self) -> Event:
        return Event(self._accelerator, self._accelerator.record(self))

    def wait_event(self, event: Event) -> None:
        self._accelerator.counts["waits"] += 1
        self._accelerator.handler._handle_event_wait(event.number, self.number)

    def synchronize(self) -> None:
        self._accelerator.counts["synchronize"] += 1
        self._accelerator.races += self._accelerator.handler._handle_stream_synchronization(self.number) or []


class SimulatedAccelerator:
    """Functions of `torch.cuda` that the source calls, for CPU tensors.

    Attributes:
        counts: streams made, waits of one stream for another, waits of the host (`synchronize`), copies from the host,
            page-locked allocations, queued copies to the host, and operations by stream.
        races: errors of the sanitizer.
    """

    def __init__(self) -> None:
        self.handler, self.counts, self.races = EventHandler(), Counter[str](), list[Any]()
        self._default = self._current = Stream(self, 0)
        self._streams = self._events = 0
        self._memory = dict[int, torch.Tensor]()  # tensors on the device, by address; kept, so no address is reused
        self._copies = list[tuple[int, torch.Tensor, torch.Tensor]]()  # last event before, target and values

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802  # torch's name
        self._streams += 1
        self.counts["streams"] += 1
        self.handler._handle_stream_creation(self._streams)
        return Stream(self, self._streams)

    def Event(self, enable_timing: bool) -> TimedEvent:  # noqa: N802  # torch's name
        return TimedEvent(self, 0)

    def is_available(self) -> bool:
        """Return that there is no device, so that torch's optimizers ask for no state of its graphs."""
        return False

    def copy(self, tensor: torch.Tensor) -> DeviceTensor:
        """Copy a tensor of the host to the device, in the current stream."""
        self.counts["copies"] += 1
        copied = tensor.clone()
        self._memory[copied.data_ptr()] = copied
        self._launch("copy", set(), {copied.data_ptr()})
        return copied.as_subclass(DeviceTensor)

    def queue_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the present values of a tensor to the host, once a later event is reached."""
        self.counts["copies to the host"] += 1
        self._copies.append((self._events, target, source.clone()))

    def finish_copies(self, event: int) -> None:
        """Complete the copies that were queued before an event."""
        for before, target, values in self._copies:
            if before < event:
                target.copy_(values)
        self._copies = [copy for copy in self._copies if copy[0] >= event]

    def compute(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Check an operation of the current stream. Results of tensors on the device are on the device too."""
        read = {tensor.data_ptr() for tensor in inputs} & self._memory.keys()
        new = [tensor for tensor in outputs if tensor.data_ptr() not in self._memory]
        if read and (new or not outputs):  # otherwise a view
            self._memory |= {tensor.data_ptr(): tensor for tensor in new}
            self._launch(name, read, {tensor.data_ptr() for tensor in new})

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: Stream) -> int:
        """Record an event in a stream, and return the number of the event."""
        self._events += 1
        self.handler._handle_event_creation(self._events)
        self.handler._handle_event_record(self._events, stream.number)
        return self._events

    def _launch(self, name: str, read: set[int], written: set[int]) -> None:
        self.counts[f"operations of stream {self._current.number}"] += 1
        aliases: dict[int, list[str]] = {pointer: [] for pointer in read | written}
        self.races += self.handler._handle_kernel_launch(
            self._current.number, read - written, written, set(), name, aliases
        )


class _Launches(TorchDispatchMode):
    """Report each operation to the accelerator."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self._accelerator.counts["page-locked"] += 1
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            self._accelerator.queue_copy(*args[:2])
            return args[0]
        result = func(*args, **kwargs)
        self._accelerator.compute(str(func), _tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@contextmanager
def simulated_accelerator() -> Iterator[SimulatedAccelerator]:
    """Use CPU tensors as tensors of an accelerator inside the block."""
    accelerator = SimulatedAccelerator()
    with pytest.MonkeyPatch.context() as patch, _Launches(accelerator):
        patch.setattr(devices, "ACCELERATOR", "cpu")
        patch.setattr(torch, "get_device_module", lambda kind=None: accelerator)
        # `to` copies nothing from the CPU to the CPU.
        patch.setattr(batch, "_to", lambda value, device: accelerator.copy(value))
        yield accelerator
