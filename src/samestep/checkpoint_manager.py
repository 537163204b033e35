"""Checkpoint manager for custom training loops."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.checksum import checksum
from samestep.checkpoint.contents import SavedState, Training
from samestep.checkpoint.encoding import Tensors, encode, encode_objects, require_savable
from samestep.checkpoint.folder_lock import FolderLock
from samestep.checkpoint.loop import LoopCheckpoints, prefix
from samestep.checkpoint.resume_changes import (
    Settings,
    attribute_changes,
    require_same_names,
    require_unchanged_settings,
    setting_changes,
    settings_of,
)
from samestep.checkpoint.store import CheckpointFolder
from samestep.data.whole_batches import WholeBatches, is_stopping, stoppable_epochs
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.logging import logger
from samestep.distributed.rng import passed_generators
from samestep.distributed.stop_request import StoppedLoop
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError, RankMismatchError
from samestep.launcher.process_state import process_state
from samestep.metrics.metrics import BestRule, Mode
from samestep.session import init, stopped_by_signals
from samestep.strategies.divided_parameters import divided_parameters, is_divided, split_of

Part = TypeVar("Part")


class CheckpointManager(LoopCheckpoints):
    """Checkpoints of one training loop: complete or absent, verified, for any number of ranks.

        checkpoints = samestep.CheckpointManager("checkpoints", model, batches, optimizer=optimizer)
        for epoch in checkpoints.epochs(10):
            for inputs, targets in batches:
                ...

    With `background=True`, use the manager as a context manager around the loop: `save` then
    returns once the state is copied, or on a GPU once the copies are queued, and the end of the
    block waits for the last checkpoint.

    Args:
        folder: folder with one subfolder per checkpoint. Locked against other processes until this
            object is closed or deleted.
        model: the model, or several by name: `{"generator": generator, "critic": critic}`.
            The number of a checkpoint is the largest number of steps of an optimizer.
        batches: training data, or several loaders by name; the cursor of the first is the position
            of the loop.
        optimizer: optimizer of the model, or several by the names of the models.
        scheduler: schedule of the optimizer, or several by name.
        scaler: the `GradScaler` of the loop.
        state: other objects by name: with `state_dict` and `load_state_dict`, such as schedulers
            that the loop steps; generators of torch; dicts, which are restored in place. Equal on
            every rank.
        keep: number of newest checkpoints to keep, in addition to the best.
        best_by: key among the results of an evaluation that selects the best checkpoint: `loss` or
            a metric.
        best_mode: `min` or `max`; None for `min` of losses and `max` of the built-in metrics.
        background: write checkpoints in a background thread.

    Raises:
        InputError: another process writes to the folder, or the state has values that a checkpoint
            cannot hold.
    """

    _loops: Mapping[str, _PlainLoop]
    _settings: Mapping[str, Settings] = {}  # of optimizers and schedules, before training

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        batches: WholeBatches | Mapping[str, WholeBatches],
        *,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        state: Mapping[str, Any] | None = None,
        keep: int = 2,
        best_by: str = "loss",
        best_mode: Mode | None = None,
        background: bool = False,
    ) -> None:
        self._rule = BestRule.of(best_by, best_mode)
        loaders = _by_name(batches)
        loops = _plain_loops(_by_name(model), optimizer, scheduler, scaler)
        world = next(iter(loops.values())).world
        if "script_generators" in (state or {}):
            value = "state has an object 'script_generators'"
            expected = "another name: this one has the random generators of the script"
            raise InputError(value, expected, "rename the object", code="E_VALUE")
        objects = {**(state or {}), "script_generators": _Generators(world.device)}
        for name, loader in loaders.items():
            if isinstance(loader, WholeBatches) and loader.has_state:
                key = f"order_of_loader_{name}" if name else "order_of_loader"
                objects[key] = loader
        for loop in loops.values():
            require_savable(loop.model, loop.optimizer, loop.scheduler, objects)
        _require_equal_folder(str(folder), world)
        store = CheckpointFolder(_place(Path(folder)), keep)
        self._lock = FolderLock(store.path) if world.is_main else None
        if world.is_main:
            store.hold(HeldFolder(store.path))
        process_state.source_files.note_imports()
        # No reference to this object: its lock ends with it.
        super().__init__(store, loops, loaders, objects, lambda _: None)
        self._settings = {
            name: settings_of(
                training.optimizer, {"scheduler": training.scheduler, **training.named_objects}
            )
            for name, training in self._trainings()
        }
        self._background = background
        self._is_entered = False
        self._saved: int | None = None  # number of the last checkpoint
        # Hashes of the saved state that the loop can change between steps.
        self._saved_hashes: dict[str, str] = {}
        self._last_step = 0  # before the last batch
        self._epochs = 0  # number of epochs, until schedules are compared with it

    def epochs(self, number: int) -> Iterator[int]:
        """Resume, yield the remaining epochs as `samestep.epochs`, and save after each.

        If the body has called `save` after the last step, and the state has not changed since, the
        state is not saved again. Errors are those of `resume`, `samestep.epochs` and `save`.

        A stop request (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C, `samestep.request_stop`) saves after the
        next step, with several loaders after the epoch, and ends the script with exit code 130.
        """
        self.resume()
        self._warn(self._foreseen(self._first_loader.cursor.epoch))
        self._last_step = self._step
        self._epochs = number
        with stopped_by_signals(self._world.session.stop, keeps_handlers=True):
            for epoch in stoppable_epochs(self._first_loader, number, self._end_on_request):
                yield epoch
                # The number first: all ranks have the same, so that all or none compare.
                if self._saved != self._step or any(
                    all_gather(self._hashes() != self._saved_hashes, self._world)
                ):
                    self.save()

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts if self._world.is_main else ():
            logger.warning(text)

    def _end_on_request(self) -> None:
        """End the script between two batches or epochs after a stop request, and save before."""
        step = self._step
        # After two batches, a schedule with one step for each batch has taken two.
        if self._epochs and self._first_loader.cursor.samples == 2 * self._first_loader.batch_size:
            self._warn(self._foreseen_of_schedules(self._epochs))
            self._epochs = 0
        has_gradients = step == self._last_step  # possibly, of an accumulation
        self._last_step = step
        if not is_stopping():
            return
        if self._first_loader.cursor.samples:
            if has_gradients or len(self._loaders) > 1:  # other loaders can be ahead
                return
            self.save()
        self._writer.wait()
        if self._world.is_main:
            logger.info("stopped after step %d; start the script again to continue", step)
        raise StoppedLoop

    def save(self, values: Mapping[str, float] | None = None) -> bool:
        """Save models, optimizers, schedules, objects and positions. Call on every rank.

        Args:
            values: results of an evaluation of this state. The checkpoint becomes `best` if they
                are the best so far; a loss or a value that is not finite never is.

        Returns:
            Whether the checkpoint is the best.

        Raises:
            CheckpointWriteError: the checkpoint, or with `background=True` the previous one, could
                not be written.
            RankMismatchError: ranks hold different state.
            InputError: `values` have no value of the name `best_by`; the checkpoint is saved.
        """
        if self._background and not self._is_entered:
            raise InputError(
                "checkpoints are saved in the background without a with block",
                expected="a block that waits for the last checkpoint and raises write errors",
                fix="with samestep.CheckpointManager(..., background=True) as checkpoints: "
                "around the loop",
                code="E_CHECKPOINT_WRITE",
            )
        # A checkpoint holds the state of rank 0: differences of others would be lost silently.
        self._require_equal_state()
        for loop in self._loops.values():
            loop.require_equal_tensors()
        is_best = False
        problem = None
        # A wrong name in `best_by` must not cost the training so far.
        try:
            is_best = values is not None and self._rule.is_best(values, self._best)
        except InputError as error:  # raised once the state is saved
            problem = error
        if values is not None and is_best:
            self._best = values[self._rule.by]
        self._saved = self._step
        cursor = self._first_loader.cursor
        epoch = cursor.epoch if self._saved and not cursor.samples else None
        self._write(is_best=is_best, epoch=epoch)
        if not self._background:
            self._writer.wait()
        if problem is not None:
            raise problem
        return is_best

    def resume(self, checkpoint: str = "last", *, accept_changes: bool = False) -> bool:
        """Resume from a checkpoint of any number of ranks; return False if none exists.

        Args:
            checkpoint: `last`, `best`, `epoch-N`, or the number of a step.
            accept_changes: continue although the script, or a module that it imports, has changed
                since the checkpoint; or the batch size, microbatches, seeds, the number and order
                of the samples, or the step options; or although `state` has additional objects,
                which keep their present state.

        Raises:
            CheckpointError: the checkpoint does not exist, is damaged, or is of another model or
                optimizer.
            InputError: the code, the data or an option has changed, or the code differs between
                ranks.
        """
        # No rank reads while rank 0 removes the leftovers of a killed run.
        if self._world.is_main:
            self._folder.clean()
        self._world.barrier()
        path = self._folder.find(checkpoint) if self._folder.steps() else None
        self._require_equal_checkpoint(path)
        if path is None:
            return False
        saved = self._read(path)
        notes = self._machine_changes(saved)
        changes = list(self._changes(saved))
        # Only with equal settings: otherwise an index can be outside of the data.
        samples = list(self._sample_changes(saved)) if not changes else []
        if notes:  # where decoded files can have other bits
            notes += samples
        else:
            changes += samples
        # A change of the data can be one of one machine.
        changes = list(dict.fromkeys(chain(*all_gather(changes, self._world))))
        require_unchanged_settings(changes, accept_changes=accept_changes)
        sources = process_state.source_files
        if self._world.is_main:
            saved_sources = next(iter(saved.values())).sources
            code = sources.require(saved_sources, accept_changes=accept_changes)
            changes += [f"code of {name}" for name in code]
        self._warn(f"continuing with a change: {change}" for change in (*notes, *changes))
        sources.check_ranks(self._world)
        self._load(path, saved, new_objects=accept_changes)
        for name, training in self._trainings():
            for change in attribute_changes(saved[name].attributes, training.named_objects):
                self._warn([f"{prefix(name)}{change}: it is not part of state_dict()"])
        return True

    def _changes(self, states: Mapping[str, SavedState]) -> Iterator[str]:
        """Yield the settings that differ from those of a checkpoint."""
        for name, training in self._trainings():
            saved = states[name].settings
            for key, current in training.settings.items():
                yield from setting_changes(prefix(name) + key, saved.get(key, {}), current)
        loaders = next(iter(states.values())).progress.loaders
        if loaders:
            require_same_names("loaders", loaders, self._loaders)
        for key, saved_loader in loaders.items():
            loader = self._loaders[key]
            now = loader.settings_of(saved_loader.cursor.epoch)
            yield from setting_changes(key or "loader", saved_loader.settings, now)

    def _trainings(self) -> Iterator[tuple[str, Training]]:
        for name, training in super()._trainings():
            yield name, replace(training, settings=self._settings.get(name, {}))

    def _require_equal_state(self) -> None:
        """Compare state that ranks compute on their own; a collective."""
        self._saved_hashes = self._hashes()
        if self._world.size == 1:
            return
        by_rank = all_gather(self._saved_hashes, self._world)
        differing = [name for name in by_rank[0] if len({row.get(name) for row in by_rank}) > 1]
        if differing:
            raise RankMismatchError(
                f"ranks have a different {differing[0]}",
                expected="schedules, optimizers, modules and objects in state change in the same "
                "way on every rank",
                fix="compute them from values of all ranks, such as those of samestep.all_gather",
            )

    def _hashes(self) -> dict[str, str]:
        """Return hashes of the state that is not in parameters and their optimizer slots."""
        hashes = {}
        for name, training in self._trainings():
            tensors: Tensors = {}
            state = encode_objects(training.model, training.scheduler, training.objects, tensors)
            groups = [
                {key: value for key, value in group.items() if key != "params"}
                for group in training.optimizer.param_groups
            ]
            state["optimizer"] = encode(groups, tensors, "optimizer")
            objects = state.pop("objects")
            values = state | {f"object {key}": value for key, value in objects.items()}
            for key in sorted(values):
                digest = hashlib.blake2b(json.dumps(values[key]).encode(), digest_size=4)
                hashes[f"state of {prefix(name)}{key}"] = digest.hexdigest()
            sums = checksum(dict(tensors.values()))
            hashes[f"tensors in the state of {name or 'the loop'}"] = str(sums)
        return hashes

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_entered = False
        try:
            super().__exit__(*error)
        finally:
            if self._lock is not None:
                self._lock.release()


class _PlainLoop:
    """Model and optimizer of a loop.

    Attributes:
        steps: steps of the optimizer, with those before a resumption.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.world = init()
        self.steps = 0
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._scaler = scaler or torch.amp.GradScaler(enabled=False)
        own = set(model.parameters())
        optimized = [one for group in optimizer.param_groups for one in group["params"]]
        if not own.issuperset(optimized):
            raise InputError(
                "the optimizer updates parameters that the model does not have",
                expected="an optimizer of the model's parameters",
                fix="CheckpointManager(folder, nn.ModuleDict({...}), ...) with all modules of the "
                "optimizer",
                code="E_CHECKPOINT_WRITE",
            )
        # torch calls the hook with arguments of the step.
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        if self.steps < 2:  # the step of a subclass can count twice
            require_savable(self.model, self.optimizer, self.scheduler, {})
        self.steps += 1

    @property
    def training(self) -> Training:
        parameters = divided_parameters(self.model)
        return Training(
            self.model, self.optimizer, self.scheduler, self._scaler, local_parameters=parameters
        )

    def require_equal_tensors(self) -> None:
        """Compare parameters, buffers and optimizer slots of ranks with the same; a collective."""
        parameters = self.training.parameters
        values = {
            name: value
            for name, value in self.model.state_dict().items()
            if name not in parameters.local
        }
        values |= {name: value for name, value in parameters.local.items() if parameters.has(name)}
        for number, state in self.optimizer.state_dict()["state"].items():
            values |= {f"{number}.{slot}": value for slot, value in state.items()}
        tensors = {
            name: value
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and not is_divided(value)
        }
        copies = self.world
        if split_of(self.model) is not None:
            copies = self.world.data  # others have other parts
        sums = all_gather(str(checksum(tensors)), copies) if copies.size > 1 else []
        differing = [rank for rank, value in enumerate(sums) if value != sums[0]]
        if differing:
            raise RankMismatchError(
                f"the state of the model or the optimizer of rank {differing[0]} differs from "
                "that of rank 0",
                expected="equal state on every rank",
                fix="make every change of the model on all ranks, and from values that are equal "
                "on them",
            )


