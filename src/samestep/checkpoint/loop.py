"""Checkpoints of a training loop, of a script or of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from samestep.checkpoint.background_writer import (
    AsyncCheckpointWriter,
    HostBuffers,
    SavedCheckpoint,
)
from samestep.checkpoint.checksum import Trained
from samestep.checkpoint.contents import Progress, SavedLoader, SavedState, Training
from samestep.checkpoint.durable_files import Contents
from samestep.checkpoint.manifest import file_names, manifest_digest
from samestep.checkpoint.resume_changes import require_same_names, setting_changes
from samestep.checkpoint.state import load_all, read_verified, snapshot
from samestep.checkpoint.store import STATE, CheckpointFolder
from samestep.cursor import require_position
from samestep.data.whole_batches import WholeBatches
from samestep.distributed.devices import machine
from samestep.distributed.world import all_gather
from samestep.errors import RankMismatchError


class LoopCheckpoints:
    """Checkpoints of the models and loaders of one loop, written by a background thread.

    Args:
        folder: folder of the checkpoints.
        loops: models with their optimizers, by name.
        loaders: training data by name; the cursor of the first is the position of the loop.
        objects: other objects with state, by name.
        on_saved: called in the training thread for each complete checkpoint.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        loops: Mapping[str, Trained],
        loaders: Mapping[str, WholeBatches],
        objects: Mapping[str, Any],
        on_saved: Callable[[SavedCheckpoint], None],
    ) -> None:
        self._folder = folder
        self._loops = loops
        self._loaders = loaders
        self._objects = objects
        self._best: float | None = None
        self._world = next(iter(loops.values())).world
        heartbeat = self._world.session.status.heartbeat
        self._writer = AsyncCheckpointWriter(folder, on_saved, heartbeat)

    @property
    def _step(self) -> int:
        return max(loop.steps for loop in self._loops.values())

    @property
    def _first_loader(self) -> WholeBatches:
        return next(iter(self._loaders.values()))

    def _progress(self, name: str) -> Progress:
        """Return the progress that the checkpoint of a model contains."""
        loaders = {
            key: SavedLoader(loader.cursor, loader.settings_of(loader.cursor.epoch), loader.probe)
            for key, loader in self._loaders.items()
        }
        return Progress(
            step=self._loops[name].steps,
            cursor=self._first_loader.cursor,
            best=self._best,
            loaders=loaders,
            machine=machine(self._world.device),
        )

    def _foreseen(self, epoch: int) -> Iterator[str]:
        """Yield what will fail at the end of an epoch."""
        loader = self._first_loader
        is_single = loader.samples_of(epoch) % loader.batch_size == 1 < loader.batch_size
        for loop in self._loops.values():
            parts = loop.training.model.modules()
            if is_single and any(isinstance(one, nn.BatchNorm1d) for one in parts):
                yield (
                    "the last batch of an epoch has 1 sample, of which batch norm cannot have a "
                    "variance in training: drop_last=True leaves it out"
                )

    def _foreseen_of_schedules(self, epochs: int) -> Iterator[str]:
        """Yield the schedules with one step for each batch so far, and too few for the others."""
        loader = self._first_loader
        cursor = loader.cursor
        read = cursor.epoch * len(loader) + cursor.samples // loader.batch_size
        for loop in self._loops.values():
            schedule: Any = loop.training.scheduler
            if not isinstance(schedule, OneCycleLR) or schedule.last_epoch != read:
                continue
            if schedule.total_steps < epochs * len(loader):
                yield (
                    f"OneCycleLR has {schedule.total_steps} steps, and {epochs} epochs have "
                    f"{epochs * len(loader)} batches: its step after the last one is an error"
                )

    def _machine_changes(self, saved: Mapping[str, SavedState]) -> list[str]:
        """Return a line if rounding can differ from that of the checkpoint."""
        before = next(iter(saved.values())).progress.machine
        changes = list(setting_changes("machine", before, machine(self._world.device)))
        if not changes:
            return []
        return [f"{'; '.join(changes)}: results are equal to rounding"]

    def _trainings(self) -> Iterator[tuple[str, Training]]:
        """Yield the objects of each model; those of the loop belong to the first name."""
        # By name: the order in the script may change between starts.
        first = min(self._loops)
        for name, loop in self._loops.items():
            objects = self._objects if name == first else {}
            yield name, replace(loop.training, objects=objects)

    def _write(self, *, is_best: bool, epoch: int | None) -> None:
        """Copy the state and begin to write it on rank 0; others only take part in gathering."""
        if self._world.is_main:
            self._writer.save(self._step, self._snapshot, is_best=is_best, epoch=epoch)
        else:
            self._snapshot(None)

    def _snapshot(self, buffers: HostBuffers | None) -> dict[str, Contents]:
        files: dict[str, Contents] = {}
        for name, training in self._trainings():
            own = snapshot(training, partial(self._progress, name), buffers)
            files |= {f"{prefix(name)}{file}": contents for file, contents in own.items()}
        return files

    def _read(self, path: Path) -> dict[str, SavedState]:
        """Verify a checkpoint, and return its states without tensors by the names of models."""
        endings = [file.removesuffix(STATE) for file in file_names(path) if file.endswith(STATE)]
        require_same_names("models", [end.removesuffix(".") for end in endings], self._loops)
        trainings = {prefix(name): training for name, training in self._trainings()}
        states = read_verified(path, trainings)
        return {name: states[prefix(name)] for name in self._loops}

    def _require_equal_checkpoint(self, path: Path | None) -> None:
        """Require that all ranks have found the same checkpoint, before one of them reads it.

        Raises:
            RankMismatchError: they have not.
        """
        # Paths can be equal on machines with different disks; the manifest has the hashes of files.
        digest = "" if path is None else manifest_digest(path)
        own = [digest, str(self._folder.path.absolute()), "" if path is None else path.name]
        first, *others = all_gather(own, self._world)
        for rank, other in enumerate(others, 1):
            if other[0] != first[0]:
                places = [
                    f"{name or 'no checkpoint'} in {folder}" for _, folder, name in (first, other)
                ]
                raise RankMismatchError(
                    f"rank 0 resumes from {places[0]}, rank {rank} from {places[1]}",
                    expected="one folder of checkpoints, which rank 0 writes and all ranks read",
                    fix="give every rank the same folder, on a file system that all machines have",
                )

    def _sample_changes(self, states: Mapping[str, SavedState]) -> Iterator[str]:
        """Yield the loaders with other samples under the indices of a checkpoint."""
        for key, saved in next(iter(states.values())).progress.loaders.items():
            if saved.probe is not None:
                changed = self._loaders[key].changed_samples(saved.probe)
                if changed:
                    numbers = ", ".join(map(str, changed))
                    yield f"{key or 'loader'}: other contents of samples {numbers}"

    def _load(
        self, path: Path, saved: Mapping[str, SavedState], *, new_objects: bool = False
    ) -> None:
        """Restore the state and the position of a checkpoint that `_read` has verified.

        Without a fitting state everything stays as it was.
        """
        cursors = {}
        for state in saved.values():
            progress = state.progress
            positions = {key: loader.cursor for key, loader in progress.loaders.items()}
            # Checkpoints of recipes have one position, without the settings of a loader.
            for key, cursor in (positions or {next(iter(self._loaders)): progress.cursor}).items():
                loader = self._loaders[key]
                require_position(cursor, loader.samples_of(cursor.epoch), loader.batch_size)
                cursors[key] = cursor
        trainings = {prefix(name): training for name, training in self._trainings()}
        states = {prefix(name): state for name, state in saved.items()}
        load_all(path, trainings, states, new_objects=new_objects)
        for name, state in saved.items():
            self._loops[name].steps = state.progress.step
            self._best = state.progress.best
        for key, cursor in cursors.items():
            self._loaders[key].cursor = cursor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait for the last checkpoint."""
        self._writer.__exit__(*error)


def prefix(name: str) -> str:
    """Return the beginning of the names of the files of a model."""
    if name:
        return f"{name}."
    return ""
