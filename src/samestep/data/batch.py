"""Global batches and microbatches, their loading in worker processes, and transfer of their tensors to devices."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset, get_worker_info

from samestep.config import BadSamples
from samestep.data.permutation import Indices
from samestep.data.streams.dataset import StreamDataset
from samestep.distributed.devices import accelerator_module, copy_stream, is_accelerator
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.distributed.signals import die_with_parent
from samestep.errors import DataError, InputError, SamestepError, message_of
from samestep.microbatches import Cursor, microbatch_bounds

Collate = Callable[[list[Any]], Any]
PROBE = -1  # number in a request for the hashes of some samples


class SizedDataset(Protocol):
    """Map-style dataset: a length, and one sample per index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BatchSource(Protocol):
    """Loader of batches, with a position."""

    def end_step(self, batch: GlobalBatch, *, stop: bool) -> None:
        """Move the position to the end of a batch of a completed step; `stop` if the step received a stop request."""


class Microbatch(NamedTuple):
    """One microbatch with its data."""

    number: int  # index among the microbatches of the global batch, from 0
    size: int  # number of usable samples; 0 if none is usable, and `data` then holds a substitute sample
    data: Any  # output of the collate function; the engine expects a pair `(inputs, targets)`
    skipped: tuple[str, ...] = ()  # one error line per sample that was left out
    is_filler: bool = False  # computed only to give every rank the same number of forward passes; does not count

    @property
    def pair(self) -> tuple[Any, Any]:
        """Inputs and targets.

        Raises:
            InputError: `data` is not a pair.
        """
        if not isinstance(self.data, list | tuple) or len(self.data) != 2:
            length = f" of {len(self.data)}" if isinstance(self.data, list | tuple) else ""
            raise InputError(
                f"a microbatch is a {type(self.data).__name__}{length}",
                expected="a pair (inputs, targets), if no forward function is given",
                fix="engine.step(batch, forward=lambda model, batch: model(**batch).loss), or pairs from the dataset",
                code="E_BATCH",
            )
        return self.data[0], self.data[1]


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, between the cursors `begin` and `end`.

    Attributes:
        indices: dataset indices of the samples of all ranks, in order.
        microbatches: number of microbatches in the batch; a last batch with fewer samples can have fewer.
        local_microbatches: non-empty microbatches of this rank, ascending.
        fillers: fillers that this rank computes afterwards, for strategies that communicate in every forward.
        dataset: description of the dataset, equal on every rank.
        source: the loader, whose position moves with steps of the batch.
        iteration: number of the iteration over the loader.
    """

    begin: Cursor
    end: Cursor
    indices: Indices
    microbatches: int
    local_microbatches: tuple[Microbatch, ...]
    fillers: tuple[Microbatch, ...] = ()
    dataset: str = ""
    source: BatchSource | None = field(default=None, repr=False)
    iteration: int = field(default=0, repr=False)

    @property
    def identity(self) -> str:
        """Text with position and samples, equal on every rank."""
        begin = self.begin
        digest = hashlib.blake2b(numpy.asarray(self.indices).tobytes(), digest_size=4).hexdigest()
        return (
            f"{self.size} samples in {self.microbatches} microbatches from sample {begin.samples} of epoch "
            f"{begin.epoch}, indices {digest}"
        )

    @property
    def size(self) -> int:
        """Number of samples over all ranks."""
        return len(self.indices)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Slice `[start, stop)` of `indices` for each microbatch."""
        return microbatch_bounds(self.size, self.microbatches)

    @property
    def filled(self) -> int:
        """Number of microbatches that have samples."""
        return min(self.microbatches, self.size)

    def samples_of(self, microbatch: int) -> list[int]:
        """Return the dataset indices of the samples in a microbatch."""
        start, stop = self.bounds[microbatch]
        return [int(index) for index in self.indices[start:stop]]


