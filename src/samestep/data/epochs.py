"""Epochs of a training loop, from the position of its loader."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.data.loader import Loader
from samestep.errors import InputError


def epochs(batches: Loader, number: int) -> Iterator[int]:
    """Yield the numbers of the epochs from the position of a loader to `number`, without `number`.

    An epoch is complete when the steps have used all its samples. After a resumption, the first one is the epoch of the
    checkpoint. If the body leaves an epoch early, the next iteration continues the epoch. After a stop request, the
    iteration over the loader ends with the step, and so does this loop with the epoch.

    Raises:
        InputError: the body took no step with a batch of the loader.
    """
    batches.planned_epochs = number
    while (begin := batches.cursor).epoch < number:
        batches.ends_on_stop = True
        try:
            yield begin.epoch
        finally:
            batches.ends_on_stop = False
        if batches.stopped:
            return
        if batches.cursor == begin:
            raise InputError(
                f"no step used a batch of the loader in epoch {begin.epoch}",
                "engine.step(batch) with batches of the loader that samestep.epochs has",
                "pass the loader of the training data to samestep.epochs",
                code="E_EPOCHS",
            )
