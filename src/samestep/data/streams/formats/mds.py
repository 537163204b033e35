"""MDS files of MosaicML Streaming (https://docs.mosaicml.com/projects/streaming, "Dataset format").

A file has the number of samples, the offsets of samples and of the end, a description as JSON, and the samples: sizes
of the columns without a fixed size, then the values, each in the encoding of its column. All numbers of a file have
32 bits, in little-endian order.
"""

from __future__ import annotations

import bz2
import json
import math
from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy

from samestep.data.streams.data_file import DataFile, best_checksum, damaged_file
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.arrow import require_pyarrow
from samestep.data.streams.formats.index import read_json, safe_name
from samestep.data.streams.source import IndexedSource, RawFile
from samestep.errors import DataError

INDEX = "index.json"
_CODECS = {"br": "brotli", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}  # names of pyarrow
_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_SCALARS = (*_INTEGERS, "float16", "float32", "float64")
WRITABLE = ("json", "str", "bytes", "int", "ndarray", *_SCALARS)
_ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"}
_ARRAY_TYPES |= {34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
_ARRAY_NUMBERS = {name: number for number, name in _ARRAY_TYPES.items()}


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


def check_encoding(encoding: str, place: str) -> None:
    """Require a known encoding that executes no code; `place` is its column, for errors.

    Raises:
        DataError: the encoding is unknown, or is a pickle.
    """
    if encoding.partition(":")[0] not in (*_SCALARS, *_DECODERS):
        raise DataError(
            f"{place} has the encoding {encoding!r}",
            expected=f"one of {', '.join((*_DECODERS, *_SCALARS))}; a pickle could execute code",
            fix="write the data again with another encoding",
            code="E_UNREADABLE",
        )


def decode(encoding: str, data: bytes) -> Any:
    """Return the value of a column.

    Raises:
        ValueError: the bytes are invalid; also KeyError, IndexError, or OSError of an image.
    """
    kind, _, options = encoding.partition(":")
    return numpy.frombuffer(data, kind)[0] if kind in _SCALARS else _DECODERS[kind](data, options)


def fixed_size(encoding: str) -> int | None:
    """Return the bytes of each value of an encoding that `encode` writes, or None if they vary."""
    if encoding == "int":
        return 8
    return numpy.dtype(encoding).itemsize if encoding in _SCALARS else None


def encoding_of(value: object) -> str:
    """Return the encoding for columns with values such as `value`.

    Raises:
        TypeError: the value is a tensor without an equal array, such as one of bfloat16.
    """
    if isinstance(value, numpy.generic) and value.dtype.name in _SCALARS:
        return value.dtype.name
    if _as_array(value) is not None:
        return "ndarray"
    kinds: dict[type, str] = {str: "str", bytes: "bytes", int: "int", float: "float64"}
    return kinds.get(type(value), "json")


def encode(encoding: str, value: Any) -> bytes:
    """Return the bytes of a value of a column.

    Raises:
        TypeError: the value has another type; also ValueError or OverflowError, if the encoding would change it.
    """
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding == "ndarray":
        return _encode_array(value)
    if encoding in ("str", "bytes"):
        if not isinstance(value, str if encoding == "str" else bytes):
            raise TypeError(f"a value of the type {type(value).__name__} in a column of {encoding}")
        return value.encode() if isinstance(value, str) else bytes(value)
    if isinstance(value, bool) or not isinstance(value, int | float | numpy.integer | numpy.floating):
        raise TypeError(f"a value of the type {type(value).__name__} in a column of {encoding}")
    if encoding == "int" or encoding in _INTEGERS:
        if not isinstance(value, int | numpy.integer):
            raise TypeError(f"{value!r} in a column of integers")
        return numpy.array(int(value), "int64" if encoding == "int" else encoding).tobytes()
    return _encode_float(encoding, value)


def _encode_float(encoding: str, value: Any) -> bytes:
    """Return a number in a column of floats, rounded; an integer is not rounded, and a finite value stays finite."""
    exact = int(value) if isinstance(value, int | numpy.integer) else value
    with numpy.errstate(over="ignore"):
        result = numpy.array(value, encoding)
    if result.item() != exact and (isinstance(exact, int) or math.isinf(result.item())):
        raise ValueError(f"{exact!r} would be {result.item()!r} in a column of {encoding}")
    return result.tobytes()


def _as_array(value: object) -> numpy.typing.NDArray[Any] | None:
    """Return an array or a tensor as an array, or None for other values.

    Raises:
        TypeError: NumPy has no equal array.
    """
    if isinstance(value, numpy.ndarray):
        return value
    detach = getattr(value, "detach", None)  # of a tensor, without an import of torch
    if detach is None:
        return None
    try:
        return numpy.asarray(detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse, quantized or without values
        raise TypeError(f"a tensor without an equal array of NumPy: {error}") from error


def _encode_array(value: object) -> bytes:
    array = _as_array(value)
    if array is None or array.dtype.name not in _ARRAY_NUMBERS or array.ndim == 0 or 0 in array.shape:
        kind = type(value).__name__ if array is None else f"{array.dtype} array of the shape {array.shape}"
        raise TypeError(f"{kind} in a column of arrays of integers or floats with at least one value")
    width = next(power for power in range(4) if max(array.shape) < 1 << (8 << power))
    header = bytes((_ARRAY_NUMBERS[array.dtype.name], array.ndim << 2 | width))
    shape = numpy.array(array.shape, f"<u{1 << width}")
    return header + shape.tobytes() + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(data: bytes, options: str) -> numpy.typing.NDArray[Any]:
    place = 0
    dtype, _, fixed = options.partition(":")
    if not dtype:
        dtype, place = _ARRAY_TYPES[data[0]], 1
    if fixed:
        shape = tuple(map(int, fixed.split(",")))
    else:
        dimensions, width = data[place] >> 2, 1 << data[place] % 4
        shape = tuple(numpy.frombuffer(data, f"<u{width}", dimensions, place + 1).tolist())
        place += 1 + dimensions * width
    return numpy.frombuffer(data, dtype, offset=place).reshape(shape).copy()  # writable, as torch expects


def _raw_image(data: bytes, options: str) -> Any:
    from PIL import Image

    width, height, length = numpy.frombuffer(data, "<u4", 3).tolist()
    return Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _image(data: bytes, options: str) -> Any:
    from PIL import Image

    image = Image.open(BytesIO(data), formats=("JPEG", "PNG"))
    image.load()
    return image


_DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    "bytes": lambda data, _: data,
    "str": lambda data, _: data.decode(),
    "int": lambda data, _: int(numpy.frombuffer(data, "<i8")[0]),
    "str_int": lambda data, _: int(data),
    "str_float": lambda data, _: float(data),
    "str_decimal": lambda data, _: Decimal(data.decode()),
    "json": lambda data, _: json.loads(data),
    "ndarray": _array,
    "pil": _raw_image,
    "jpeg": _image,
    "png": _image,
}
