"""Checkpoint manager for custom training loops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from samestep.checkpoint.async_writer import AsyncCheckpointWriter
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.files import HeldFolder
from samestep.checkpoint.lock import FolderLock
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.data.loader import Loader
from samestep.distributed.logging import logger
from samestep.engine.engine import Engine
from samestep.errors import InputError
from samestep.launcher.job import process_state
from samestep.metrics.best import BestRule, Mode
from samestep.microbatches import require_position


class CheckpointManager:
    """Checkpoints of one training loop: complete or absent, verified, resumable on any number of ranks.

        checkpoints = samestep.CheckpointManager("checkpoints", engine, batches)
        checkpoints.resume()
        while batches.cursor.epoch < epochs:
            for batch in batches:
                if engine.step(batch).stop:
                    break
            checkpoints.save(engine.evaluate(test_batches))

    With `background=True`, use the manager as a context manager around the loop: `save` then returns once the state is
    copied, and the end of the block waits for the last checkpoint.

    Args:
        folder: folder with one subfolder per checkpoint. Locked against other processes until this object is closed
            or deleted.
        batches: training data; the cursor is the position of the loop.
        keep: number of newest checkpoints to keep, in addition to the best.
        best_by: key among the results of an evaluation that selects the best checkpoint: `loss` or a metric.
        best_mode: `min` or `max`; None for `min` of losses and `max` of the built-in metrics.
        background: write checkpoints in a background thread.

    Raises:
        InputError: another process writes to the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Engine,
        batches: Loader,
        *,
        keep: int = 2,
        best_by: str = "loss",
        best_mode: Mode | None = None,
        background: bool = False,
    ) -> None:
        self._rule = BestRule.of(best_by, best_mode)
        self._best: float | None = None
        self._folder, self._engine, self._batches = CheckpointFolder(Path(folder), keep), engine, batches
        self._background, self._is_entered = background, False
        self._lock = FolderLock(self._folder.path) if engine.world.is_main else None
        if engine.world.is_main:
            self._folder.hold(HeldFolder(self._folder.path))
        process_state.source_files.note_imports()
        status = engine.world.context.status
        self._writer = AsyncCheckpointWriter(self._folder, lambda saved: status.checkpoint_saved(), status.heartbeat)

    def save(self, values: Mapping[str, float] | None = None) -> bool:
        """Save model, optimizer, schedule, scaler and position. Call on every rank; rank 0 writes.

        Args:
            values: results of `engine.evaluate` for this state. The checkpoint becomes `best` if they are the best so
                far; a loss or a value that is not finite never is.

        Returns:
            Whether the checkpoint is the best.

        Raises:
            CheckpointWriteError: the checkpoint, or with `background=True` the previous one, could not be written.
        """
        if self._background and not self._is_entered:
            raise InputError(
                "checkpoints are saved in the background without a with block",
                expected="a block that waits for the last checkpoint and raises write errors",
                fix="with samestep.CheckpointManager(..., background=True) as checkpoints: around the loop",
                code="E_UNJOINED_WRITER",
            )
        engine = self._engine
        engine.check()  # ranks must agree on the saved state, if consistency checks are on
        is_best = values is not None and self._rule.is_best(values, self._best)
        if values is not None and is_best:
            self._best = values[self._rule.by]
        cursor = self._batches.cursor
        progress = Progress(step=engine.steps, cursor=cursor, best=self._best)
        if engine.world.is_main:
            epoch = cursor.epoch if engine.steps and not cursor.samples else None
            self._writer.save(engine.steps, lambda: pack(engine.training, progress), is_best=is_best, epoch=epoch)
            if not self._background:
                self._writer.wait()
        elif engine.local_parameters.is_divided:
            pack(engine.training, progress, keep=False)
        return is_best

    def resume(self, checkpoint: str = "last", *, accept_changes: bool = False) -> bool:
        """Resume from a checkpoint of any number of ranks; return False if none exists.

        Args:
            checkpoint: `last`, `best`, `epoch-N`, or the number of a step.
            accept_changes: continue although the script, or a module that it imports, has changed since the checkpoint.

        Raises:
            CheckpointError: the checkpoint does not exist, is damaged, or is of another model or optimizer.
            InputError: the code has changed, or differs between ranks.
        """
        # No rank reads while rank 0 removes the leftovers of a killed run.
        if self._engine.world.is_main:
            self._folder.clean()
        self._engine.world.barrier()
        if not self._folder.steps():
            return False
        path, sources = self._folder.find(checkpoint), process_state.source_files
        if self._engine.world.is_main:
            for name in sources.require(read_state(path).sources, accept_changes=accept_changes):
                logger.warning("continuing with changed code: %s", name)
        sources.check_ranks(self._engine.world)
        progress = load(path, self._engine.training)
        require_position(progress.cursor, self._batches.samples, self._batches.batch_size)
        self._engine.steps, self._batches.cursor, self._best = progress.step, progress.cursor, progress.best
        return True

    def __enter__(self) -> CheckpointManager:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_entered = False
        try:
            self._writer.__exit__(kind, error, at)
        finally:
            if self._lock is not None:
                self._lock.release()
