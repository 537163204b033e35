"""Tokens of a language model as 16- or 32-bit integers in `.bin` files, with or without the header of llm.c."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal

import numpy
import torch

from samestep.data.streams.data_file import damaged_file
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import find_files
from samestep.data.streams.source import IndexedSource, RawFile
from samestep.errors import DataError

_HEADER = struct.Struct("<256i")  # magic number, version, number of tokens
_HEADERS = {20240520: "uint16", 20240801: "uint32"}  # of llm.c: GPT-2 and Llama 3


class TokenSource(IndexedSource[RawFile]):
    """Windows of tokens: sample `i` of a file has the tokens `[i * length, i * length + length]`, both included.

    So a sample has `length` inputs and the target of each. The rest of a file that fills no window is not used.

    Args:
        folder: folder with files `*.bin`.
        length: tokens of an input.
        dtype: `uint16` or `uint32`, in little-endian order.
        header: `none`, or `llm.c` for files with its header of 1,024 bytes.

    Raises:
        DataError: there are no such files, or an argument is invalid.
    """

    def __init__(
        self,
        folder: StreamFolder,
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
        self._length, self._dtype = length, numpy.dtype(dtype).newbyteorder("<")
        self._begin = _HEADER.size if header == "llm.c" else 0
        files, _ = find_files(folder, "tokens")
        for file in files:  # a file without a whole window is never opened
            self._require_whole(f"{folder.address}/{file.name}", file.bytes - self._begin)
        counts = [(file.bytes - self._begin) // self._dtype.itemsize for file in files]
        super().__init__(folder, files, [max(count - 1, 0) // length for count in counts])

    def open(self, path: Path, file: int) -> RawFile:
        """Open a file, and compare its header with its size."""
        reader, size = RawFile(path), path.stat().st_size - self._begin
        self._require_whole(str(path), size)
        if self._begin:
            magic, _, count, *_ = _HEADER.unpack(reader.read(0, _HEADER.size))
            if _HEADERS.get(magic) != self._dtype.name or count * self._dtype.itemsize != size:
                problem = f"its header has the magic number {magic} and {count:,} tokens, the file {size:,} bytes"
                raise damaged_file(str(path), f"{problem} of {self._dtype.name} tokens")
        return reader

    def _require_whole(self, name: str, size: int) -> None:
        if size < 0:
            raise damaged_file(name, f"it ends within its header of {self._begin:,} bytes")
        if size % self._dtype.itemsize:
            raise damaged_file(name, f"{size:,} bytes of tokens are no multiple of {self._dtype.itemsize}")

    def sample(self, reader: RawFile, file: int, index: int) -> torch.Tensor:
        """Return one window `(length + 1,)` as int64."""
        width = self._dtype.itemsize
        data = reader.read(self._begin + index * self._length * width, (self._length + 1) * width)
        return torch.from_numpy(numpy.frombuffer(data, self._dtype).astype(numpy.int64))
