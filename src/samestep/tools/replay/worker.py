"""Rank of a replay: computes steps of a run again and compares the checksums of the state with the logged ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.engine.checksum import checksums_by_name
from samestep.engine.learning_rate import apply_schedule
from samestep.errors import InputError
from samestep.microbatches import Cursor, require_position
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.recipe_files import recipe_data
from samestep.recipes.run import without_pretrained
from samestep.runs.starts import require_same_code
from samestep.tools.replay.checksums import add_checksum
from samestep.tools.replay.flipped_bit import flipped_bit
from samestep.tools.replay.launch import Replayed, ReplayRequest
from samestep.tools.replay.recording import recording
from samestep.units import plural

_LINE_SECONDS = 5.0  # between lines about the progress


def replay(recipe: Recipe, options: RunOptions, request: ReplayRequest) -> Replayed:
    """Compute the steps on this rank, and return the result.

    Raises:
        InputError: the user's code has changed since the run, or the run has fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    with recording(request), start_world(recipe, options) as world:
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
        add_checksum(result, request, engine, cursor)
        if epochs != recipe.epochs and isinstance(engine.scheduler, LambdaLR):
            apply_schedule(engine.scheduler)  # as the trainer does
        for cursor in _steps(built, recipe, request):
            add_checksum(result, request, engine, cursor)
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
