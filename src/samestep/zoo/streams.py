"""Streams of sample files in recipes: the files of one folder, or of several with weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samestep.data.streams.dataset import StreamDataset
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.open import open_source
from samestep.data.streams.mixture import MixtureSource
from samestep.data.streams.source import FileSource
from samestep.errors import DataError
from samestep.zoo.options import call, is_count, require_count, require_option

Convert = Callable[[Any, str], Any]  # from a sample and its place, for errors, to a sample of the dataset
_SOURCE_KEYS = {"path", "weight"}


class ConvertedSource:
    """Samples of a source after a conversion, whose errors name the file and the position of a sample.

    Attributes:
        names: names of the files.
        sizes: number of samples of each file.
        fingerprint: fingerprint of the source.

    Args:
        source: the files.
        address: folder of the files, for errors.
        convert: function from a sample and its place to a sample. It may draw random numbers.
    """

    def __init__(self, source: FileSource, address: str, convert: Convert) -> None:
        self.names, self.sizes, self.fingerprint = source.names, source.sizes, source.fingerprint
        self._source, self._address, self._convert = source, address, convert

    def read(self, file: int, index: int) -> Any:
        """Return one sample; see `FileSource.read`."""
        sample = self._source.read(file, index)
        return self._convert(sample, f"{self._address}/{self.names[file]}, sample {index}")

    def prepare(self, files: Sequence[int]) -> None:
        """Fetch files in the background; see `FileSource.prepare`."""
        self._source.prepare(files)


def open_stream(
    path: str | None,
    sources: Mapping[str, Any] | None,
    kind: str,
    options: Mapping[str, Any],
    convert: Convert,
    *,
    window: int,
    samples: int | None,
    store: Mapping[str, Any] | None,
) -> StreamDataset:
    """Return the training samples of a folder, or of a mixture of folders.

    Args:
        path: folder or address; None with `sources`.
        sources: path and weight of each source by name; None with `path`.
        kind: format of the files.
        options: options of the format.
        convert: see `ConvertedSource`.
        window: window of the stream.
        samples: samples of an epoch of a mixture; None for as many as its sources have.
        store: options of `StreamFolder`.

    Raises:
        InputError: an option is invalid, or the files cannot be read.
    """
    require_count("window", window, 1, 4096)
    if (path is None) == (sources is None):
        raise DataError(
            f"data.options has {'neither path nor' if path is None else 'both path and'} sources",
            expected="path: one folder or address; or sources: several, each with a path and a weight",
            fix="--set data.options.path=FOLDER",
            code="E_MISSING_KEY" if path is None else "E_OPTION_CONFLICT",
        )
    if path is not None:
        require_option("samples", samples, samples is None, "null without sources", "null")
        return StreamDataset(open_files(path, kind, options, convert, store=store), window=window)
    example = "{web: {path: FOLDER, weight: 0.8}, code: {path: OTHER, weight: 0.2}}"
    is_valid = isinstance(sources, Mapping) and all(map(_is_weighted, sources.values()))
    require_option("sources", sources, is_valid, "a path and a weight for each name", example)
    require_option("samples", samples, samples is None or is_count(samples), "samples >= 1, or null", "null")
    assert sources is not None
    members = {
        name: open_files(source["path"], kind, options, convert, store=store) for name, source in sources.items()
    }
    weights = {name: source["weight"] for name, source in sources.items()}
    return StreamDataset(MixtureSource(members, weights, samples=samples), window=window)


def open_files(
    path: str, kind: str, options: Mapping[str, Any], convert: Convert, *, store: Mapping[str, Any] | None
) -> FileSource:
    """Return the converted samples of a folder; see `open_stream`."""
    require_option("store", store, store is None or isinstance(store, Mapping), "a mapping", "{cache_gb: 100}")
    require_option("path", path, isinstance(path, str), "a folder or an address", "FOLDER")
    folder: StreamFolder = call(StreamFolder, store or {}, path, where="data.options.store")
    return ConvertedSource(open_source(kind, folder, **options), folder.address, convert)


def _is_weighted(source: object) -> bool:
    if not isinstance(source, Mapping) or set(source) != _SOURCE_KEYS or not isinstance(source["path"], str):
        return False
    weight = source["weight"]
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
