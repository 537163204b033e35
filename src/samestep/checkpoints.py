"""Checkpoints for loops of one's own: written whole or not at all, verified, resumed on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from samestep.checkpoint.background import Saver
from samestep.checkpoint.lock import FolderLock
from samestep.checkpoint.state import Progress, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.data.loader import Loader
from samestep.engine.step import Engine
from samestep.errors import InputError


class Checkpoints:
    """The checkpoints of one loop.

        checkpoints = samestep.Checkpoints("checkpoints", engine, batches)
        checkpoints.resume()
        for batch in batches:
            result = engine.step(batch)
            if result.stop or result.step % 100 == 0:
                checkpoints.save()

    With `background=True` a `with` block goes around the loop: `save` then copies the state and returns, and the end of
    the block waits for what is still being written.

    Args:
        folder: where they go, one folder a step. Until this is closed or gone, no other process can write there.
        batches: the training data; its cursor is the loop's position.
        keep: how many of the newest stay.
        background: write while training goes on.

    Raises:
        InputError: another process writes into the folder.
    """

    def __init__(
        self, folder: str | Path, engine: Engine, batches: Loader, *, keep: int = 2, background: bool = False
    ) -> None:
        self._folder, self._engine, self._batches = CheckpointFolder(Path(folder), keep), engine, batches
        self._background, self._is_entered = background, False
        self._lock = FolderLock(self._folder.path) if engine.world.is_main else None
        pulse = engine.world.pulse
        self._saver = Saver(self._folder, lambda saved: pulse.save(), pulse.tick)

    def save(self) -> None:
        """Save model, optimizer, schedule, scaler and position; every rank calls it, rank 0 writes.

        Raises:
            CheckpointWriteError: it cannot be written, or, in the background, the one before it could not.
        """
        if self._background and not self._is_entered:
            raise InputError(
                "checkpoints are saved in the background without a with block",
                rule="somebody waits for the last one, and hears if it cannot be written",
                do="with samestep.Checkpoints(..., background=True) as checkpoints: around the loop",
            )
        engine = self._engine
        engine.check()  # what is saved as good is what all ranks hold, where they are checked
        progress = Progress(step=engine.steps, cursor=self._batches.cursor)
        if engine.world.is_main:
            self._saver.save(engine.steps, lambda: pack(engine.training, progress))
            if not self._background:
                self._saver.wait()
        elif engine.pieces.is_divided:
            pack(engine.training, progress, keep=False)

    def resume(self) -> bool:
        """Go on from the newest checkpoint, whatever number of ranks wrote it; False if there is none.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        # Nobody looks while rank 0 tidies up what a run that was killed has left.
        if self._engine.world.is_main:
            self._folder.clean()
        self._engine.world.barrier()
        if not self._folder.steps():
            return False
        progress = load(self._folder.find("last"), self._engine.training)
        self._engine.steps, self._batches.cursor = progress.step, progress.cursor
        return True

    def __enter__(self) -> Checkpoints:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_entered = False
        try:
            self._saver.__exit__(kind, error, at)
        finally:
            if self._lock is not None:
                self._lock.release()