class _Generators:
    """Generators of torch, NumPy and Python, from which a plain loop draws."""

    def __init__(self, device: torch.device) -> None:
        self._generators = passed_generators(device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(number): generator.state() for number, generator in enumerate(self._generators)}

    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the states; that of a GPU is left out on another device."""
        for number, generator in enumerate(self._generators):
            if (state := states.get(str(number))) is not None:
                generator.set_state(state)


def _place(folder: Path) -> Path:
    """Return the folder; in an experiment, a folder of the experiment for each of the script."""
    root = process_state.checkpoint_root
    if root is None or (path := folder.resolve()).is_relative_to(root):
        return folder
    # A hash of the path: folders in two places can have the same name.
    return root / f"checkpoints-{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"


def _require_equal_folder(folder: str, world: World) -> None:
    folders = all_gather(folder, world)
    for rank, other in enumerate(folders):
        if other != folders[0]:
            raise RankMismatchError(
                f"ranks have different folders of checkpoints: {folders[0]} on rank 0, {other} on "
                f"rank {rank}",
                expected="one folder, which rank 0 writes and all ranks read",
                fix="a name that depends neither on the rank nor on the time",
            )


def _plain_loops(
    models: Mapping[str, torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, _PlainLoop]:
    """Return models with their optimizers and schedules, which are single ones or mappings."""
    by_name = []
    for part in (optimizer, scheduler):
        if not isinstance(part, Mapping):
            # A single optimizer belongs to a single model.
            part = dict.fromkeys(list(models)[: len(models) == 1], part)  # noqa: PLW2901
        by_name.append(part)
    optimizers, schedulers = by_name
    for name in models:
        if not isinstance(optimizers.get(name), torch.optim.Optimizer):
            raise InputError(
                f"CheckpointManager has no optimizer of the model {name}".rstrip(),
                expected="an optimizer, or one for each model by name",
                fix="CheckpointManager(folder, model, batches, optimizer=optimizer)",
                code="E_CHECKPOINT_WRITE",
            )
    return {
        name: _PlainLoop(model, optimizers[name], schedulers.get(name), scaler)
        for name, model in models.items()
    }


def _by_name(parts: Part | Mapping[str, Part]) -> dict[str, Part]:
    """Return models or loaders by name; a single one has no name."""
    if not isinstance(parts, Mapping):
        return {"": parts}
    # A name begins the names of files, before a dot.
    if not parts or not all(name.isidentifier() for name in parts):
        raise InputError(
            f"the names of models or loaders are {list(parts)}",
            expected="at least one, by names of letters, digits and underscores",
            fix='CheckpointManager(folder, {"generator": generator, "critic": critic}, batches)',
            code="E_CHECKPOINT_WRITE",
        )
    return dict(parts)
