"""Microbatches of a dataset: random numbers seeded per sample, skipped samples, microbatches without a usable one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset

from samestep.config import BadSamples
from samestep.data.batch import Microbatch, digest_of
from samestep.data.order import Indices
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import DataError, SamestepError
from samestep.report_limits import message_of

Collate = Callable[[list[Any]], Any]
PROBE = -1  # number in a request for the hashes of some samples


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
