"""Rank of a replay, of a recipe or of a script: computes steps again and compares the checksums of the state."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.data.batch import GlobalBatch
from samestep.distributed.logging import logger
from samestep.engine.callbacks import Callback
from samestep.engine.checksum import checksums_by_name, state_checksum
from samestep.engine.engine import Engine
from samestep.engine.learning_rate import apply_schedule
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.launcher.job import ReplayedFolder, process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.microbatches import Cursor, require_position
from samestep.recipes.recipe_files import recipe_data
from samestep.runs.starts import require_same_code
from samestep.tools.replay.flipped_bit import flipped_bit
from samestep.tools.replay.launch import Replayed, ReplayRequest
from samestep.tools.verify.worker import Probe
from samestep.units import plural

if TYPE_CHECKING:
    from samestep.recipes.builder import Built

_LINE_SECONDS = 5.0  # between lines about the progress


def replay(recipe: Recipe, options: RunOptions, request: ReplayRequest) -> Replayed:
    """Compute the steps on this rank, and return the result.

    Raises:
        InputError: the user's code has changed since the run, or the run has fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    # Here, since they need packages that scripts do not need.
    from samestep.recipes.builder import build, start_world
    from samestep.recipes.run import without_pretrained

    with _recording(request), start_world(recipe, options) as world:
        if world.is_main:
            require_same_code(request.run, request.checkpoint, accept_changes=request.accept_changes)
        built = build(recipe if request.checkpoint is None else without_pretrained(recipe), options, world)
        engine, cursor = built.engine, built.train.cursor
        epochs = recipe.epochs
        if request.checkpoint is not None:
            progress = load(request.checkpoint, engine.training)
            engine.steps, built.train.cursor = progress.step, progress.cursor
            cursor, epochs = progress.cursor, progress.recipe.get("epochs", epochs)
            require_position(cursor, built.train.samples_of(cursor.epoch), built.train.batch_size)
        result = Replayed(engine.steps)
        _add_checksum(result, request, engine, cursor)
        if epochs != recipe.epochs and isinstance(engine.scheduler, LambdaLR):
            apply_schedule(engine.scheduler)  # as the trainer does
        for cursor in _steps(built, recipe, request):
            _add_checksum(result, request, engine, cursor)
        if engine.steps < request.last:
            return replace(result, stopped=True)
        result.by_name.update(checksums_by_name(engine, cursor))
        if request.trial is not None:
            result = replace(result, flipped=flipped_bit(result, request, engine, cursor))
        if request.out is not None:
            progress = Progress(engine.steps, cursor, recipe=recipe_data(recipe))
            files = pack(engine.training, progress, keep=world.is_main)
            if world.is_main:
                CheckpointFolder(request.out).write(engine.steps, files)
            world.barrier()
        return result


def _steps(built: Built, recipe: Recipe, request: ReplayRequest) -> Iterator[Cursor]:
    """Compute the steps up to the last one, or up to a request to stop, and yield the position after each."""
    engine, shown = built.engine, time.monotonic()
    is_shown = engine.world.is_main and not request.quiet
    batches = built.train.endless()
    while engine.steps < request.last:
        batch = next(batches)
        if batch.begin.epoch >= recipe.epochs:
            raise InputError(
                f"step {request.last} of {request.run}, which has {plural(engine.steps, 'step')}",
                expected="a step of the run",
                fix=f"--step {engine.steps} or less",
                code="E_VALUE",
            )
        result = engine.step(batch)
        yield batch.end
        if result.stop:
            return
        if is_shown and time.monotonic() - shown > _LINE_SECONDS:
            shown = time.monotonic()
            print(f"  step {engine.steps} of {request.last}", file=sys.stderr, flush=True)


class _ReplayedSteps(Callback):
    """Steps of the engine that makes the first step; the last step of the request ends the script.

    Attributes:
        result: result up to the last step; None before the first step.
        engine: the engine, once it has made a step.
        created: the first engine of the script; after the script, its last step is that of the script.
    """

    def __init__(self, request: ReplayRequest) -> None:
        self._request = request
        self._end = Cursor()
        self.result: Replayed | None = None
        self.engine: Engine | None = None
        self.created: Engine | None = None

    def engine_created(self, engine: Engine) -> None:
        if self.created is not None:
            return
        self.created, request = engine, self._request
        if not engine.world.is_main:
            return
        # The script and its imports are known now.
        for line in require_same_code(request.run, None, accept_changes=request.accept_changes):
            logger.warning("replaying with changed code: %s", line)

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if self.engine is None:
            self.engine, self.result = engine, Replayed(engine.steps)
        if engine is self.engine:
            self._end = batch.end

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self.engine or self.result is None:
            return
        request = self._request
        _add_checksum(self.result, request, engine, self._end)
        if result.step >= request.last:
            self.result.by_name.update(checksums_by_name(engine, self._end))
            if request.trial is not None:
                flipped = flipped_bit(self.result, request, engine, self._end)
                self.result = replace(self.result, flipped=flipped)
        if result.step >= request.last or result.stop:
            engine.world.barrier()  # no rank ends while another needs it
            raise EndOfScript


def replay_script(request: ReplayRequest) -> Replayed:
    """Run the script on this rank up to the last step, and return the result.

    Raises:
        InputError: the script has changed since the run, or makes fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    command = request.script
    assert command is not None
    steps = _ReplayedSteps(request)
    process_state.is_experiment = True
    process_state.replayed = ReplayedFolder(request.first, accept_changes=request.accept_changes)
    os.chdir(command.directory)
    with _recording(request), _output():
        process_state.callbacks.append(steps)  # after that of the record; the process ends with the replay
        run_script(command.path, command.arguments)
    engine, result = steps.engine, steps.result
    if engine is None or result is None or (engine.steps < request.last and not engine.world.stop_requested):
        # A script that resumes a finished run makes no step; another library may not even load the checkpoint.
        end = engine or steps.created
        last = (end.steps if end is not None else 0) or max(request.logged, default=1)
        raise InputError(
            f"step {request.last} of {request.run}: the script ended after step {last}",
            expected="a step of the run, by a script that trains with samestep.Engine",
            fix=f"--step {last} or less",
            code="E_VALUE",
        )
    if engine.steps < request.last:
        return Replayed(result.first, stopped=True)
    return result


@contextmanager
def _output() -> Iterator[None]:
    """Write the output of the script to standard error, that of rank 0 only."""
    rank, _ = rank_and_size()
    if rank == 0:
        with redirect_stdout(sys.stderr):
            yield
        return
    with open(os.devnull, "w", encoding="utf-8") as output, redirect_stdout(output):
        yield


def _add_checksum(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> None:
    """Add the checksum of the state, if it is logged or the last one; collective as `state_checksum`."""
    step = engine.steps
    if step and (step in request.logged or step == request.last):
        value = state_checksum(engine, cursor)
        if value is not None:
            result.checksums[step] = f"{value:016x}"


@contextmanager
def _recording(request: ReplayRequest) -> Iterator[None]:
    """Record the steps in the block if the request has a trial."""
    if request.trial is None:
        yield
        return
    rank, size = rank_and_size()
    with (request.trial.folder / f"rank-{rank}.jsonl").open("a") as file:
        process_state.callbacks.append(Probe(request.trial, rank, size, file))
        yield
