"""Leaves of the samples in LitData chunks: values from bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch

_FLOATS = (*(torch.float32,) * 2, *(torch.float64,) * 2, *(torch.complex64,) * 2, *(torch.complex128,) * 2)
_INTEGERS = (torch.uint8, torch.int8, *(torch.int16,) * 2, *(torch.int32,) * 2, *(torch.int64,) * 2, torch.bool)
TENSOR_TYPES = (*_FLOATS, *(torch.float16,) * 2, torch.bfloat16, *_INTEGERS, torch.uint16)
_ARRAY_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
# Media stay encoded: the transform of the dataset decodes them.
_BYTES = ("bytes", "file", "jpeg", "image", "audio", "video", "tifffile", "pdf", "nifti", "mesh")
SUPPORTED = (
    *_BYTES,
    "int",
    "float",
    "bool",
    "str",
    "text",
    *("tensor", "no_header_tensor", "numpy", "no_header_numpy"),
)


def leaf_width(name: str) -> int:
    """Return the bytes of one value of a leaf `no_header_tensor:N` or `no_header_numpy:N`."""
    kind, _, number = name.partition(":")
    dtype = TENSOR_TYPES[int(number)] if kind == "no_header_tensor" else numpy.dtype(_ARRAY_TYPES[int(number)])
    return int(dtype.itemsize)


def decode_leaf(name: str, data: bytes) -> Any:
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
    dtype = TENSOR_TYPES[number]
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
