"""Microbatches of a dataset: random numbers seeded per sample, skipped samples, loader workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, Sampler, Subset, get_worker_info

from samestep.config import BadSamples
from samestep.data.batch import Microbatch, digest_of
from samestep.data.order import Indices, Order
from samestep.data.streams.dataset import BatchSizes
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.distributed.signals import die_with_parent
from samestep.distributed.world import World
from samestep.errors import DataError, SamestepError
from samestep.microbatches import microbatch_bounds, owned_microbatches, rank_count
from samestep.report_limits import message_of

Collate = Callable[[list[Any]], Any]
PROBE = -1  # number in a request for the hashes of some samples
_WORKER_EXIT_SECONDS = 2.0  # time limit for the end of a worker with a broken connection to be visible


class SizedDataset(Protocol):
    """Map-style dataset: a length, and one sample per index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicrobatchRequest(NamedTuple):
    """Request for one microbatch of a global batch, for a filler, or for the hashes of samples (`PROBE`)."""

    epoch: int
    number: int
    indices: Indices
    repeats: Indices | None = None  # how often each index occurs before in the epoch; None for never
    is_filler: bool = False


class FailedMicrobatch(NamedTuple):
    """Error in place of a microbatch; torch would convert a raised error to text between processes."""

    error: Exception


class MicrobatchDataset(torch.utils.data.Dataset[Microbatch | FailedMicrobatch]):
    """Collated microbatches of a dataset.

    The generators of Python, NumPy and torch are seeded by (seed, epoch, sample index) for each sample, and by the
    first sample of the microbatch for collation. Augmentation depends neither on workers nor on ranks. A sample that a
    sampler draws again in the same epoch has other random numbers.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int, bad_samples: BadSamples = "stop") -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed
        self._skips = bad_samples == "skip"

    @property
    def epoch_hooks(self) -> list[Callable[[int], None]]:
        """The methods `set_epoch` of the dataset."""
        return [hook for dataset in _parts(self.dataset) if callable(hook := getattr(dataset, "set_epoch", None))]

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset, if defined, with generators that are seeded by seed and epoch."""
        if hooks := self.epoch_hooks:
            with preserved_generators():
                seed_generators(derive_seed("sample", self._seed, epoch))
                for hook in hooks:
                    hook(epoch)

    def __getitem__(self, request: MicrobatchRequest) -> Microbatch | FailedMicrobatch:
        try:
            # For each microbatch, not once: other loaders of this process can read the same dataset in other epochs.
            self.set_epoch(request.epoch)
            with preserved_generators():
                return self._microbatch(request)
        except SamestepError as error:
            return FailedMicrobatch(error)

    def _microbatch(self, request: MicrobatchRequest) -> Microbatch:
        if request.number == PROBE:
            return Microbatch(PROBE, 0, " ".join(map(self._digest_of_sample, request.indices)))
        samples, skipped, left_out = [], [], []
        repeats = numpy.zeros_like(request.indices) if request.repeats is None else request.repeats
        for index, repeat in zip(request.indices, repeats, strict=True):
            try:
                samples.append(self._sample(request.epoch, int(repeat), int(index)))
            except DataError as error:
                if not self._skips:
                    raise
                skipped.append(error.value)
                left_out.append(int(index))
        size, samples = len(samples), samples or [self._substitute(request)]
        facts = _facts(request.epoch, int(request.indices[0]), int(repeats[0]))
        seed_generators(derive_seed("collate", self._seed, *facts))
        data = self._collate(samples)
        if request.is_filler:  # its samples are counted in their own microbatch
            return Microbatch(request.number, 0, data, is_filler=True)
        return Microbatch(request.number, size, data, tuple(skipped), left_out=tuple(left_out))

    def _substitute(self, request: MicrobatchRequest) -> Any:
        """Return the next usable sample of the dataset, for a microbatch without one; the same on any rank."""
        size, first = len(self.dataset), int(request.indices[-1])
        for step in range(1, size):
            with suppress(DataError):  # the next sample is tried
                return self._sample(request.epoch, 0, (first + step) % size)
        raise DataError(
            f"none of the {size} samples can be used",
            expected="a dataset with at least one usable sample",
            fix="set bad_samples: stop and read the error of the first sample",
            code="E_EMPTY_DATASET",
        )

    def _digest_of_sample(self, index: int) -> str:
        try:
            return digest_of(self._sample(0, 0, int(index)))
        except Exception:  # boundary: raised with the microbatch of the sample, if an epoch has it
            return "unusable"

    def _sample(self, epoch: int, repeat: int, index: int) -> Any:
        seed_generators(derive_seed("sample", self._seed, *_facts(epoch, index, repeat)))
        try:
            return self.dataset[index]
        except SamestepError:
            raise  # the message names the sample
        except Exception as error:
            error.add_note(f"while loading sample {index} of the dataset")
            try:
                str(error)  # torch sends an exception of a worker as text
            except Exception:
                raise RuntimeError(message_of(error)) from error
            raise


def _facts(epoch: int, index: int, repeat: int) -> tuple[int, ...]:
    return (epoch, index, repeat) if repeat else (epoch, index)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, or the datasets that torch's `Subset` and `ConcatDataset` combine."""
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _parts(part)
    else:
        yield dataset


MicrobatchLoader = torch.utils.data.DataLoader[Microbatch | FailedMicrobatch]


class RequestQueue(Sampler[MicrobatchRequest]):
    """Sampler with the requests of the next iteration; workers can persist between iterations."""

    requests: Iterable[MicrobatchRequest] = ()

    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return iter(self.requests)


