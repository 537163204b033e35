"""Streams of sample files in recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.data.sample_files import SampleFiles

Convert = Callable[
    [Any, str], Any
]  # from a sample and its place, for errors, to a sample of the dataset


class ConvertedSource:
    """Samples of files after a conversion; errors name the file and the position of a sample.

    Attributes:
        names: names of the files.
        sizes: number of samples of each file.
        fingerprint: fingerprint of the files.

    Args:
        files: the files.
        convert: function from a sample and its place to a sample. It may draw random numbers.
    """

    def __init__(self, files: SampleFiles, convert: Convert) -> None:
        self.names = files.names
        self.sizes = files.sizes
        self.fingerprint = files.fingerprint
        self._files = files
        self._convert = convert

    def read(self, file: int, index: int) -> Any:
        """Return one sample; see `FileSource.read`."""
        sample = self._files.read(file, index)
        return self._convert(sample, f"{self._files.place_of(self.names[file])}, sample {index}")
