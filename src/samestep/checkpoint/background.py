"""Writing checkpoints beside training: one at a time, and no failure gets lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import SamestepError

_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there.

    Attributes:
        seconds: from the moment whose state it holds until it was on the disk.
    """

    step: int
    path: Path
    is_best: bool
    seconds: float


class Saver:
    """Writes checkpoints in a thread while the one that trains goes on.

    What is saved is copied before `save` returns. One checkpoint is being written at most; the next one waits for it,
    so that there is one copy of the state at a time. What fails in the thread is raised by the next call here. Leave
    the block, or call `wait`, before anybody is told that all is saved.

    Args:
        on_saved: called in the thread that trains, once a checkpoint is there.
        tick: called there every second while it waits.
    """

    def __init__(
        self, folder: CheckpointFolder, on_saved: Callable[[Saved], None], tick: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._on_saved, self._tick = folder, on_saved, tick
        self._writing: _Writing | None = None

    def save(self, step: int, make: Callable[[], Mapping[str, bytes]], *, is_best: bool = False) -> None:
        """Write what `make` returns as the checkpoint of `step`, after the one that is being written.

        Raises:
            CheckpointWriteError: the one before could not be written.
        """
        began = time.monotonic()
        self.wait()
        self._writing = writing = _Writing(self._folder, step, make(), is_best, began)
        try:
            writing.start()
        except BaseException:
            # A signal's handler has raised (torch's does when a loader's worker dies); the thread may be on its way.
            if not writing.runs.wait(_TICK_SECONDS):
                self._writing = None
            raise

    def look(self) -> None:
        """Tell of the checkpoint that is being written if it is there by now.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._writing is not None and not self._writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written, and tell of it.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._writing is None:
            return
        while self._writing.is_alive():
            self._writing.join(_TICK_SECONDS)
            self._tick()
        done, self._writing = self._writing, None
        if done.failure is not None:
            raise done.failure
        assert done.saved is not None
        self._on_saved(done.saved)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except SamestepError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what came first is what is raised


class _Writing(threading.Thread):
    """One checkpoint on its way to the disk."""

    def __init__(
        self, folder: CheckpointFolder, step: int, files: Mapping[str, bytes], is_best: bool, began: float
    ) -> None:
        super().__init__(name="samestep-checkpoint")
        self._folder, self._files, self._began = folder, files, began
        self._step, self._is_best = step, is_best
        self.saved: Saved | None = None
        self.failure: BaseException | None = None
        self.runs = threading.Event()

    def run(self) -> None:
        self.runs.set()
        try:
            path = self._folder.write(self._step, self._files, is_best=self._is_best)
        except BaseException as error:  # boundary: raised in the thread that trains
            self.failure = error
        else:
            self.saved = Saved(self._step, path, self._is_best, time.monotonic() - self._began)
        self._files = {}  # a copy of the whole state
