"""Parts of the functions that tools run on ranks: training of a recipe, and runs of a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.launcher.process_state import process_state
from samestep.launcher.worker import run_script
from samestep.parallelize import any_rank

if TYPE_CHECKING:  # scripts do not need the packages of recipes
    from samestep.data.whole_batches import WholeBatches
    from samestep.recipes.bad_samples import RecipeBatch
    from samestep.recipes.training_step import Driver


class StopRequested(Exception):
    """A stop was requested; raised after the same step on all ranks."""


def train(driver: Driver, batches: Iterable[RecipeBatch]) -> Iterator[RecipeBatch]:
    """Train on batches and yield each one after its step.

    Raises:
        StopRequested: some rank has a request to stop. Collective.
    """
    for batch in batches:
        if batch.data is not None:  # the batch has a sample that can be used
            driver.step(batch)
            yield batch
            if any(any_rank(driver.world, driver.world.stop_requested)):
                raise StopRequested


def endless(data: WholeBatches) -> Iterator[RecipeBatch]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from (batch for batch in data if batch.data is not None)


def begin_experiment(checkpoints: Path) -> None:
    """Make scripts write no run directory, and their checkpoints below an absolute path."""
    process_state.is_experiment = True
    process_state.checkpoint_root = checkpoints


def run_logged(script: Path, arguments: tuple[str, ...], log: Path, **options: Any) -> None:
    """Run a script as one rank, with standard output in a file; for `options` see `run_script`."""
    with log.open("a", encoding="utf-8") as output, redirect_stdout(output):
        run_script(script, arguments, **options)
