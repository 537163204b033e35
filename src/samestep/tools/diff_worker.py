"""Replay of a recipe on one rank: computes steps again and compares the checksums of the state."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.checksum import checksums_by_name, state_checksum
from samestep.checkpoint.state import load
from samestep.config import RunOptions
from samestep.errors import InputError
from samestep.microbatches import require_position
from samestep.recipes.builder import Built, build, start_world, without_pretrained
from samestep.recipes.optimizers import apply_schedule
from samestep.runs.folder import require_same_code
from samestep.tools.diff import Replayed, ReplayOptions, Subject
from samestep.tools.ranks import StopRequested, train


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
        if checkpoint is not None:
            recipe = without_pretrained(recipe)
        built = build(recipe, run_options, world)
        if checkpoint is not None:
            _resume(built, subject)
        try:
            return _replay(built, subject, last)
        except StopRequested:
            return None


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


def _replay(built: Built, subject: Subject, last: int) -> Replayed:
    driver = built.driver
    batches = built.train
    result = Replayed(str(subject.folder), subject.processes, driver.steps)
    while batches.cursor.epoch < subject.recipe.epochs:
        for _ in train(driver, batches):
            step = driver.steps
            logged = subject.checksums.get(step)
            value = None
            if logged is not None or step >= last:
                value = state_checksum(driver, batches.cursor)  # a collective; None on other ranks
            if value is not None:
                own = result.checksums[step] = f"{value:016x}"
                result.compared += logged is not None
                if logged not in (None, own) and result.first_different is None:
                    result.first_different = step
            if step >= last:
                result.by_name = checksums_by_name(driver, batches.cursor)
                return result
    raise InputError(
        f"step {last} of {subject.folder}, which ends before this step",
        expected="a step of the run",
        fix=f"--step {max(subject.checksums)} or less",
        code="E_VALUE",
    )
