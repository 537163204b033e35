"""Loader of global batches, one microbatch at a time, from any cursor, and epochs of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain, islice, tee
from typing import Any

import numpy
import torch.utils.data
from torch.utils.data import DataLoader, default_collate

from samestep.config import DEFAULT_PREFETCH, BadSamples, SampleOrder
from samestep.data.batch import GlobalBatch, Microbatch, digest_of, prefetch_to_device
from samestep.data.epoch_order import require_compatible, require_samples
from samestep.data.microbatch_dataset import (
    PROBE,
    BatchPlanner,
    Collate,
    FailedMicrobatch,
    MicrobatchDataset,
    MicrobatchLoader,
    MicrobatchRequest,
    RequestQueue,
    SizedDataset,
    end_workers,
    init_worker,
    read,
)
from samestep.data.order import Indices, Order, global_order, grouped_order, repeats_of, resolve_order
from samestep.data.samplers import Sampler, draw, drawn_order
from samestep.data.streams.dataset import StreamDataset
from samestep.distributed.devices import is_accelerator
from samestep.distributed.status import WaitClock
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.microbatches import (
    Cursor,
    Microbatches,
    owned_microbatches,
    require_integer,
    require_position,
    require_shares,
    resolve_sizes,
)


class Loader:
    """Iterable over the global batches of one epoch, from the cursor to the end of the data.

    The words are those of torch's `DataLoader`. Each rank loads its own microbatches of every global batch. The last
    batch of an epoch holds the remaining samples, if any.

    `Engine.step` moves the cursor to the end of the batch. An iteration begins at the cursor, so after a complete epoch
    of steps the next one has a new order, without a call like `set_epoch`, and an iteration that took no step is
    without effect. Within a loop that steps batches of this loader, another iteration begins at the start of the epoch.

    If the dataset has a method `set_epoch(epoch)`, each process calls the method before the samples of a microbatch
    are read. The length of the dataset can change between epochs.

    Attributes:
        dataset: source of the samples.
        num_workers: number of worker processes.
        prefetch_factor: microbatches loaded ahead per worker.
        stopped: whether the last step received a stop request.
        ends_on_stop: an iteration ends after a step that received a stop request.
        skips: whether unusable samples are left out.
        skipped: error lines of the samples left out on this rank; the caller clears the list after reporting.
        counts_tokens: whether `take_counts` counts tokens.
        stream: the dataset, if the order is that of its files.
        planner: divides global batches into microbatches, and requests those of this rank.
        world: the ranks.

    Args:
        dataset: map-style dataset; `__getitem__` raises `DataError` for an unusable sample.
        batch_size: samples per global batch, over all ranks.
        microbatches: fixed slices per batch. `auto` depends on `batch_size` alone, and suits models with batch norm
            too: the largest power of two up to 8 that leaves at least 32 samples in each, or else 16, or else 1.
        seed: seed of order and augmentation, 0 if omitted.
        shuffle: use a new order in each epoch, a function of seed and epoch.
        order: kind of order with `shuffle`: `shuffled`, `keyed` (constant memory), or `auto`, which is `keyed` for more
            than 10,000,000 samples. With `auto`, a `StreamDataset` has an order of its own.
        sampler: function of (seed, epoch) that returns the indices of an epoch, a sampler of torch, or a list. A
            sampler is drawn once per epoch, with generators that are seeded by seed and epoch.
        batch_sampler: like `sampler`, with lists of indices: global batches of one size.
        num_workers: number of worker processes; 0 loads in this process.
        collate_fn: function from a list of samples to the input of the engine; None for torch's default.
        pin_memory: pin memory if the device is a GPU.
        drop_last: leave out the last batch of an epoch if it has fewer samples than `batch_size`.
        worker_init_fn: called in each worker with the number of the worker.
        generator: the initial seed of the generator is used as `seed`.
        prefetch_factor: microbatches loaded ahead per worker; no result depends on workers.
        persistent_workers: keep the workers until the next epoch. They do not see changes of the dataset other than by
            `set_epoch`, or of the length.
        bad_samples: `stop` raises the error of an unusable sample; `skip` leaves the sample out of its microbatch.
        lengths: one length per sample; samples of similar length share a global batch, to reduce padding. The order is
            then a function of seed, epoch, lengths and batch size.
        count_tokens: function from a collated microbatch to its numbers of tokens and of positions with padding.
        prepare: function from a collated microbatch on the device to the data of the engine, such as a normalization of
            images that are loaded as bytes. Runs in the rank, without random numbers of its own.
        keeps_microbatch_size: divide a last batch with fewer samples into fewer microbatches of the usual size, for the
            statistics of batch norm, instead of smaller ones. Default: true with `microbatches="auto"`.

    Raises:
        InputError: a number is invalid, arguments or sizes do not fit together, or ranks outnumber microbatches.
        DataError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int | None = None,
        microbatches: Microbatches = "auto",
        world: World,
        seed: int | None = None,
        shuffle: bool = False,
        order: SampleOrder = "auto",
        sampler: Sampler | None = None,
        batch_sampler: Sampler | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = True,
        drop_last: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        bad_samples: BadSamples = "stop",
        lengths: Sequence[int] | None = None,
        count_tokens: Callable[[Any], tuple[int, int]] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        keeps_microbatch_size: bool | None = None,
    ) -> None:
        require_compatible(dataset, locals())
        if generator is None:
            self._seed = require_integer("seed", seed or 0, at_least=0, at_most=2**64 - 1, example=0)
        else:
            self._seed = generator.initial_seed()
        self._sampler, self._draws_batches = sampler, batch_sampler is not None
        if batch_sampler is not None:
            self._sampler = batch_sampler
            batch_size = len(next(iter(draw(batch_sampler, dataset, seed=self._seed, epoch=0)), ()))
        self.batch_size, self._microbatches = resolve_sizes(batch_size, microbatches, world.data.size)
        if world.data.uneven_shares is not None:
            require_shares(world.data.uneven_shares, world.data.size, self._microbatches)
        keeps_size = microbatches == "auto" if keeps_microbatch_size is None else keeps_microbatch_size
        self.dataset, self._shuffle, self._drop_last, self.world = dataset, shuffle, drop_last, world
        self._lengths = None if lengths is None else numpy.asarray(lengths, dtype=numpy.int64)
        self._reader = MicrobatchDataset(dataset, collate_fn or default_collate, self._seed, bad_samples)
        self._kind: SampleOrder = order if shuffle and lengths is None else "shuffled"
        has_indices = self._sampler is not None or lengths is not None
        has_own_order = order == "auto" and not has_indices
        self.stream = dataset if isinstance(dataset, StreamDataset) and has_own_order else None
        self._epoch_size, self._probed = ((-1, -1), 0), ((-1, -1), "")  # each with epoch and length of the dataset
        self.skips, self.skipped = bad_samples == "skip", list[str]()
        self.waits, self.planned_epochs = WaitClock(), 0  # 0 for an unknown number
        self.counts_tokens, self._count_tokens = count_tokens is not None, count_tokens
        self._counts, self._prepare = (0, 0, 0), prepare
        equal_counts = world.mesh_shape.forward_communicates
        self.planner = BatchPlanner(self.batch_size, self._microbatches, keeps_size, equal_counts, world)
        self._pins, self._persistent, self._worker_init_fn = pin_memory, persistent_workers, worker_init_fn
        self._open(num_workers, DEFAULT_PREFETCH if prefetch_factor is None else prefetch_factor)
        self.cursor = Cursor()
        self.samples_of(0)
        for callback in world.context.callbacks:
            callback.loader_created(self)

    @property
    def cursor(self) -> Cursor:
        """Position after the last step. Assign a cursor to resume there; the cost is the same for any cursor."""
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._cursor, self._stepped = cursor, 0

    def end_step(self, batch: GlobalBatch, *, stop: bool = False) -> None:
        """Move the cursor to the end of a batch; `Engine.step` calls this method."""
        self._cursor, self._stepped, self.stopped = batch.end, batch.iteration, stop

    def settings_of(self, epoch: int) -> dict[str, int | str]:
        """Return the settings on which the batches of an epoch depend; checkpoints contain them."""
        return {
            "samples": self.samples_of(epoch),
            "dataset": len(self.dataset),
            "batch_size": self.batch_size,
            "microbatches": self._microbatches,
            "keeps_microbatch_size": self.planner.keeps_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "order": resolve_order(self._kind, len(self.dataset)),
            "sampler": "" if self._sampler is None else digest_of(self._order(epoch)[: self.samples_of(epoch)]),
            "lengths": digest_of(self._lengths),
            **({} if self.stream is None else self.stream.settings(shuffle=self._shuffle)),
        }

    def adopt(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint; without `order`, it is `shuffled`, and `auto` becomes `shuffled`."""
        if "order" not in settings and self._kind == "auto":
            self._kind = "shuffled"
        return {"order": "shuffled", **settings}

    def with_workers(self, num_workers: int, prefetch_factor: int) -> Loader:
        """Return a loader of the same data from the same cursor with separate workers; close it independently."""
        other = copy(self)
        other.skipped, other._counts = [], (0, 0, 0)
        other._open(num_workers, prefetch_factor)
        other.cursor = self.cursor
        return other

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        for loader in (*self._idle, *self._used):
            end_workers(loader)

    def _open(self, num_workers: int, prefetch_factor: int) -> None:
        self.num_workers = require_integer("num_workers", num_workers, at_least=0, example=4)
        self.prefetch_factor = require_integer("prefetch_factor", prefetch_factor, at_least=1, example=DEFAULT_PREFETCH)
        self.stopped = self.ends_on_stop = False
        self._idle, self._used, self._forked_size = list[MicrobatchLoader](), list[MicrobatchLoader](), 0
        self._iterations, self._running = 0, set[int]()

    def _data_loader(self) -> MicrobatchLoader:
        """Return a loader of microbatches without requests, with its own workers."""
        if self._idle and len(self.dataset) == self._forked_size:
            return self._idle.pop()
        while self._idle:
            end_workers(self._idle.pop())
        self._forked_size, has_workers = len(self.dataset), self.num_workers > 0
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=RequestQueue(),
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if has_workers else None,
            collate_fn=lambda item: item,
            pin_memory=self._pins and is_accelerator(self.world.device),
            persistent_workers=has_workers,  # `_items` ends the workers
            worker_init_fn=partial(init_worker, self.dataset, self._worker_init_fn) if has_workers else None,
            # Forks of the rank, not of the fork server: they end with the rank and need no pickling.
            multiprocessing_context="fork" if has_workers else None,
            generator=torch.Generator(),  # an iteration of one rank must not draw from the global generator
        )

    @property
    def samples(self) -> int:
        """Number of samples in the epoch of the cursor, without those that `drop_last` leaves out."""
        return self.samples_of(self.cursor.epoch)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        if (epoch, len(self.dataset)) != self._epoch_size[0]:
            self._reader.set_epoch(epoch)
            self._note_size(epoch, len(self.dataset) if self._sampler is None else len(self._drawn(epoch)))
        return self._epoch_size[1]

    def _note_size(self, epoch: int, samples: int) -> int:
        require_samples(samples, self.batch_size, self._lengths, drop_last=self._drop_last)
        samples -= samples % self.batch_size if self._drop_last else 0
        self._epoch_size = (epoch, len(self.dataset)), samples
        return samples

    def _drawn(self, epoch: int) -> Indices:
        assert self._sampler is not None
        size = self.batch_size if self._draws_batches else None
        return drawn_order(self._sampler, self.dataset, seed=self._seed, epoch=epoch, batch_size=size)

    def _order(self, epoch: int) -> Order:
        """Return the samples of an epoch in the order of use, with those that `drop_last` leaves out."""
        self._reader.set_epoch(epoch)
        size, seed, shuffle = len(self.dataset), self._seed, self._shuffle
        order: Order
        if self.stream is not None:
            order = self.stream.order(self.planner.slot_sizes(size), seed=seed, epoch=epoch, shuffle=shuffle)
        elif self._sampler is not None:
            order = self._drawn(epoch)
        elif self._lengths is not None:
            order = grouped_order(self._lengths, self.batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
        else:
            order = global_order(size, seed=seed, epoch=epoch, shuffle=shuffle, order=self._kind)
        self._note_size(epoch, size if self._sampler is None else len(order))
        return order

    def __len__(self) -> int:
        """Number of global batches in a complete epoch."""
        return (self.samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self._batches()

    def complete_epoch(self) -> Iterator[GlobalBatch]:
        """Yield all batches of the epoch of the cursor, for an evaluation."""
        return self._batches(is_complete=True)

    def _batches(self, *, is_complete: bool = False) -> Iterator[GlobalBatch]:
        begin, epoch = self.cursor, self.cursor.epoch
        # Within a loop that steps batches of this loader, the cursor is the position of that loop.
        if is_complete or self._stepped in self._running:
            begin = Cursor(epoch)
        order, size, samples = self._order(epoch), len(self.dataset), self.samples_of(epoch)
        require_position(begin, samples, self.batch_size)
        iteration = self._iterations = self._iterations + 1
        repeats = repeats_of(order[:]) if self._sampler is not None else None
        positions = range(begin.samples, samples, self.batch_size)
        plans, requested = tee(self.planner.plans(epoch, order, repeats, positions))
        # Every rank reads the first, middle and last sample once, to compare the datasets of ranks.
        probed = numpy.unique([0, size // 2, size - 1])
        key = (epoch if self._reader.epoch_hooks else 0, size)
        is_known = self.world.size == 1 or self.stream is not None  # a stream has a fingerprint
        is_known |= self._probed[0] == key
        probes = [] if is_known else [MicrobatchRequest(epoch, PROBE, probed)]
        requests = chain(probes, chain.from_iterable(plan.requests for plan in requested))
        data = self.world.data
        ahead = 1 + len(owned_microbatches(self._microbatches, data.shares, data.rank))  # all of the next step
        microbatches = prefetch_to_device(self._loaded(requests), self.world.device, ahead)
        self._running.add(iteration)
        try:
            for probe in islice(microbatches, len(probes)):
                self._probed = key, probe.data
            for plan in plans:
                with self.waits.wait():
                    loaded = [self._prepared(microbatch) for microbatch in islice(microbatches, len(plan.requests))]
                yield GlobalBatch(
                    Cursor(epoch, plan.span.start),
                    Cursor(epoch, plan.span.stop) if plan.span.stop < samples else Cursor(epoch + 1),
                    plan.indices,
                    self.planner.number_of(len(plan.indices)),
                    tuple(microbatch for microbatch in loaded if not microbatch.is_filler),
                    tuple(microbatch for microbatch in loaded if microbatch.is_filler),
                    f"{size} samples (hashes of samples {', '.join(map(str, probed))}: {self._probed[1]})"
                    if self.stream is None
                    else f"{size} samples in files {self.stream.fingerprint}",
                    self,
                    iteration,
                )
                if self.ends_on_stop and self.stopped and self._stepped == iteration:
                    return
        finally:
            self._running.discard(iteration)
        if self._stepped == iteration:  # the last batch can have no step
            self._cursor = Cursor(epoch + 1)

    def endless(self) -> Iterator[GlobalBatch]:
        """Yield the batches of one epoch after another."""
        while True:
            yield from self

    def take_counts(self) -> tuple[int, int, int]:
        """Return and reset the numbers of samples, tokens and positions that this rank has loaded."""
        counts, self._counts = self._counts, (0, 0, 0)
        return counts

    def _loaded(self, requests: Iterable[MicrobatchRequest]) -> Iterator[Microbatch]:
        for item in self._items(requests):
            if isinstance(item, FailedMicrobatch):
                raise item.error
            self.skipped += item.skipped
            if self._count_tokens is not None and item.size:
                samples, tokens, positions = self._counts
                more_tokens, more_positions = self._count_tokens(item.data)
                self._counts = (samples + item.size, tokens + more_tokens, positions + more_positions)
            yield item

    def _prepared(self, microbatch: Microbatch) -> Microbatch:
        return microbatch if self._prepare is None else microbatch._replace(data=self._prepare(microbatch.data))

    def _items(self, requests: Iterable[MicrobatchRequest]) -> Iterator[Microbatch | FailedMicrobatch]:
        """Yield the items of requests from new workers, or from persistent ones that no other iteration uses."""
        loader = self._data_loader()
        assert isinstance(loader.sampler, RequestQueue)
        loader.sampler.requests = requests
        self._used.append(loader)
        try:
            yield from read(loader)
        finally:
            loader.sampler.requests = ()
            self._used.remove(loader)
            if self._persistent:
                self._idle.append(loader)
            else:
                end_workers(loader)


def loop_epochs(batches: Loader, number: int) -> Iterator[int]:
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
                code="E_LOADER",
            )
