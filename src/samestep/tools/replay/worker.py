"""Rank of a replay of a recipe: computes steps again and compares the checksums of the state."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.checksum import checksums_by_name, state_checksum
from samestep.checkpoint.state import load
from samestep.config import RunOptions
from samestep.errors import InputError
from samestep.global_view import any_rank
from samestep.microbatches import Cursor, require_position
from samestep.recipes.builder import Built, build, start_world, without_pretrained
from samestep.recipes.driver import Driver
from samestep.recipes.optimizers import apply_schedule
from samestep.runs.folder import require_same_code
from samestep.tools.replay.launch import Replayed, ReplayOptions, Subject


def replay_recipe(subject: Subject, last: int, options: ReplayOptions) -> Replayed | None:
    """Compute the steps on this rank, and return the result; None after a request to stop.

    Raises:
        InputError: the user's code has changed since the run, or the run has fewer steps.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    recipe = subject.recipe
    checkpoint = subject.checkpoint
    run_options = RunOptions(device=options.device)
    with start_world(recipe, run_options) as world:
        if world.is_main:
            require_same_code(subject.folder, checkpoint, accept_changes=options.accept_changes)
        built = build(
            recipe if checkpoint is None else without_pretrained(recipe), run_options, world
        )
        if checkpoint is not None:
            _resume(built, subject)
        driver = built.driver
        batches = built.train
        result = Replayed(str(subject.folder), subject.processes, driver.steps)
        while batches.cursor.epoch < recipe.epochs:
            for batch in batches:
                if batch.data is None:
                    continue
                driver.step(batch)
                is_last = driver.steps >= last
                _compare(driver, batches.cursor, subject, result, is_last=is_last)
                if any(any_rank(world, world.stop_requested)):
                    return None
                if is_last:
                    result.by_name = checksums_by_name(driver, batches.cursor)
                    return result
    raise InputError(
        f"step {last} of {subject.folder}, which ends before this step",
        expected="a step of the run",
        fix=f"--step {max(subject.checksums)} or less",
        code="E_VALUE",
    )


def _resume(built: Built, subject: Subject) -> None:
    assert subject.checkpoint is not None
    driver = built.driver
    batches = built.train
    progress = load(subject.checkpoint, driver.training)
    driver.steps = progress.step
    require_position(progress.cursor, batches.samples_of(progress.cursor.epoch), batches.batch_size)
    batches.cursor = progress.cursor
    epochs = progress.recipe.get("epochs", subject.recipe.epochs)
    if epochs != subject.recipe.epochs and isinstance(driver.scheduler, LambdaLR):
        apply_schedule(driver.scheduler)  # as a resumption does


def _compare(
    driver: Driver, end: Cursor, subject: Subject, result: Replayed, *, is_last: bool
) -> None:
    """Compare the checksum of the state with the logged one; collective as `state_checksum`."""
    step = driver.steps
    logged = subject.checksums.get(step)
    if logged is None and not is_last:
        return
    value = state_checksum(driver, end)
    if value is None:
        return
    own = result.checksums[step] = f"{value:016x}"
    result.compared += logged is not None
    if logged not in (None, own) and result.first_different is None:
        result.first_different = step
