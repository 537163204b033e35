"""Background writing of checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samestep.checkpoint.files import Contents
from samestep.checkpoint.snapshot import HostBuffers
from samestep.checkpoint.store import CheckpointFolder
from samestep.distributed.disk_operations import disk_operations
from samestep.errors import SamestepError

_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on the disk."""

    step: int
    path: Path
    is_best: bool
    seconds: float  # time from the saved state to the complete checkpoint


class AsyncCheckpointWriter:
    """Writer of checkpoints in a background thread.

    `save` returns once the state is copied, or the copies are queued on an accelerator. The next `save` waits for the
    previous one. If a checkpoint cannot be written, the next call raises `CheckpointWriteError`. Leave the block, or
    call `wait`, before relying on the last checkpoint.

    Args:
        on_saved: called in the training thread for each complete checkpoint.
        heartbeat: called in the training thread every second during a wait, as long as the disk answers.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        on_saved: Callable[[SavedCheckpoint], None],
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._on_saved, self._heartbeat = folder, on_saved, heartbeat
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
        """Wait for the previous checkpoint, and start writing the files of `snapshot` as the checkpoint of `step`."""
        start = time.monotonic()
        self.wait()
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
            # A signal handler may raise here (torch's, when a loader worker dies) although the thread is starting.
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
        thread, self._thread = self._thread, None
        if thread.error is not None:
            raise thread.error
        assert thread.saved is not None
        self._on_saved(thread.saved)

    def __enter__(self) -> AsyncCheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except SamestepError as write_error:
            if error is None:
                raise
            error.add_note(str(write_error))  # the first error is raised


class _WriterThread(threading.Thread):
    def __init__(self, write: Callable[[], SavedCheckpoint]) -> None:
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
