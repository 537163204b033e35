"""MDS files of MosaicML Streaming (https://docs.mosaicml.com/projects/streaming, "Dataset format").

A file has the number of samples, the offsets of samples and of the end, a description as JSON, and the samples: sizes
of the columns without a fixed size, then the values. All numbers of a file have 32 bits, in little-endian order.
"""

from __future__ import annotations

import bz2
from pathlib import Path
from typing import Any

import numpy

from samestep.data.streams.data_file import DataFile, best_checksum
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import read_json, safe_name
from samestep.data.streams.formats.mds_encodings import check_encoding, decode
from samestep.data.streams.formats.tables import require_pyarrow
from samestep.data.streams.opened import IndexedSource, RawFile, damaged_file

INDEX = "index.json"
_CODECS = {"br": "brotli", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}  # names of pyarrow


class MdsSource(IndexedSource[RawFile]):
    """Samples of MDS files: dictionaries with a value per column.

    Args:
        folder: folder with `index.json`. Compressed files are decompressed in memory.

    Raises:
        DataError: the index is missing or damaged, or a column is a pickle, which could execute code.
    """

    def __init__(self, folder: StreamFolder) -> None:
        index = read_json(folder, INDEX)
        try:
            self._infos: list[dict[str, Any]] = index["shards"]
            for info in self._infos:
                if (info["format"], info["version"]) != ("mds", 2):
                    raise ValueError(f"files of the format {info['format']}, version {info['version']}")
                for name, encoding in zip(info["column_names"], info["column_encodings"], strict=True):
                    check_encoding(encoding, f"{folder.address}/{INDEX}: column {name}")
            files = [_file(folder, info) for info in self._infos]
            sizes = [int(info["samples"]) for info in self._infos]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise damaged_file(f"{folder.address}/{INDEX}", f"{type(error).__name__}: {error}") from error
        super().__init__(folder, files, sizes)

    def open(self, path: Path, file: int) -> RawFile:
        """Open a file, or decompress it."""
        info = self._infos[file]
        if not info["zip_data"]:
            return RawFile(path)
        algorithm, data = str(info["compression"]).partition(":")[0], path.read_bytes()
        if algorithm == "bz2":
            return RawFile(path, bz2.decompress(data))
        arrow, size = require_pyarrow("compressed MDS files"), int(info["raw_data"]["bytes"])
        return RawFile(path, arrow.decompress(data, size, _CODECS[algorithm], asbytes=True))

    def sample(self, reader: RawFile, file: int, index: int) -> dict[str, Any]:
        """Return the columns of one sample."""
        info = self._infos[file]
        begin, end = numpy.frombuffer(reader.read(4 + 4 * index, 8), "<u4").tolist()
        data = reader.read(begin, end - begin)
        sizes, place = [], 0
        for size in info["column_sizes"]:
            if not size:
                size = int.from_bytes(data[place : place + 4], "little")  # noqa: PLW2901
                place += 4
            sizes.append(size)
        if place + sum(sizes) != len(data):
            raise ValueError(f"it has {len(data)} bytes, its columns {place + sum(sizes)}")
        sample = {}
        for name, encoding, size in zip(info["column_names"], info["column_encodings"], sizes, strict=True):
            sample[name] = decode(encoding, data[place : place + size])
            place += size
        return sample


def _file(folder: StreamFolder, info: dict[str, Any]) -> DataFile:
    part = info["zip_data"] or info["raw_data"]
    return DataFile(safe_name(folder, INDEX, part["basename"]), int(part["bytes"]), best_checksum(part["hashes"]))
