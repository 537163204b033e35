"""Loader of whole batches, for a loop that sees the whole batch on every rank, and epochs of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch

from samestep.config import BadSamples, SampleOrder
from samestep.data.batch import map_tensors
from samestep.data.loader import Loader, loop_epochs
from samestep.data.microbatch_dataset import Collate, SizedDataset
from samestep.data.samplers import Sampler
from samestep.distributed.devices import accelerator_module
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.launcher.job import process_state, rank_and_size
from samestep.microbatches import Cursor

# Arguments of a loader that only `samestep.Engine` uses.
_OF_ENGINE = ("microbatches", "prepare", "count_tokens", "keeps_microbatch_size")


class WholeBatches:
    """Iterable over the batches of one epoch, as the collate function returns them; equal on every rank.

    The words are those of torch's `DataLoader`, and so is the rule of an iteration: each one is an epoch, also after
    one that was left early. The order is a function of (seed, epoch), and the random numbers of a sample are a
    function of (seed, epoch, index): neither depends on ranks, workers, or generators of the script.

    Attributes:
        dataset: source of the samples.
        batch_size: samples of a batch; the last one of an epoch holds the remaining samples.

    Args:
        dataset: map-style dataset; `__getitem__` raises `DataError` for an unusable sample.
        batch_size: samples per batch, over all ranks.
        options: others of `samestep.loader`.

    Raises:
        InputError: a number is invalid, or arguments do not fit together.
        DataError: the dataset is empty.
    """

    def __init__(
        self, dataset: SizedDataset, *, batch_size: int | None = None, pin_memory: bool = False, **options: Any
    ) -> None:
        # The batches of one rank with one microbatch are whole.
        world = World(0, 1, torch.device("cpu"))
        self._loader = Loader(dataset, batch_size=batch_size, microbatches=1, world=world, pin_memory=False, **options)
        self.dataset, self.batch_size = dataset, self._loader.batch_size
        self._pins = pin_memory
        self._begins_at_cursor = True
        self._iterations = 0

    @property
    def cursor(self) -> Cursor:
        """Position after the last batch that was read. Assign a cursor to resume there, at the cost of any other."""
        return self._loader.cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._loader.cursor, self._begins_at_cursor = cursor, True

    def settings_of(self, epoch: int) -> dict[str, int | str]:
        """Return the settings on which the batches of an epoch depend; checkpoints contain them."""
        return self._loader.settings_of(epoch)

    def adopt(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint."""
        return self._loader.adopt(settings)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        return self._loader.samples_of(epoch)

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        self._loader.close()

    def end_epoch(self) -> None:
        """Move the position to the next epoch, if some of the samples of this one have been read."""
        if self.cursor.samples:
            self._loader.cursor = Cursor(self.cursor.epoch + 1)

    def __len__(self) -> int:
        """Number of batches in a complete epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if not self._begins_at_cursor:
            self.end_epoch()
        self._begins_at_cursor = False
        self._iterations += 1
        iteration = self._iterations
        for batch in self._loader:
            if iteration == self._iterations:  # an older iteration beside a newer one moves nothing
                self._loader.cursor = batch.end
            for microbatch in batch.local_microbatches:
                if microbatch.size:  # not every sample of the batch is unusable
                    yield self._pinned(microbatch.data)

    def _pinned(self, data: Any) -> Any:
        if self._pins and accelerator_module().is_available():
            return map_tensors(data, torch.Tensor.pin_memory)
        return data


@overload
def loader(dataset: SizedDataset, *, world: World, **options: Any) -> Loader: ...


@overload
def loader(
    dataset: SizedDataset,
    *,
    world: None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    shuffle: bool = False,
    order: SampleOrder = "auto",
    sampler: Sampler | None = None,
    batch_sampler: Sampler | None = None,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    worker_init_fn: Callable[[int], None] | None = None,
    generator: torch.Generator | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    bad_samples: BadSamples = "stop",
    lengths: Sequence[int] | None = None,
) -> WholeBatches: ...


def loader(dataset: SizedDataset, *, world: World | None = None, **options: Any) -> Loader | WholeBatches:
    """Return an iterable over the batches of one epoch.

    Without `world`, each rank reads whole batches, and the loop gets what the collate function returns, as from torch's
    `DataLoader`: see `WholeBatches`. With the world of `samestep.start`, each rank reads its own microbatches, as
    `samestep.Engine` takes them: see `Loader`.

    Args:
        dataset: map-style dataset.
        world: None for whole batches.
        options: those of `Loader`; without `world`, not `microbatches`, `prepare`, `count_tokens` and
            `keeps_microbatch_size`.
    """
    if world is not None:
        return Loader(dataset, world=world, **options)
    of_engine = [
        name for name in ("microbatches", "prepare", "count_tokens", "keeps_microbatch_size") if name in options
    ]
    if of_engine:
        raise InputError(
            f"a loader of whole batches has no {of_engine[0]}",
            expected="the arguments of torch's DataLoader; samestep.parallel divides the calls of the model",
            fix=f"leave out {of_engine[0]}, or pass world= for samestep.Engine",
            code="E_LOADER",
        )
    return WholeBatches(dataset, **options)


def epochs(batches: Loader | WholeBatches, number: int) -> Iterator[int]:
    """Yield the numbers of the epochs from the position of a loader to `number`, without `number`.

    After a resumption, the first one is the epoch of the checkpoint; if no epoch remains, one line says so. An epoch is
    complete when its batches were read, or the body has left it.

    With a loader for `samestep.Engine`, an epoch is complete when the steps have used all its samples: if the body
    leaves it early, the next iteration continues it, and after a stop request this loop ends with the step.

    Raises:
        InputError: the body used no batch of the loader.
    """
    if batches.cursor.epoch >= number > 0 and _is_main(batches):
        logger.info(
            "this run is complete: %d of %d epochs were trained by earlier starts", batches.cursor.epoch, number
        )
    if isinstance(batches, Loader):
        yield from loop_epochs(batches, number)
        return
    while (begin := batches.cursor).epoch < number:
        yield begin.epoch
        if batches.cursor == begin:
            raise InputError(
                f"no batch of the loader was read in epoch {begin.epoch}",
                "a loop over the loader that samestep.epochs has",
                "pass the loader of the training data to samestep.epochs",
                code="E_LOADER",
            )
        if batches.cursor.epoch == begin.epoch:
            batches.end_epoch()


def _is_main(batches: Loader | WholeBatches) -> bool:
    world = batches.world if isinstance(batches, Loader) else process_state.world
    return world.is_main if world is not None else rank_and_size()[0] == 0
