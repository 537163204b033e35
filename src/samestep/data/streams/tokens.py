"""Tokens of a language model as 16- or 32-bit integers in `.bin` files, with or without the header of llm.c."""

from __future__ import annotations

import os
import struct
from typing import IO, Any, Literal

import numpy
import torch

from samestep.data.streams.source import Reader, SampleFiles
from samestep.errors import DataError

_HEADER = struct.Struct("<256i")  # magic number, version, number of tokens
_HEADERS = {20240520: "uint16", 20240801: "uint32"}  # of llm.c: GPT-2 and Llama 3


class TokenFiles(SampleFiles):
    """Windows of tokens: sample `i` of a file has the tokens `[i * length, i * length + length]`, both included.

    So a sample has `length` inputs and the target of each. The rest of a file that fills no window
    is not used.

    Args:
        address: folder with files `*.bin`; see `SampleFiles`.
        length: tokens of an input.
        dtype: `uint16` or `uint32`, in little-endian order.
        header: `none`, or `llm.c` for files with its header of 1,024 bytes.

    Raises:
        DataError: there are no such files, or an argument is invalid.
    """

    def __init__(
        self,
        address: str,
        length: int,
        dtype: Literal["uint16", "uint32"] = "uint16",
        header: Literal["none", "llm.c"] = "none",
    ) -> None:
        is_length = isinstance(length, int) and not isinstance(length, bool) and length >= 1
        if not is_length or dtype not in ("uint16", "uint32") or header not in ("none", "llm.c"):
            raise DataError(
                f"tokens with length={length!r}, dtype={dtype!r}, header={header!r}",
                expected="an integer length >= 1; dtype uint16 or uint32; header none or llm.c",
                fix="length=1024, dtype='uint16', header='none'",
                code="E_VALUE",
            )
        self._length = length
        self._dtype = numpy.dtype(dtype).newbyteorder("<")
        self._begin = _HEADER.size if header == "llm.c" else 0
        super().__init__(address, ".bin")

    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of a file, whose size its header must describe."""
        return _TokenReader(file, self._length, self._dtype, self._begin)


class _TokenReader(Reader):
    """Windows of one file."""

    def __init__(self, file: IO[bytes], length: int, dtype: numpy.dtype[Any], begin: int) -> None:
        super().__init__(file)
        self._length = length
        self._dtype = dtype
        self._begin = begin
        size = file.seek(0, os.SEEK_END) - begin
        if size < 0:
            raise ValueError(f"it ends within its header of {begin:,} bytes")
        if size % dtype.itemsize:
            raise ValueError(f"{size:,} bytes of tokens are no multiple of {dtype.itemsize}")
        if begin:
            magic, _, count, *_ = _HEADER.unpack(self.bytes_at(0, _HEADER.size))
            if _HEADERS.get(magic) != dtype.name or count * dtype.itemsize != size:
                problem = f"its header has the magic number {magic} and {count:,} tokens"
                raise ValueError(f"{problem}, the file {size:,} bytes of {dtype.name} tokens")
        self._windows = max(size // dtype.itemsize - 1, 0) // length

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """Return one window `(length + 1,)` as int64."""
        width = self._dtype.itemsize
        data = self.bytes_at(self._begin + index * self._length * width, (self._length + 1) * width)
        return torch.from_numpy(numpy.frombuffer(data, self._dtype).astype(numpy.int64))