class MicrobatchRequest(NamedTuple):
    """Request for one microbatch of a global batch, for a filler, or for the hashes of samples (`PROBE`)."""

    epoch: int
    number: int
    indices: Indices
    repeats: Indices | None = None  # how often each index occurs before in the epoch; None for never
    is_filler: bool = False
    files: tuple[int, ...] = ()  # of a stream: the next files of the rank, in the order of their use


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
            if request.files and isinstance(self.dataset, StreamDataset):
                self.dataset.prepare(request.files)
            with preserved_generators():
                return self._microbatch(request)
        except SamestepError as error:
            return FailedMicrobatch(error)

    def _microbatch(self, request: MicrobatchRequest) -> Microbatch:
        if request.number == PROBE:
            return Microbatch(PROBE, 0, " ".join(map(self._digest_of_sample, request.indices)))
        samples, skipped = [], []
        repeats = numpy.zeros_like(request.indices) if request.repeats is None else request.repeats
        for index, repeat in zip(request.indices, repeats, strict=True):
            try:
                samples.append(self._sample(request.epoch, int(repeat), int(index)))
            except DataError as error:
                if not self._skips:
                    raise
                skipped.append(error.value)
        size, samples = len(samples), samples or [self._substitute(request)]
        facts = _facts(request.epoch, int(request.indices[0]), int(repeats[0]))
        seed_generators(derive_seed("collate", self._seed, *facts))
        data = self._collate(samples)
        if request.is_filler:  # its samples are counted in their own microbatch
            return Microbatch(request.number, 0, data, is_filler=True)
        return Microbatch(request.number, size, data, tuple(skipped))

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
            code="E_NO_USABLE_SAMPLE",
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


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `function` to every tensor in nested lists, tuples and mappings; other values stay unchanged."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, function) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(value)


def digest_of(data: Any) -> str:
    """Return a hash of the tensors, arrays, images and numbers in nested data, but not of text, such as local paths."""
    total, stack = hashlib.blake2b(digest_size=4), [data]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, Mapping | list | tuple):
            stack += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, int | float):
            total.update(repr(value).encode())
        elif hasattr(value, "tobytes"):  # arrays of NumPy, images of PIL
            total.update(value.tobytes())
    return total.hexdigest()


def channels_last(data: Any) -> Any:
    """Return `data` with batches of images in the memory format channels-last."""
    return map_tensors(data, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)


def move(data: Any, device: torch.device) -> Any:
    """Return `data` with every tensor on `device`."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def move_next_to(data: Any, other: Any) -> Any:
    """Return `data` on the device of the first tensor in `other`; with a device map, they can differ."""
    device = _first_device(other)
    return data if device is None or _first_device(data) in (None, device) else move(data, device)


def prefetch_to_device(
    microbatches: Iterator[Microbatch], device: torch.device, ahead: int = 1
) -> Iterator[Microbatch]:
    """Yield microbatches on `device`; on a GPU, copy the next `ahead` ones on another stream during computation."""
    if not is_accelerator(device):
        yield from microbatches
        return
    module, stream = accelerator_module(), copy_stream(device)
    copied: deque[tuple[Microbatch, Any]] = deque()
    for microbatch in chain(microbatches, [None] * ahead):
        if microbatch is not None:
            with module.stream(stream):
                copied.append((move(microbatch, device), stream.record_event()))
        if copied and (microbatch is None or len(copied) > ahead):
            ready, event = copied.popleft()
            current = module.current_stream(device)
            current.wait_event(event)
            for tensor in tensors_of(ready):  # the allocator must not reuse memory that the current stream still reads
                tensor.record_stream(current)
            yield ready


def _first_device(data: Any) -> torch.device | None:
    return next((tensor.device for tensor in tensors_of(data)), None)


MANY_WORKERS = "This DataLoader will create"  # start of torch's warning about more workers than cores
_WORKER_EXIT_SECONDS = 2.0  # time limit for the end of a worker with a broken connection to be visible
MicrobatchLoader = DataLoader[Microbatch | FailedMicrobatch]


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
