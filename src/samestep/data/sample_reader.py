"""Reading of samples in a rank or a worker of a loader: the only place that calls a data set."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from operator import length_hint
from typing import Any, Literal, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from samestep.data.batch import Collate
from samestep.data.batch_structure import Plan, content_of
from samestep.data.process_copy import called_in_copy
from samestep.data.read_generators import OwnGenerators, WatchedGenerators
from samestep.distributed.rng import (
    derive_seed,
    generator_state,
    preserved_generators,
    seed_generators,
)
from samestep.distributed.stop_request import die_with_parent
from samestep.distributed.torch_errors import resource_fixes
from samestep.errors import DataError, SamestepError
from samestep.report_text import message_of

# `check`: read whole and decide; `own`: read the own rows; `whole`: read all; `plain`: read all as
# torch does, without seeds for the samples; `probe`: hash the samples.
How = Literal["check", "own", "whole", "plain", "probe"]

COPY_SECONDS = 60.0  # in which a copy of the process reads


class Request(NamedTuple):
    """Samples to read.

    Attributes:
        how: see `How`.
        indices: indices of the samples.
        repeats: how often each index occurs before in the epoch; None for never.
        seed: seed of the loader.
        epoch: number of the epoch.
        draws: samples draw random numbers, and are seeded one by one.
    """

    how: How
    indices: list[Any]
    repeats: list[int] | None
    seed: int
    epoch: int
    draws: bool


@dataclass(frozen=True)
class Decision:
    """How the batches of a loader are read, decided by its first batch.

    Attributes:
        how: `own`, `whole` or `plain`; `check` if seeds of the samples are needed for a decision.
        draws: samples or their collation draw random numbers.
        plan: how a batch is put together from own rows; None if it is not.
        reason: why batches are read whole.
        probe: hashes of some samples, and how to read them again; None if they depend on others.
    """

    how: How
    draws: bool
    plan: Plan | None = None
    reason: str = ""
    probe: dict[str, Any] | None = None


class Reading(NamedTuple):
    """Result of a request; torch pins the tensors in it.

    Attributes:
        data: collated samples; None after a failure, or without a sample.
        samples: number of samples in it.
        failure: the error of a sample, as an exception or as torch passes one from a worker.
        drew: a sample has drawn that was read without a seed of its own.
        decision: the decision of a checked batch.
    """

    data: Any
    samples: int
    failure: Exception | ExceptionWrapper | None = None
    drew: bool = False
    decision: Decision | None = None


class Samples(NamedTuple):
    """Samples that were read.

    Attributes:
        samples: the samples.
        drew: whether each sample has drawn random numbers, if that was watched.
    """

    samples: list[Any]
    drew: list[bool]


class SampleReader(Dataset[Any]):
    """Data set of torch's fetcher in place of the script's; an item is a collated request.

    Args:
        dataset: the script's data set.
        collate: the script's collate function.
        sets_epoch: `set_epoch(epoch)` of the data set is called before reads, if it has such a
            method.
    """

    def __init__(self, dataset: Any, collate: Collate, *, sets_epoch: bool = False) -> None:
        self.dataset = dataset
        self._collate = collate
        self._sets_epoch = sets_epoch
        self._watched: WatchedGenerators | None = None
        self._own: OwnGenerators | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": None, "_own": None}  # made again in a spawned worker

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Reading:
        try:
            if self._sets_epoch:
                # For each batch: other loaders of this process can read the same data set in other
                # epochs.
                set_epoch(self.dataset, request.seed, request.epoch)
            return self._reading(request)
        except Exception as caught:  # boundary: the loader raises it on all ranks
            error = stopped(caught) if isinstance(caught, StopIteration) else caught
            worker = get_worker_info()
            # Errors of this package can be sent from a worker as they are.
            if worker is None or isinstance(error, SamestepError):
                return Reading(None, 0, error)
            wrapped = ExceptionWrapper(where=f"in DataLoader worker process {worker.id}")
            try:
                str(error)
            except Exception:  # boundary: the class is the script's
                return Reading(None, 0, _without_class(wrapped))
            return Reading(None, 0, wrapped)

    def _reading(self, request: Request) -> Reading:
        readings = {"plain": self._read_plain, "probe": self._probed}
        return readings.get(request.how, self._read)(request)

    @property
    def generators(self) -> OwnGenerators:
        """Generators of the data set and the collate function."""
        if self._own is None:
            self._own = OwnGenerators(self.dataset, self._collate)
        return self._own

    def _read(self, request: Request) -> Reading:
        if request.draws:
            with preserved_generators(), self.generators.preserved():
                read = self._one_by_one(request, seeds=True)
                data = self._collated(request, read.samples)
            return Reading(data, len(read.samples))
        if self._watched is None:
            self._watched = WatchedGenerators()
        with self._watched:
            reading = self._read_plain(request)
            drew = self._watched.have_drawn()
        return reading._replace(drew=drew)

    def _plain(self, indices: list[Any]) -> list[Any]:
        """Read samples as torch's fetcher does."""
        if callable(getattr(self.dataset, "__getitems__", None)):
            samples: list[Any] = self.dataset.__getitems__(indices)
            return samples
        return self._each(indices)

    def _each(self, indices: list[Any]) -> list[Any]:
        dataset = self.dataset
        remaining = iter(indices)
        try:
            return [dataset[index] for index in remaining]
        except SamestepError:
            raise  # the message names the sample
        except Exception as error:
            index = indices[len(indices) - length_hint(remaining) - 1]
            error.add_note(f"while loading sample {index} of the dataset")
            raise

    def _one_by_one(self, request: Request, *, seeds: bool, watches: bool = False) -> Samples:
        """Read each sample, with generators that are seeded by (seed, epoch, index, repeat)."""
        read = Samples([], [])
        for position, index in enumerate(request.indices):
            if seeds:
                self._seed("sample", request, position)
            before = None
            if watches:
                before = self._states()
            read.samples.extend(self._each([index]))
            read.drew.append(watches and self._states() != before)
        return read

    def _seed(self, purpose: Literal["sample", "collate"], request: Request, position: int) -> None:
        repeat = 0
        if request.repeats is not None:
            repeat = request.repeats[position]
        index = request.indices[position]
        self.generators.seed(purpose, request.seed, request.epoch, index, repeat)

    def _read_plain(self, request: Request) -> Reading:
        samples = self._plain(request.indices)
        data = None
        if samples:
            data = self._collate(samples)
        return Reading(data, len(samples))

    def _probed(self, request: Request) -> Reading:
        """Return hashes of samples, which are read in a copy of the process if that is possible."""

        def read() -> list[int]:
            with preserved_generators(), self.generators.preserved():
                samples = self._one_by_one(request, seeds=request.draws).samples
            return list(map(content_of, samples))

        # In a copy, a data set that counts its reads does not see these.
        hashes = called_in_copy(read, COPY_SECONDS) or read()
        return Reading(hashes, len(hashes))

    def _states(self) -> tuple[Any, list[str]]:
        return generator_state(), self.generators.states()

    def _collated(self, request: Request, samples: list[Any]) -> Any:
        """Return collated samples, after generators were seeded; None without samples."""
        if not samples:
            return None
        self._seed("collate", request, 0)
        return self._collate(samples)


