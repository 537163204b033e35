"""Dataset of samples in many files, and its order: shuffled files, read in shuffled windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy

from samestep.data.permutations import DatasetOrder, Indices, Order, random_order
from samestep.data.sample_files import FileSource
from samestep.distributed.rng import derive_seed
from samestep.errors import DataError, InputError

DEFAULT_WINDOW = 4096


class _WindowOrder:
    """Order of the samples of shuffled files, which is random within windows.

    1. A random permutation of (seed, epoch) orders the files.
    2. The samples in this order are divided into windows of `window` positions. A random
       permutation of (seed, epoch, number of the window) orders the positions.

    Each sample occurs once. The memory is proportional to the files and to a window. The time of a
    slice does not depend on its position.

    Args:
        file_sizes: number of samples in each file.
        window: positions of a window, at least 1.
        seed: seed of the order.
        epoch: number of the epoch.
    """

    def __init__(self, file_sizes: Indices, *, window: int, seed: int, epoch: int) -> None:
        self._samples = int(file_sizes.sum())
        self._window = window
        self._seed = seed
        self._epoch = epoch
        # A slice can end in one window and begin in another one.
        self._permutation = lru_cache(2)(self._new_permutation)
        # Zero is the number of the only source.
        files = random_order(len(file_sizes), derive_seed("files", seed, 0, epoch))
        self._ends = numpy.cumsum(file_sizes[files])
        starts = numpy.cumsum(file_sizes) - file_sizes
        # The sum of a position among the permuted files and the shift of its file is an index of
        # the dataset.
        self._shifts = starts[files] - (self._ends - file_sizes[files])

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, positions: slice, /) -> Indices:
        at = numpy.arange(*positions.indices(self._samples), dtype=numpy.int64)
        windows = at // self._window
        places = numpy.empty_like(at)  # among the permuted files
        # Positions of one window are adjacent.
        cuts = numpy.flatnonzero(numpy.diff(windows)) + 1
        for group in numpy.split(numpy.arange(len(at)), cuts):
            if len(group):
                window = int(windows[group[0]])
                begin = window * self._window
                places[group] = begin + self._permutation(window)[at[group] - begin]
        return places + self._shifts[numpy.searchsorted(self._ends, places, side="right")]

    def _new_permutation(self, window: int) -> Indices:
        rest = self._samples - window * self._window  # the last window is smaller
        # The zero is part of the seeds of all versions.
        seed = derive_seed("window", self._seed, self._epoch, 0, window)
        return random_order(min(self._window, rest), seed)


class StreamDataset:
    """Map-style dataset of the samples in the files of a source.

    It is for data that do not fit on a disk or into memory: with `samestep.loader(dataset,
    shuffle=True, ...)`, samples come from a few files at a time. Without `shuffle`, the order is
    that of the files. The order of a dataset that wraps this one is that of other datasets.

    Attributes:
        source: the source.
        window: positions of a window.
        fingerprint: fingerprint of the source.

    Args:
        source: the files.
        window: number of samples that are in random order together; a larger window is closer to a
            uniform random order, and has more open files.
        transform: function from a sample of the source to a sample of the dataset. It may draw
            random numbers from the generators of Python, NumPy and torch, which are seeded for each
            sample.

    Raises:
        InputError: the window is not positive.
        DataError: the source has no samples.
    """

    def __init__(
        self,
        source: FileSource,
        *,
        window: int = DEFAULT_WINDOW,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if window < 1:
            raise InputError(
                f"the window of a stream is {window}",
                "window >= 1",
                f"window={DEFAULT_WINDOW}",
                code="E_VALUE",
            )
        self.source = source
        self.window = window
        self.fingerprint = source.fingerprint
        self._transform = transform
        self._sizes = numpy.asarray(source.sizes, dtype=numpy.int64)
        self._ends = numpy.cumsum(self._sizes)
        if not self._sizes.any():
            raise DataError(
                "the files of a stream have no samples",
                expected="at least one file with a sample",
                fix="check the path",
                code="E_DATA",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a stream of {len(self)}")
        file = int(numpy.searchsorted(self._ends, index, side="right"))
        sample = self.source.read(file, index - int(self._ends[file] - self._sizes[file]))
        if self._transform is None:
            return sample
        return self._transform(sample)

    def settings(self, *, shuffle: bool) -> dict[str, int | str]:
        """Return the settings on which the order depends, for checkpoints."""
        settings: dict[str, int | str] = {"files": self.fingerprint}
        if shuffle:
            settings |= {"order": "slots", "window": self.window}
        return settings

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Return the order of an epoch."""
        if not shuffle:
            return DatasetOrder(len(self))
        return _WindowOrder(self._sizes, window=self.window, seed=seed, epoch=epoch)
