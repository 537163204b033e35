"""Chunks of LitData (https://github.com/Lightning-AI/litData), as its function `optimize` writes them.

A chunk has the number of items, the offsets of items and of the end, and the items: the sizes of all leaves, then their
values. All numbers have 32 bits, in little-endian order. A chunk of tokens has one item of all tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from samestep.data.streams.data_file import DataFile, damaged_file
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import read_json, safe_name
from samestep.data.streams.source import IndexedSource, RawFile

_INDEX = "index.json"
_FLOATS = (*(torch.float32,) * 2, *(torch.float64,) * 2, *(torch.complex64,) * 2, *(torch.complex128,) * 2)
_INTEGERS = (torch.uint8, torch.int8, *(torch.int16,) * 2, *(torch.int32,) * 2, *(torch.int64,) * 2, torch.bool)
_TENSOR_TYPES = (*_FLOATS, *(torch.float16,) * 2, torch.bfloat16, *_INTEGERS, torch.uint16)
_ARRAY_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
# Media stay encoded: the transform of the dataset decodes them.
_BYTES = ("bytes", "file", "jpeg", "image", "audio", "video", "tifffile", "pdf", "nifti", "mesh")
_SUPPORTED = (
    *_BYTES,
    "int",
    "float",
    "bool",
    "str",
    "text",
    *("tensor", "no_header_tensor", "numpy", "no_header_numpy"),
)


class LitDataSource(IndexedSource[RawFile]):
    """Samples of LitData chunks, with the structure of the items that were passed to `optimize`.

    Args:
        folder: folder with `index.json`.
        block_size: tokens of a sample, for chunks written with `TokensLoader`; no effect on others.

    Raises:
        DataError: the index is missing or damaged, the chunks are compressed or encrypted, or a leaf is a pickle.
    """

    def __init__(self, folder: StreamFolder, block_size: int = 0) -> None:
        index, place = read_json(folder, _INDEX), f"{folder.address}/{_INDEX}"
        try:
            config, chunks = index["config"], index["chunks"]
            if config["compression"] or config.get("encryption"):
                raise ValueError("compressed or encrypted chunks are not supported: optimize(compression=None)")
            self._formats = [str(name) for name in config["data_format"]]
            if unknown := {name.partition(":")[0] for name in self._formats} - set(_SUPPORTED):
                raise ValueError(f"leaves of the type {', '.join(sorted(unknown))}; supported: {', '.join(_SUPPORTED)}")
            self._structure = json.loads(config["data_spec"])[1]
            self._block_size = block_size if config["item_loader"] == "TokensLoader" else 0
            if config["item_loader"] == "TokensLoader" and block_size < 1:
                raise ValueError("chunks of tokens need block_size, the tokens of a sample")
            files = [
                DataFile(safe_name(folder, _INDEX, chunk["filename"]), int(chunk["chunk_bytes"])) for chunk in chunks
            ]
            sizes = [chunk["dim"] // block_size if self._block_size else int(chunk["chunk_size"]) for chunk in chunks]
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_file(place, f"{type(error).__name__}: {error}") from error
        super().__init__(folder, files, sizes)

    def open(self, path: Path, file: int) -> RawFile:
        """Open a chunk."""
        return RawFile(path)

    def sample(self, reader: RawFile, file: int, index: int) -> Any:
        """Return one sample."""
        if self._block_size:
            (count,) = struct.unpack("<I", reader.read(0, 4))
            width = _leaf_width(self._formats[0])
            begin = 4 * (count + 2) + index * self._block_size * width
            return _decode_leaf(self._formats[0], reader.read(begin, self._block_size * width))
        begin, end = struct.unpack("<II", reader.read(4 + 4 * index, 8))
        data = reader.read(begin, end - begin)
        place = 4 * len(self._formats)
        leaves = []
        for name, size in zip(self._formats, numpy.frombuffer(data, "<u4", len(self._formats)).tolist(), strict=True):
            leaves.append(_decode_leaf(name, data[place : place + size]))
            place += size
        return _joined(self._structure, iter(leaves))


def _joined(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the leaves in the structure that torch's pytree has described."""
    if structure["type"] is None:
        return next(leaves)
    children = [_joined(child, leaves) for child in structure["children_spec"]]
    kind = structure["type"].rpartition(".")[2]
    if kind in ("list", "tuple"):
        return tuple(children) if kind == "tuple" else children
    if kind != "dict":
        raise ValueError(f"samples of the type {structure['type']}")
    return dict(zip(json.loads(structure["context"]), children, strict=True))


def _leaf_width(name: str) -> int:
    """Return the bytes of one value of a leaf `no_header_tensor:N` or `no_header_numpy:N`."""
    kind, _, number = name.partition(":")
    dtype = _TENSOR_TYPES[int(number)] if kind == "no_header_tensor" else numpy.dtype(_ARRAY_TYPES[int(number)])
    return int(dtype.itemsize)


def _decode_leaf(name: str, data: bytes) -> Any:
    """Return the value of a leaf; `name` is its type in the index.

    Raises:
        ValueError: the bytes are invalid; also struct.error or IndexError.
    """
    kind, _, number = name.partition(":")
    if kind in ("tensor", "numpy"):
        order = ">" if kind == "tensor" else "<"
        dtype, dimensions = struct.unpack_from(f"{order}II", data)
        shape = struct.unpack_from(f"{order}{dimensions}I", data, 8)
        flat = (_tensor if kind == "tensor" else _array)(dtype, data[8 + 4 * dimensions :])
        return flat.reshape(shape)
    if kind in ("no_header_tensor", "no_header_numpy"):
        return (_tensor if kind == "no_header_tensor" else _array)(int(number), data)
    return data if kind in _BYTES else _DECODERS[kind](data)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "bool": lambda data: data != b"\0",
    "str": bytes.decode,
    "text": bytes.decode,
}


def _array(number: int, data: bytes) -> numpy.typing.NDArray[Any]:
    return numpy.frombuffer(data, _ARRAY_TYPES[number]).copy()


def _tensor(number: int, data: bytes) -> torch.Tensor:
    dtype = _TENSOR_TYPES[number]
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
