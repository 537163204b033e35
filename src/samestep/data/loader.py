"""Loader of global batches, one microbatch at a time, from any cursor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain, islice
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol

import numpy
import torch
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Sampler, default_collate

from samestep.config import DEFAULT_PREFETCH, BadSamples
from samestep.data.batch import GlobalBatch, Microbatch, prefetch_to_device
from samestep.data.order import Indices, global_order, grouped_order
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.distributed.signals import die_with_parent
from samestep.distributed.world import World
from samestep.errors import DataError, InputError, SamestepError, message_of
from samestep.microbatches import (
    Cursor,
    Microbatches,
    auto_microbatches,
    microbatch_bounds,
    microbatches_of_short_batch,
    owned_microbatches,
    require_enough_microbatches,
)

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """Map-style dataset: a length, and one sample per index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicrobatchRequest(NamedTuple):
    """Request for one microbatch of a global batch, or for a filler."""

    epoch: int
    number: int
    indices: Indices
    is_filler: bool = False


class FailedMicrobatch(NamedTuple):
    """Error in place of a microbatch; torch would convert a raised error to text between processes."""

    error: Exception


class MicrobatchDataset(torch.utils.data.Dataset[Microbatch | FailedMicrobatch]):
    """Collated microbatches of a dataset.

    The generators of Python, NumPy and torch are seeded by (seed, epoch, sample index) for each sample, and by the
    first sample of the microbatch for collation. Augmentation depends neither on workers nor on ranks.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int, bad_samples: BadSamples = "stop") -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._skips = bad_samples == "skip"

    def __getitem__(self, request: MicrobatchRequest) -> Microbatch | FailedMicrobatch:
        try:
            with preserved_generators():
                return self._microbatch(request)
        except SamestepError as error:
            return FailedMicrobatch(error)

    def _microbatch(self, request: MicrobatchRequest) -> Microbatch:
        samples, skipped = [], []
        for index in request.indices:
            try:
                samples.append(self._sample(request.epoch, int(index)))
            except DataError as error:
                if not self._skips:
                    raise
                skipped.append(error.value)
        size = len(samples)
        samples = samples or [self._substitute(request)]
        seed_generators(derive_seed("collate", self._seed, request.epoch, int(request.indices[0])))
        data = self._collate(samples)
        if request.is_filler:  # its samples are counted in their own microbatch
            return Microbatch(request.number, 0, data, is_filler=True)
        return Microbatch(request.number, size, data, tuple(skipped))

    def _substitute(self, request: MicrobatchRequest) -> Any:
        """Return the next usable sample of the dataset, for a microbatch without one; the same on any rank."""
        size, first = len(self._dataset), int(request.indices[-1])
        for step in range(1, size):
            with suppress(DataError):  # the next sample is tried
                return self._sample(request.epoch, (first + step) % size)
        raise DataError(
            f"none of the {size} samples can be used",
            expected="a dataset with at least one usable sample",
            fix="set bad_samples: stop and read the error of the first sample",
            code="E_NO_USABLE_SAMPLE",
        )

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(derive_seed("sample", self._seed, epoch, index))
        try:
            return self._dataset[index]
        except SamestepError:
            raise  # the message names the sample
        except Exception as error:
            error.add_note(f"while loading sample {index} of the dataset")
            try:
                str(error)  # torch sends an exception of a worker as text
            except Exception:
                raise RuntimeError(message_of(error)) from error
            raise


# Start of torch's warning about more workers than cores.
MANY_WORKERS = "This DataLoader will create"
# Time limit for the end of a worker with a broken connection to be visible.
_WORKER_EXIT_SECONDS = 2.0


class Loader:
    """Iterator over the global batches of one epoch, from the cursor to the end of the data.

    The next iteration is the next epoch with a new order, without a call like `set_epoch`. Each rank loads its own
    microbatches of every global batch. The last batch of an epoch holds the remaining samples, if any.

    Attributes:
        samples: number of samples in a complete epoch, without those that `drop_last` leaves out.
        cursor: end of the last yielded batch. Assign a cursor to resume there; the cost is the same for any cursor.
        skips: whether unusable samples are left out.
        skipped: error lines of the samples left out on this rank; the caller clears the list after reporting.
        counts_tokens: whether `take_counts` counts tokens.

    Args:
        dataset: map-style dataset; `__getitem__` raises `DataError` for an unusable sample.
        batch_size: samples per global batch, over all ranks.
        microbatches: fixed slices per batch. `auto` depends on `batch_size` alone, and suits models with batch norm
            too: the largest power of two up to 8 that leaves at least 32 samples in each, or else 16, or else 1.
        shuffle: use a new order in each epoch, a function of seed and epoch.
        workers: number of worker processes; 0 loads in this process.
        prefetch: microbatches loaded ahead per worker; results depend on neither.
        collate: function from a list of samples to the input of the engine.
        bad_samples: `stop` raises the error of an unusable sample; `skip` leaves the sample out of its microbatch.
        lengths: one length per sample; samples of similar length share a global batch, to reduce padding. The order is
            then a function of seed, epoch, lengths and batch size.
        count_tokens: function from a collated microbatch to its numbers of tokens and of positions with padding.
        drop_last: leave out the last batch of an epoch if it has fewer samples than `batch_size`.
        keeps_microbatch_size: divide a last batch with fewer samples into fewer microbatches of the usual size, for the
            statistics of batch norm, instead of smaller ones. Default: true with `microbatches="auto"`.

    Raises:
        InputError: sizes do not fit together, or ranks outnumber microbatches.
        DataError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int,
        microbatches: Microbatches = "auto",
        world: World,
        seed: int = 0,
        shuffle: bool = False,
        workers: int = 0,
        prefetch: int = DEFAULT_PREFETCH,
        collate: Collate = default_collate,
        bad_samples: BadSamples = "stop",
        lengths: Sequence[int] | None = None,
        count_tokens: Callable[[Any], tuple[int, int]] | None = None,
        drop_last: bool = False,
        keeps_microbatch_size: bool | None = None,
    ) -> None:
        self._keeps_size = microbatches == "auto" if keeps_microbatch_size is None else keeps_microbatch_size
        if microbatches == "auto":
            microbatches = auto_microbatches(batch_size, batch_norm=True)
        require_enough_microbatches(microbatches, world.data.size, batch_size)
        _require_sizes(len(dataset), batch_size, microbatches, drop_last=drop_last)
        if lengths is not None and len(lengths) != len(dataset):
            raise InputError(
                f"there are {len(lengths)} lengths for {len(dataset)} samples",
                "one length per sample",
                "pass lengths in the order of the dataset",
                code="E_LENGTHS",
            )
        self.cursor = Cursor()
        self.batch_size = batch_size
        self.skips = bad_samples == "skip"
        self.skipped: list[str] = []
        self.counts_tokens = count_tokens is not None
        self._count_tokens = count_tokens
        self._counts = (0, 0, 0)
        self._size, self._microbatches = len(dataset), microbatches
        self.samples = self._size - self._size % batch_size if drop_last else self._size
        self._seed, self._shuffle, self._world = seed, shuffle, world
        self._lengths = None if lengths is None else numpy.asarray(lengths, dtype=numpy.int64)
        self._dataset = MicrobatchDataset(dataset, collate, seed, bad_samples)
        self._open(workers, prefetch)
        for callback in world.context.callbacks:
            callback.loader_created(self)

    def with_workers(self, workers: int, prefetch: int) -> Loader:
        """Return a loader of the same data from the same cursor with separate workers; close it independently."""
        other = copy(self)
        other.skipped, other._counts = [], (0, 0, 0)
        other._open(workers, prefetch)
        return other

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        iterator = self._loader._iterator
        if self.workers and iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None

    def _open(self, workers: int, prefetch: int) -> None:
        self.workers, self.prefetch = workers, prefetch
        self._queue = _RequestQueue()
        self._loader: DataLoader[Microbatch | FailedMicrobatch] = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._queue,
            num_workers=workers,
            prefetch_factor=prefetch if workers > 0 else None,
            collate_fn=lambda item: item,
            pin_memory=self._world.device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_init_worker if workers > 0 else None,
            # Forks of the rank, not of the fork server: they end with the rank and need no pickling.
            multiprocessing_context="fork" if workers > 0 else None,
        )

    def __len__(self) -> int:
        """Number of global batches in a complete epoch."""
        return (self.samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[GlobalBatch]:
        epoch = self.cursor.epoch
        if self._lengths is None:
            order_of = partial(global_order, self._size)
        else:
            order_of = partial(grouped_order, self._lengths, self.batch_size)
        order = order_of(seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        starts = range(self.cursor.samples, self.samples, self.batch_size)
        batches = [order[start : start + self.batch_size] for start in starts]
        requests = [self._requests(epoch, batch) for batch in batches]
        self._queue.requests = list(chain.from_iterable(requests))
        microbatches = prefetch_to_device(self._loaded(), self._world.device)
        for start, batch, own in zip(starts, batches, requests, strict=True):
            loaded = list(islice(microbatches, len(own)))
            local = tuple(microbatch for microbatch in loaded if not microbatch.is_filler)
            fillers = tuple(microbatch for microbatch in loaded if microbatch.is_filler)
            stop = start + len(batch)
            self.cursor = Cursor(epoch, stop) if stop < self.samples else Cursor(epoch + 1, 0)
            yield GlobalBatch(Cursor(epoch, start), self.cursor, batch, self._number_of(batch), local, fillers)

    def endless(self) -> Iterator[GlobalBatch]:
        """Yield the batches of one epoch after another."""
        while True:
            yield from self

    def take_counts(self) -> tuple[int, int, int]:
        """Return and reset the numbers of samples, tokens and positions that this rank has loaded."""
        counts, self._counts = self._counts, (0, 0, 0)
        return counts

    def reload(self, batch: GlobalBatch) -> None:
        """Load this rank's microbatches of a batch again in this process, to measure the duration."""
        for request in self._requests(batch.begin.epoch, batch.indices):
            self._dataset[request]

    def _number_of(self, batch: Indices) -> int:
        """Return the number of microbatches of a batch."""
        if not self._keeps_size or len(batch) == self.batch_size:
            return self._microbatches
        return microbatches_of_short_batch(len(batch), self.batch_size, self._microbatches)

    def _requests(self, epoch: int, batch: Indices) -> list[MicrobatchRequest]:
        """Return the requests of this rank: for its non-empty microbatches, and for fillers."""
        number, ranks = self._number_of(batch), self._world.data.size
        bounds = microbatch_bounds(len(batch), number)

        def filled(rank: int) -> list[int]:
            owned = owned_microbatches(number, ranks, rank)
            return [number for number in owned if bounds[number][0] < bounds[number][1]]

        own = filled(self._world.data.rank)
        local = [MicrobatchRequest(epoch, number, batch[slice(*bounds[number])]) for number in own]
        if not self._world.mesh_shape.forward_communicates:
            return local
        # As many microbatches as any other rank. Two samples if possible: batch norm cannot train on one.
        filler = MicrobatchRequest(epoch, 0, batch[:2], is_filler=True)
        return local + [filler] * (max(len(filled(rank)) for rank in range(ranks)) - len(own))

    def _loaded(self) -> Iterator[Microbatch]:
        for item in self._items():
            if isinstance(item, FailedMicrobatch):
                raise item.error
            self.skipped += item.skipped
            if self._count_tokens is not None and item.size:
                samples, tokens, positions = self._counts
                more_tokens, more_positions = self._count_tokens(item.data)
                self._counts = (samples + item.size, tokens + more_tokens, positions + more_positions)
            yield item

    def _items(self) -> Iterator[Microbatch | FailedMicrobatch]:
        try:
            yield from self._loader
        except (ConnectionError, EOFError) as error:
            # A worker killed during a transfer breaks the connection shortly before its end is visible. Then torch
            # raises the error, here or in its handler of SIGCHLD.
            iterator, deadline = self._loader._iterator, time.monotonic() + _WORKER_EXIT_SECONDS
            while iterator is not None and time.monotonic() < deadline:
                for worker in iterator._workers:  # type: ignore[attr-defined]
                    if not worker.is_alive():
                        raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
                time.sleep(0.05)
            raise


def _require_sizes(samples: int, batch_size: int, microbatches: int, *, drop_last: bool) -> None:
    """Require samples for each batch and microbatch."""
    if batch_size < microbatches:
        raise InputError(
            f"batch_size is {batch_size} but there are {microbatches} microbatches, so some would be empty",
            "batch_size >= microbatches (batch_size counts the samples of all ranks together)",
            f"batch_size={microbatches} or more, or microbatches={max(1, batch_size)} or fewer",
            code="E_BATCH_SIZE",
        )
    if samples == 0:
        raise DataError(
            "the dataset is empty", "at least one sample", "check the path and the filters", code="E_EMPTY_DATASET"
        )
    if drop_last and samples < batch_size:
        raise DataError(
            f"the dataset has {samples} samples, fewer than one batch of {batch_size}, and drop_last is set",
            expected="at least one complete batch",
            fix=f"batch_size={samples} or less, or leave drop_last out",
            code="E_EMPTY_DATASET",
        )


loader = Loader  # public name: `for batch in samestep.loader(...)`


class _RequestQueue(Sampler[MicrobatchRequest]):
    """Sampler with the requests of the next iteration; workers persist between iterations."""

    def __init__(self) -> None:
        self.requests: list[MicrobatchRequest] = []

    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return iter(self.requests)


def _init_worker(number: int) -> None:
    die_with_parent(os.getppid())
    # torch resets SIGTERM in workers to its default; a rank that finishes its step on SIGTERM still needs data.
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # the hook of multiprocessing


def _send_failure(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """In a loader worker: send an error in place of data that cannot be pickled; the rank would wait for the data."""
    number, data = item
    if isinstance(data, ExceptionWrapper):  # of an exception whose class only the worker has
        failure: Exception = RuntimeError(f"Caught {data.exc_type.__name__} {data.where}.\nOriginal {data.exc_msg}")
    else:
        failure = DataError(
            f"a loader worker cannot send a microbatch: {message_of(error)}",
            expected="samples of tensors, numbers, strings, and lists, tuples and dicts of these",
            fix="return plain values from the dataset and the collate function, or load without workers: --workers 0",
            code="E_NOT_PICKLABLE",
        )
    queue.put((number, FailedMicrobatch(failure)))
