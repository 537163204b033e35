"""Dataset of samples in sharded files, and its order in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from samestep.data.order import DatasetOrder, Order
from samestep.data.streams.order import BatchSizes, SlotOrder
from samestep.data.streams.source import FileSource
from samestep.errors import DataError, InputError

DEFAULT_WINDOW = 4096


class StreamDataset:
    """Map-style dataset of the samples in the files of a source, for data that do not fit on a disk or into memory.

    With `samestep.loader(dataset, shuffle=True, ...)`, the order is a `SlotOrder`: a rank reads only files of its own
    microbatches. Without `shuffle`, it is that of the files. With an explicit `order`, or a dataset that wraps this
    one, it is that of other datasets.

    Attributes:
        source: the source.
        window: positions of a window.
        fingerprint: fingerprint of the source.

    Args:
        source: the files.
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
                code="E_EMPTY_DATASET",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a stream of {len(self)}")
        file = int(numpy.searchsorted(self._ends, index, side="right"))
        sample = self.source.read(file, index - int(self._ends[file] - self._sizes[file]))
        return sample if self._transform is None else self._transform(sample)

    def settings(self, *, shuffle: bool) -> dict[str, int | str]:
        """Return the settings on which the order depends, for checkpoints."""
        settings: dict[str, int | str] = {"files": self.fingerprint}
        if shuffle:
            settings |= {"order": "slots", "window": self.window}
        return settings

    def order(self, sizes: BatchSizes, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Return the order of an epoch."""
        if not shuffle:
            return DatasetOrder(len(self))
        return SlotOrder(self._sizes, sizes, window=self.window, seed=seed, epoch=epoch)
