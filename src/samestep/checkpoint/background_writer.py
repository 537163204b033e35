"""Background writing of checkpoints, from copies of tensors in host memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from samestep.checkpoint.durable_files import Contents
from samestep.checkpoint.store import CheckpointFolder
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.disk_operations import disk_operations
from samestep.errors import SamestepError

_PIECE_BYTES = 1 << 20
_HEADER_ALIGNMENT = 8
_HEARTBEAT_SECONDS = 1.0


class HostBuffers:
    """Host memory for copies of tensors, reused by the copies of the next save.

    The memory is page-locked for tensors on an accelerator. Their copies are queued in the current
    stream of their device: the host does not wait, and later work of the stream, such as the next
    update, follows the copies.
    """

    def __init__(self) -> None:
        self._free: dict[object, list[torch.Tensor]] = {}
        self._used: dict[object, list[torch.Tensor]] = {}
        self._events: dict[torch.device, Any] = {}  # the last copy of each accelerator

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy in host memory, complete after `wait`."""
        device = tensor.device
        is_queued = is_accelerator(tensor.device)
        key = tensor.shape, tensor.dtype, is_queued
        if free := self._free.get(key):
            buffer = free.pop()
        else:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_queued)
        self._used.setdefault(key, []).append(buffer)
        buffer.copy_(tensor.detach(), non_blocking=is_queued)
        if is_queued:
            # The last copy is enough: copies of a stream end in order.
            self._events[device] = accelerator_module().current_stream(device).record_event()
        return buffer

    def wait(self) -> None:
        """Wait for the copies; any thread may call this."""
        for event in self._events.values():
            event.synchronize()

    def reuse(self) -> None:
        """Reuse the memory of the present copies, which nothing reads any more."""
        # Buffers that no tensor of the last save needed are freed.
        self._free = self._used
        self._used = {}


def distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors without aliases, and the name of the original for each alias."""
    first: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        # Empty tensors share an address.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


class TensorFile:
    """File with the bytes of `safetensors.torch.save`, as an iterable of its pieces.

    Large tensors are not copied; small ones are joined, so that a file has few pieces.

    Args:
        tensors: contiguous tensors in host memory by name, complete before the first iteration.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        names, header = self._layout
        joined = bytearray(header)
        for name in names:
            data = self._tensors[name].reshape(-1).view(torch.uint8).numpy().data
            if len(joined) + len(data) > _PIECE_BYTES:
                yield bytes(joined)
                joined = bytearray()
            if len(data) > _PIECE_BYTES:
                yield data
            else:
                joined += data
        yield bytes(joined)

    @cached_property
    def _layout(self) -> tuple[list[str], bytes]:
        """Names in the order of their data, and header."""
        # The library decides order and types; without elements it has nothing to copy.
        empty = {
            name: torch.empty((0, *tensor.shape), dtype=tensor.dtype)
            for name, tensor in self._tensors.items()
        }
        template = save(empty)
        size = int.from_bytes(template[:_HEADER_ALIGNMENT], "little")
        entries = json.loads(template[_HEADER_ALIGNMENT:][:size])
        end = 0
        for name, entry in entries.items():
            begin = end
            end = end + self._tensors[name].nbytes
            entry |= {"shape": entry["shape"][1:], "data_offsets": [begin, end]}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        # Spaces, with which the library pads the header too.
        text = text.ljust(-(-len(text) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT)
        return list(entries), len(text).to_bytes(_HEADER_ALIGNMENT, "little") + text


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on the disk."""

    step: int
    path: Path
    is_best: bool
    seconds: float  # time from the saved state to the complete checkpoint


class AsyncCheckpointWriter:
    """Writer of checkpoints in a background thread.

    `save` returns once the state is copied, or the copies are queued on an accelerator. The next
    `save` waits for the previous one. If a checkpoint cannot be written, the next call raises
    `CheckpointWriteError`. Leave the block, or call `wait`, before relying on the last checkpoint.

    Args:
        on_saved: called in the training thread for each complete checkpoint.
        heartbeat: called in the training thread every second during a wait, as long as the disk
            answers.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        on_saved: Callable[[SavedCheckpoint], None],
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._on_saved = on_saved
        self._heartbeat = heartbeat
        self._thread: _WriterThread | None = None
        self._buffers = HostBuffers()

    def save(
        self,
        step: int,
        snapshot: Callable[[HostBuffers], Mapping[str, Contents]],
        *,
        is_best: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Wait for the previous checkpoint, and start to write the files of `snapshot`."""
        start = time.monotonic()
        self.wait()  # one copy of the state at a time: two could exceed the host's memory
        self._buffers.reuse()
        files = snapshot(self._buffers)

        def write() -> SavedCheckpoint:
            self._buffers.wait()
            path = self._folder.write(step, files, is_best=is_best, epoch=epoch)
            return SavedCheckpoint(step, path, is_best, time.monotonic() - start)

        self._thread = thread = _WriterThread(write)
        try:
            thread.start()
        except BaseException:
            # A signal handler may raise here (torch's, when a loader worker dies) although the
            # thread is starting.
            if not thread.is_running.wait(_HEARTBEAT_SECONDS):
                self._thread = None
            raise

    def poll(self) -> None:
        """Report the current checkpoint if complete."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the current checkpoint and report the result."""
        if self._thread is None:
            return
        while self._thread.is_alive():
            before = disk_operations.pending(self._thread.ident)
            self._thread.join(_HEARTBEAT_SECONDS)
            now = disk_operations.pending(self._thread.ident)
            if now is None or now != before:  # otherwise one operation of the disk has no end
                self._heartbeat()
        thread = self._thread
        self._thread = None
        if thread.error is not None:
            raise thread.error
        assert thread.saved is not None
        self._on_saved(thread.saved)

    def __enter__(self) -> AsyncCheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        try:
            self.wait()
        except SamestepError as write_error:
            if error is None:
                raise
            error.add_note(str(write_error))  # the first error is raised


class _WriterThread(threading.Thread):
    def __init__(self, write: Callable[[], SavedCheckpoint]) -> None:
        # No daemon: the end of the interpreter waits for a checkpoint that is being written.
        super().__init__(name="samestep-checkpoint")
        self._write = write
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None
        self.is_running = threading.Event()

    def run(self) -> None:
        self.is_running.set()
        try:
            self.saved = self._write()
        except BaseException as error:  # boundary: raised in the training thread
            self.error = error
        del self._write  # with the files
