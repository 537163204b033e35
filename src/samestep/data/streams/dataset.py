"""Dataset of samples in sharded files, and its order in training and evaluation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from samestep.config import SampleOrder
from samestep.data.streams.mixture import MixtureSource
from samestep.data.streams.order import BatchSizes, Part, SequentialOrder, SlotOrder, StreamOrder
from samestep.data.streams.source import FileSource
from samestep.errors import DataError, InputError

DEFAULT_WINDOW = 4096


class Origin(NamedTuple):
    """Place of a sample.

    Attributes:
        source: name of the source in a mixture; otherwise empty.
        file: name of the file in the source.
        position: position in the file.
    """

    source: str
    file: str
    position: int


class StreamDataset:
    """Map-style dataset of the samples in the files of a source, for data that do not fit on a disk or into memory.

    With `samestep.loader(dataset, shuffle=True, ...)`, slot s, which is microbatch s of every global batch, draws from
    its own range of the files in a random order, within windows. A rank reads only files of its own microbatches, and
    the order depends on seed, epoch, microbatches, batch size, window and sizes of the files alone. Without `shuffle`,
    the order is that of the files. Explicit `order="keyed"` or `"shuffled"` have the order of other datasets, in which
    each batch reads from many files.

    Samples are numbered in the order of the files. A dataset that wraps this one has the order of other datasets.

    Attributes:
        source: the source.
        window: positions of a window.
        fingerprint: fingerprint of the source.

    Args:
        source: the files; a `MixtureSource` for several sources with weights.
        window: number of samples of a slot that are in random order together; a larger window is closer to a uniform
            random order, and has more open files.
        transform: function from a sample of the source to a sample of the dataset. It may draw random numbers from the
            generators of Python, NumPy and torch, which are seeded for each sample.

    Raises:
        InputError: the window is not positive.
        DataError: the source has no samples.
    """

    def __init__(
        self, source: FileSource, *, window: int = DEFAULT_WINDOW, transform: Callable[[Any], Any] | None = None
    ) -> None:
        if window < 1:
            raise InputError(
                f"the window of a stream is {window}", "window >= 1", f"window={DEFAULT_WINDOW}", code="E_VALUE"
            )
        self.source, self.window, self._transform = source, window, transform
        self._parts = _parts(source)
        sizes = numpy.concatenate([part.sizes for part in self._parts])
        self._ends = numpy.cumsum(sizes)
        if not len(sizes) or not self._ends[-1]:
            raise DataError(
                "the files of a stream have no samples",
                expected="at least one file with a sample",
                fix="check the path and the filters",
                code="E_EMPTY_DATASET",
            )
        self.fingerprint, self._prepared = source.fingerprint, tuple[int, ...]()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        sample = self.source.read(*self._place(index))
        return sample if self._transform is None else self._transform(sample)

    @property
    def epoch_samples(self) -> int:
        """Number of samples in a training epoch."""
        return self.source.samples if isinstance(self.source, MixtureSource) else len(self)

    def settings(self, *, shuffle: bool) -> dict[str, int | str]:
        """Return the settings on which the order depends, for checkpoints."""
        settings: dict[str, int | str] = {"files": self.fingerprint}
        if shuffle:
            settings |= {"order": "slots", "window": self.window}
        if shuffle and isinstance(self.source, MixtureSource):
            settings["weights"] = ", ".join(f"{name} {weight!r}" for name, weight in self.source.weights.items())
        return settings

    def origin(self, index: int) -> Origin:
        """Return the place of a sample."""
        file, within = self._place(index)
        number = bisect_right([part.first_file for part in self._parts], file) - 1
        part = self._parts[number]
        source = self.source.sources[part.name] if isinstance(self.source, MixtureSource) else self.source
        return Origin(part.name, source.names[file - part.first_file], within)

    def prepare(self, files: tuple[int, ...]) -> None:
        """Pass the next files of this process to the source, if they are new."""
        if files != self._prepared:
            self._prepared = files
            self.source.prepare(files)

    def order(self, sizes: BatchSizes, *, seed: int, epoch: int, shuffle: bool) -> StreamOrder:
        """Return the order of an epoch."""
        if not shuffle:
            return SequentialOrder(self._parts)
        return SlotOrder(self._parts, sizes, window=self.window, samples=self.epoch_samples, seed=seed, epoch=epoch)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the file of a sample and the position in the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a stream of {len(self)}")
        file = int(numpy.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)


def stream_of(dataset: object, order: SampleOrder, *, has_indices: bool) -> StreamDataset | None:
    """Return the dataset of a loader if it has the order of a stream, or None.

    Args:
        dataset: the dataset.
        order: the order of the loader.
        has_indices: whether the order is that of a sampler or of lengths.

    Raises:
        InputError: a mixture would have an order without weights.
    """
    if not isinstance(dataset, StreamDataset):
        return None
    if order == "auto" and not has_indices:
        return dataset
    if isinstance(dataset.source, MixtureSource):
        raise InputError(
            f"a mixture of sources with order={order!r}, a sampler or lengths, which have no weights",
            expected="the order of a stream, order='auto'",
            fix="leave out order, sampler and lengths",
            code="E_LOADER",
        )
    return None


def _parts(source: FileSource) -> list[Part]:
    if not isinstance(source, MixtureSource):
        return [Part("", _sizes(source))]
    members = source.sources
    sizes = [_sizes(member) for member in members.values()]
    files = numpy.cumsum([0, *(len(part) for part in sizes)])
    samples = numpy.cumsum([0, *(int(part.sum()) for part in sizes)])
    return [
        Part(name, part, int(file), int(sample), source.weights[name])
        for name, part, file, sample in zip(members, sizes, files, samples, strict=False)
    ]


def _sizes(source: FileSource) -> Any:
    return numpy.asarray(source.sizes, dtype=numpy.int64)