def raise_failure(failure: Any) -> None:
    """Raise the failure of a reading."""
    if isinstance(failure, ExceptionWrapper):
        failure.reraise()
    raise failure


def stopped(error: StopIteration) -> DataError:
    """Return the error of a `StopIteration` that would end an epoch without a message."""
    where = ", ".join(getattr(error, "__notes__", ["in the collate function"]))
    return DataError(
        f"StopIteration {where}",
        expected="samples and batches: only a sampler or an iterable dataset ends an epoch",
        fix="next(iterator, None), or catch StopIteration where the iterator is used",
        code="E_DATA",
    )


@dataclass(frozen=True)
class Guarded:
    """A function, or a data set with single samples, that ends no epoch by `StopIteration`."""

    function: Any

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except StopIteration as error:
            raise stopped(error) from error

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.function[index]
        except StopIteration as error:
            error.add_note(f"while loading sample {index} of the dataset")
            raise stopped(error) from error


def as_it_is(data: Any) -> Any:
    """Return the data: the collate function of torch's fetcher over a `SampleReader`."""
    return data


def set_epoch(dataset: Any, seed: int, epoch: int) -> None:
    """Call `set_epoch` of a data set, if it has one, with seeded generators."""
    methods: list[Any] = [getattr(part, "set_epoch", None) for part in datasets_of(dataset)]
    hooks = [method for method in methods if callable(method)]
    if hooks:
        with preserved_generators():
            seed_generators(derive_seed("sample", seed, epoch))
            for hook in hooks:
                hook(epoch)


def datasets_of(dataset: Any) -> Iterator[Any]:
    """Yield a data set, or those that torch's `Subset` and `ConcatDataset` combine."""
    if isinstance(dataset, Subset):
        yield from datasets_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from datasets_of(part)
    else:
        yield dataset


def init_worker(dataset: Any, init: Callable[[int], None] | None, number: int) -> None:
    """Prepare a worker process, and call the function of the script."""
    die_with_parent(os.getppid())
    # torch resets SIGTERM in workers to its default; a rank that finishes its step on SIGTERM still
    # needs data.
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
    # The hook of multiprocessing.
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
    # The script's data set. The object is frozen for other changes.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    if init is not None:
        Guarded(init)(number)


def _without_class(wrapped: ExceptionWrapper) -> RuntimeError:
    """Return an exception with the text that torch would give to the class of the script."""
    return RuntimeError(
        f"Caught {wrapped.exc_type.__name__} {wrapped.where}.\nOriginal {wrapped.exc_msg}"
    )


def _send_failure(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """Send an error in place of data that cannot be pickled, for which the rank would wait."""
    number, data = item
    failure: Exception
    wrapped = data.failure if isinstance(data, Reading) else data
    if isinstance(wrapped, ExceptionWrapper):  # of an exception of a class that only the worker has
        failure = _without_class(wrapped)
    else:
        message = message_of(error)
        code = "E_NOT_PICKLABLE"
        expected = "samples of tensors, numbers, strings, and lists, tuples and dicts of these"
        fix = "return plain values from the dataset and the collate function"
        for limit in resource_fixes(message):
            code = "E_MACHINE"
            expected = "limits of the machine that allow the tensors of all batches in memory"
            fix = limit
        failure = DataError(
            f"a loader worker cannot send a batch: {message}",
            expected=expected,
            fix=f"{fix}, or load without workers: num_workers=0 (--workers 0)",
            code=code,
        )
    queue.put((number, Reading(None, 0, failure)))
