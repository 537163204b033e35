"""Checkpoints for loops of one's own: written whole or not at all, verified, resumed on any number of ranks."""

from __future__ import annotations

from pathlib import Path

from samestep.checkpoint.state import Progress, Training, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.data.loader import Loader
from samestep.engine.step import Engine


class Checkpoints:
    """The checkpoints of one loop.

        checkpoints = samestep.Checkpoints("checkpoints", engine, batches)
        checkpoints.resume()
        for batch in batches:
            result = engine.step(batch)
            if result.stop or result.step % 100 == 0:
                checkpoints.save()

    Args:
        folder: where they go, one folder a step.
        batches: the training data; its cursor is the loop's position.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: str | Path, engine: Engine, batches: Loader, *, keep: int = 2) -> None:
        self._folder, self._engine, self._batches = CheckpointFolder(Path(folder), keep), engine, batches

    def save(self) -> None:
        """Write model, optimizer, schedule, scaler and position; every rank calls it, rank 0 writes."""
        engine = self._engine
        engine.check()  # what is saved as good is what all ranks hold, where they are checked
        if engine.world.is_main:
            progress = Progress(step=engine.steps, cursor=self._batches.cursor)
            self._folder.write(engine.steps, pack(self._training, progress), is_best=False)

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
        progress = load(self._folder.find("last"), self._training)
        self._engine.steps, self._batches.cursor = progress.step, progress.cursor
        return True

    @property
    def _training(self) -> Training:
        engine = self._engine
        return Training(engine.model, engine.optimizer, engine.scheduler, engine.scaler)
