"""Loader of batches that every rank sees whole, and epochs of a training loop."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.cursor import Cursor
from samestep.data.epoch_order import EpochOrder
from samestep.data.own_rows import BatchRanks, OwnRows, own_iterator
from samestep.data.sample_hashes import changed_samples
from samestep.distributed.logging import logger
from samestep.distributed.rng import PassedGenerator, passed_generators
from samestep.distributed.stop_request import StoppedLoop
from samestep.errors import InputError
from samestep.launcher.process_state import process_state, rank_and_size

_MANY = 2**62  # batches of a sampler without a length


class WholeBatches:
    """Iterable over the batches of one epoch, as the collate function returns them.

    The batches are equal on every rank. Each rank reads its own rows of a batch, and small tensors
    are gathered. The first batch is read whole, and decides whether batches can be read so. Batches
    are those of torch's `DataLoader`, with one exception: if the data set draws random numbers,
    those of a sample are a function of (seed, epoch, index) on any number of processes.

    Each iteration is an epoch, also after one that was left early.

    Attributes:
        dataset: source of the samples.
        batch_size: samples of a batch; the last one of an epoch can have fewer.
        between_batches: called between two batches of an epoch, for a loop that can end there.

    Args:
        loader: torch's loader of the batches.
        order: order of the samples as a function of (seed, epoch); None for the order of torch's
            loader.
        ranks: returns the ranks that read together, or None; called by the first iteration.
        line: line of the script that made the loader; a loader that it makes again reads as the
            first one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        order: EpochOrder | None,
        ranks: Callable[[], BatchRanks | None],
        *,
        line: Hashable = None,
    ) -> None:
        self._line = line
        self._loader = copy.copy(loader)  # torch's own iterators remain for the script
        self._loader._get_iterator = self._iterator  # type: ignore[method-assign]
        self._loader._iterator = None
        self._order = order
        self._ranks = ranks
        self._state = OwnRows(None)
        self._has_ranks = False
        self.dataset = loader.dataset
        # With a batch sampler of the script there is no size: the cursor counts batches.
        self.batch_size = loader.batch_size or 1 if order is None else order.batch_size
        self._cursor = Cursor()
        self._begins_at_cursor = True
        self._iterations = 0
        # Generators at the begin of the epoch, with the order of torch.
        self._begin: list[torch.Tensor] | None = None
        self._resumed: list[torch.Tensor] | None = None
        self._forked_size = -1  # of the data set in persistent workers
        # Weak: the workers of an iteration that the script has left end with their iterator.
        self._running: weakref.ref[_BaseDataLoaderIter] | None = None
        self.between_batches: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's loader, such as `sampler` or `num_workers`."""
        # A copy asks for private names before `_loader` is set, which would have no end.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def cursor(self) -> Cursor:
        """Position after the last batch that was read. Assign a cursor to resume there.

        With an order of (seed, epoch), the cost is the same for any cursor. With the order of
        torch's loader, a batch counts `batch_size` samples, and earlier indices of the epoch are
        drawn again.
        """
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._begins_at_cursor = True

    def settings_of(self, epoch: int) -> dict[str, int | str]:
        """Return the settings on which the batches of an epoch depend; checkpoints contain them."""
        if self._order is not None:
            return self._order.settings_of(epoch)
        return {"samples": self.samples_of(epoch), "batch_size": self.batch_size}

    @property
    def probe(self) -> dict[str, Any] | None:
        """Hashes of some samples of the first batch that was read; None before it."""
        decision = self._state.decision
        return None if decision is None else decision.probe

    def changed_samples(self, probe: Mapping[str, Any]) -> list[Any]:
        """Return the indices of the samples of a probe with other contents now."""
        return changed_samples(self._loader, probe, sets_epoch=self._state.seed is not None)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        if self._order is not None:
            return self._order.samples_of(epoch)
        try:
            return len(self._loader) * self.batch_size
        except TypeError:
            return _MANY

    def state_dict(self) -> dict[str, Any]:
        """Return the states from which torch's order of the epoch can be drawn, and own ones.

        Generators of the loader and its samplers alone: others are those of the script.
        """
        own = [generator.state() for generator in self._own_generators()]
        if self._begin is None:
            return {"own": own}
        return {"begin": self._begin, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`; assign the cursor too."""
        self._resumed = state.get("begin")
        for generator, saved in zip(self._own_generators(), state.get("own", ()), strict=False):
            generator.set_state(saved)

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint needs `state_dict`: the order is that of torch's loader."""
        return self._order is None

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        running = None if self._running is None else self._running()
        if running is not None and hasattr(running, "_shutdown_workers"):
            running._shutdown_workers()
        self._loader._iterator = None

    def end_epoch(self) -> None:
        """Move the position to the next epoch, if samples of this one have been read."""
        if self._cursor.samples:
            self._cursor = Cursor(self._cursor.epoch + 1)

    def __len__(self) -> int:
        """Number of batches in a complete epoch."""
        if self._order is None:
            return len(self._loader)
        return (self._order.samples_of(self._cursor.epoch) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if not self._begins_at_cursor:
            self.end_epoch()
        self._begins_at_cursor = False
        self._iterations += 1
        iteration = self._iterations
        # Not in the generator: torch draws a seed before the first batch, as loaders in `zip` do.
        return self._batches(iteration, self._cursor, self._started(self._cursor))

    def _batches(self, iteration: int, begin: Cursor, started: Iterator[Any]) -> Iterator[Any]:
        samples = begin.samples
        every = _MANY if self._order is None else self._order.samples_of(begin.epoch)
        for number, batch in enumerate(started, start=1):
            samples = begin.samples + number * self.batch_size
            if iteration == self._iterations:  # an older iteration beside a newer one moves nothing
                self._cursor = Cursor(begin.epoch, samples)
                if samples >= every:
                    self._cursor = Cursor(begin.epoch + 1)
            yield batch
            is_last = samples >= self.samples_of(begin.epoch)
            if self.between_batches is not None and iteration == self._iterations and not is_last:
                self.between_batches()
        if iteration == self._iterations and self._cursor.epoch == begin.epoch and samples:
            self._cursor = Cursor(begin.epoch + 1)

    def _started(self, begin: Cursor) -> Iterator[Any]:
        """Start an iteration of torch's loader at a position."""
        state = self._state
        if not self._has_ranks:
            state.ranks = self._ranks()
            state.is_resumed = begin != Cursor()
            self._has_ranks = True
            if state.ranks is not None and self._line is not None:
                state.decisions, state.key = state.ranks.decisions_of(
                    self.dataset, self._loader.collate_fn, self._line
                )
        if self._order is not None:
            size = len(self.dataset)  # type: ignore[arg-type]
            # Persistent workers have a copy of the data set, which does not grow with this one.
            if size != self._forked_size:
                self._forked_size = size
                self._loader._iterator = None
            self._order.cursor = begin
            state.seed = self._order.seed
            state.epoch = begin.epoch
            return iter(self._loader)
        state.leaves_out = begin.samples // self.batch_size
        generators = self._generators()
        now = [generator.state() for generator in generators]
        if not state.leaves_out or self._resumed is None:
            self._begin = now
            return iter(self._loader)
        self._begin = self._resumed
        self._resumed = None
        for generator, saved in zip(generators, self._begin, strict=True):
            generator.set_state(saved)
        iterator = iter(self._loader)
        # The iterator has drawn the order up to the position.
        for generator, saved in zip(generators, now, strict=True):
            generator.set_state(saved)
        return iterator

    def _generators(self) -> list[PassedGenerator]:
        """Return the generators from which torch's loader and its sampler can draw an order."""
        return [*passed_generators(torch.device("cpu")), *self._own_generators()]

    def _own_generators(self) -> list[PassedGenerator]:
        generators = []
        seen = set[int]()
        for owner in (self._loader, self._loader.sampler, self._loader.batch_sampler):
            one = getattr(owner, "__dict__", {}).get("generator")
            if isinstance(one, torch.Generator) and id(one) not in seen:
                seen.add(id(one))
                set_state: Any = one.set_state  # which returns the generator
                generators.append(PassedGenerator(one.get_state, set_state))
        return generators

    def _iterator(self) -> _BaseDataLoaderIter:
        iterator = own_iterator(self._loader, self._state)
        self._running = weakref.ref(iterator)
        return iterator


def whole_batches(
    dataset: Any, options: Mapping[str, Any], ranks: Callable[[], BatchRanks | None], line: Hashable
) -> WholeBatches:
    """Return the loader of a data set, or of a loader of torch.

    Args:
        dataset: map-style data set, or a loader of torch.
        options: all arguments of `samestep.loader`.
        ranks: see `WholeBatches`.
        line: see `WholeBatches`.

    Raises:
        InputError: arguments do not fit together.
        DataError: the data set is empty.
    """
    if isinstance(dataset, DataLoader):
        return WholeBatches(dataset, None, ranks, line=line)
    arguments = {name: options[name] for name in _OF_TORCH}
    if isinstance(dataset, IterableDataset) or options["batch_size"] is None:
        for name in ("shuffle", "sampler", "batch_sampler", "generator", "drop_last"):
            if options[name] is not None:
                arguments[name] = options[name]
        arguments["batch_size"] = options["batch_size"]
        return WholeBatches(DataLoader(dataset, **arguments), None, ranks, line=line)
    order = EpochOrder(dataset, options)
    if arguments["num_workers"] and arguments["multiprocessing_context"] is None:
        # Forks of the rank, not of the fork server: they end with the rank and need no pickling.
        arguments["multiprocessing_context"] = "fork"
    # torch draws a seed of workers, which must not change the script's generators.
    arguments["generator"] = torch.Generator()
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=order, **arguments)
    return WholeBatches(loader, order, ranks, line=line)


_OF_TORCH = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def epochs(batches: WholeBatches, number: int) -> Iterator[int]:
    """Yield the numbers of the epochs from the position of a loader to `number`, without `number`.

    After a resumption, the first one is the epoch of the checkpoint; if none remains, one line
    reports this. An epoch is complete when its batches were read, or the body has left it.
    `samestep.request_stop` ends the loop and the script.

    Raises:
        InputError: the body used no batch of the loader.
        SystemExit: the loop ended on request, with exit code 130.
    """

    def end_loop() -> None:
        if is_stopping():
            raise StoppedLoop

    return stoppable_epochs(batches, number, end_loop)


def stoppable_epochs(
    batches: WholeBatches, number: int, end_loop: Callable[[], None]
) -> Iterator[int]:
    """Yield the numbers of epochs as `epochs`, with a function between batches and before epochs.

    Args:
        batches: loader of the training data.
        number: number of epochs.
        end_loop: raises an exception if `is_stopping`, and the loop can end.
    """
    batches.between_batches = end_loop
    try:
        world = process_state.world
        is_main = rank_and_size()[0] == 0 if world is None else world.is_main
        if batches.cursor.epoch >= number > 0 and is_main:
            logger.info(
                "this run is complete: %d of %d epochs were trained by earlier starts",
                batches.cursor.epoch,
                number,
            )
        while (begin := batches.cursor).epoch < number:
            end_loop()
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
    finally:
        batches.between_batches = None


def is_stopping() -> bool:
    """Whether a rank has requested the end of the loop; equal on all ranks.

    Ranks send requests with other messages.
    """
    world = process_state.world
    view = process_state.view
    if world is None:
        return False
    if world.size == 1:
        return world.stop_requested
    return view is not None and view.is_stopping