def read(loader: MicrobatchLoader) -> Iterator[Microbatch | FailedMicrobatch]:
    """Yield the microbatches of a loader; name a worker that is killed."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        # A worker killed during a transfer breaks the connection shortly before its end is visible. Then torch
        # raises the error, here or in its handler of SIGCHLD.
        iterator, deadline = loader._iterator, time.monotonic() + _WORKER_EXIT_SECONDS
        while iterator is not None and time.monotonic() < deadline:
            for worker in iterator._workers:  # type: ignore[attr-defined]
                if not worker.is_alive():
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
            time.sleep(0.05)
        raise


def end_workers(loader: MicrobatchLoader) -> None:
    """End the worker processes of a loader; the next iteration starts new ones."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


def init_worker(dataset: SizedDataset, init: Callable[[int], None] | None, number: int) -> None:
    """Prepare a worker process, and call the function of the user."""
    die_with_parent(os.getppid())
    # torch resets SIGTERM in workers to its default; a rank that finishes its step on SIGTERM still needs data.
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # the hook of multiprocessing
    if init is not None:
        object.__setattr__(get_worker_info(), "dataset", dataset)  # the user's; frozen for other changes
        init(number)


def _send_failure(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """In a loader worker: send an error in place of data that cannot be pickled; the rank would wait for the data."""
    number, data = item
    if isinstance(data, ExceptionWrapper):  # of an exception whose class only the worker has
        failure: Exception = RuntimeError(f"Caught {data.exc_type.__name__} {data.where}.\nOriginal {data.exc_msg}")
    else:
        failure = DataError(
            f"a loader worker cannot send a microbatch: {message_of(error)}",
            expected="samples of tensors, numbers, strings, and lists, tuples and dicts of these",
            fix="return plain values from the dataset and the collate function, or load without workers: "
            "num_workers=0 (--workers 0)",
            code="E_NOT_PICKLABLE",
        )
    queue.put((number, FailedMicrobatch(failure)))


class BatchPlan(NamedTuple):
    """One global batch, with the requests of this rank."""

    span: slice  # positions in the epoch
    indices: Indices
    requests: list[MicrobatchRequest]


@dataclass
class BatchPlanner:
    """Divides global batches into microbatches, and requests those of this rank.

    Attributes:
        batch_size: samples of a complete global batch.
        microbatches: number of microbatches of a complete global batch.
        keeps_size: a batch with fewer samples has fewer microbatches.
        equal_counts: every rank requests equally many microbatches of a batch, with fillers after its own. Fillers have
            no share in the result. Strategies that communicate in every forward and backward, such as `fsdp`, need
            them on ranks with fewer microbatches than others.
        world: the ranks.
    """

    batch_size: int
    microbatches: int
    keeps_size: bool
    equal_counts: bool
    world: World

    def plans(self, epoch: int, order: Order, repeats: Indices | None, positions: range) -> Iterator[BatchPlan]:
        """Yield the batches that start at `positions` and end before `positions.stop`, each computed when needed.

        `repeats` has one number per position of the epoch, or is None if no index occurs twice.
        """
        for start in positions:
            span = slice(start, min(start + self.batch_size, positions.stop))
            indices = order[span]
            counts = numpy.zeros_like(indices) if repeats is None else repeats[span]
            yield BatchPlan(span, indices, self.requests(epoch, indices, counts))

    def number_of(self, size: int) -> int:
        """Return the number of microbatches of a batch of `size` samples."""
        if not self.keeps_size or size == self.batch_size:
            return self.microbatches
        return microbatches_of_short_batch(size, self.batch_size, self.microbatches)

    def slot_sizes(self, samples: int) -> BatchSizes:
        """Return the sizes for the slots of an epoch of `samples` samples."""
        return BatchSizes(self.batch_size, self.microbatches, self.number_of(samples % self.batch_size))

    def requests(self, epoch: int, batch: Indices, repeats: Indices) -> list[MicrobatchRequest]:
        """Return the requests of this rank: for its non-empty microbatches, and for fillers.

        Args:
            epoch: number of the epoch.
            batch: indices of the samples of the global batch.
            repeats: how often each index occurs before in the epoch.
        """
        number, shares = self.number_of(len(batch)), self.world.data.shares
        bounds = [slice(*bound) for bound in microbatch_bounds(len(batch), number)]

        def filled(rank: int) -> list[int]:
            owned = owned_microbatches(number, shares, rank)
            return [number for number in owned if bounds[number].start < bounds[number].stop]

        own = filled(self.world.data.rank)
        local = [MicrobatchRequest(epoch, n, batch[bounds[n]], repeats[bounds[n]]) for n in own]
        if not self.equal_counts:
            return local
        largest = max(len(filled(rank)) for rank in range(rank_count(shares)))
        # Two samples if possible, because batch norm cannot train on one.
        filler = MicrobatchRequest(epoch, 0, batch[:2], repeats[:2], is_filler=True)
        return local + [filler] * (largest - len(own))


def microbatches_of_short_batch(size: int, batch_size: int, microbatches: int) -> int:
    """Return the number of microbatches of a batch of `size` samples for a model with batch norm.

    As many as in other batches if each has at least 2 samples, of which a variance exists; otherwise as many as have
    the size of microbatches in other batches, and at least one.
    """
    if size >= 2 * microbatches:
        return microbatches
    return max(1, size // max(2, batch_size // microbatches))
