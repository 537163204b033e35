"""Rank of a replay: computes steps of a run again and compares the checksums of the state with the logged ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.distributed.world import all_gather
from samestep.engine.checksum import MODULUS, find_flipped_bit
from samestep.engine.engine import Engine
from samestep.engine.learning_rate import apply_schedule
from samestep.engine.state_checksum import checksums_by_name, state_checksum, state_parts
from samestep.errors import InputError
from samestep.launcher.job import process_state, rank_and_size
from samestep.microbatches import Cursor, require_position
from samestep.recipes.builder import Built, build, start_world
from samestep.recipes.recipe_files import recipe_data
from samestep.recipes.run import without_pretrained
from samestep.runs.starts import require_same_code
from samestep.tools.replay.launch import Replayed, ReplayRequest
from samestep.tools.verify.worker import Probe
from samestep.units import plural

_LINE_SECONDS = 5.0  # between lines about the progress


def replay(recipe: Recipe, options: RunOptions, request: ReplayRequest) -> Replayed:
    """Compute the steps on this rank, and return the result.

    Raises:
        InputError: the user's code has changed since the run, or the run has fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
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
        _compare(result, request, engine, cursor)
        if epochs != recipe.epochs and isinstance(engine.scheduler, LambdaLR):
            apply_schedule(engine.scheduler)  # as the trainer does
        for cursor in _steps(built, recipe, request):
            _compare(result, request, engine, cursor)
        if engine.steps < request.last:
            return replace(result, stopped=True)
        if request.trial is not None:
            names = checksums_by_name(engine, cursor)
            result = replace(result, by_name=names, flipped=_flipped_bit(result, request, engine, cursor))
        if request.out is not None:
            progress = Progress(engine.steps, cursor, recipe=recipe_data(recipe))
            files = pack(engine.training, progress, keep=world.is_main)
            if world.is_main:
                CheckpointFolder(request.out).write(engine.steps, files)
            world.barrier()
        return result


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


def _compare(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> None:
    """Add the checksum of the state, if it is logged or the last one."""
    step = engine.steps
    if step and (step in request.logged or step == request.last):
        value = state_checksum(engine, cursor)
        if value is not None:
            result.checksums[step] = f"{value:016x}"


def _flipped_bit(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> str | None:
    """Return the bit whose flip turns the last state into the logged one, as text; None if no single bit does.

    A collective.
    """
    logged, own = request.logged.get(request.last), result.checksums.get(request.last)
    difference = (int(logged, 16) - int(own, 16)) % MODULUS if logged is not None and own is not None else 0
    differences = all_gather(str(difference), engine.world)
    found = find_flipped_bit(state_parts(engine, cursor).tensors, int(differences[0]))
    texts: list[str | None] = all_gather(found, engine.world)
    return next((text for text in texts if text is not None), None)
