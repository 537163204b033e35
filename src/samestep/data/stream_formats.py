"""Formats of the files of a stream: Parquet, and tokens."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO, Any, Literal

import numpy
import torch

from samestep.config.validation import require_package
from samestep.data.sample_files import Reader, SampleFiles
from samestep.errors import DataError

# Of the decoded row groups of a file: a window of a stream reads several in random order.
_GROUP_BYTES = 1 << 27
_HEADER = struct.Struct("<256i")  # magic number, version, number of tokens
_HEADERS = {20240520: "uint16", 20240801: "uint32"}  # of llm.c: GPT-2 and Llama 3


class ParquetFiles(SampleFiles):
    """Rows of Parquet files, `*.parquet` (https://parquet.apache.org), as dictionaries.

    A read decodes its whole row group. The last ones of each file stay in memory, up to 128 MiB:
    small row groups are faster for reads in random order.

    Args:
        address: folder with the files; see `SampleFiles`.
        columns: names of the columns, also of nested ones as `a.b`; None for all.

    Raises:
        DataError: there are no such files, or one is damaged or lacks a column.
        RecipeError: pyarrow is not installed.
    """

    def __init__(self, address: str, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        require_package("a Parquet file", "pyarrow", "pyarrow")
        super().__init__(address, ".parquet")

    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of a file, which has the columns."""
        reader = _ParquetReader(file, self._columns)
        known = reader.column_names
        # pyarrow leaves out unknown columns.
        unknown = [
            column
            for column in self._columns or ()
            if column not in known and column.partition(".")[0] not in known
        ]
        if unknown:
            raise DataError(
                f"{self.place_of(name)} has no column {', '.join(unknown)}",
                expected=f"columns of the file: {', '.join(known)}",
                fix="correct the option columns",
                code="E_UNKNOWN_NAME",
            )
        return reader


class _ParquetReader(Reader):
    """Rows of an open file, whose row groups that were read last stay in memory."""

    def __init__(self, file: IO[bytes], columns: list[str] | None) -> None:
        import pyarrow.parquet

        super().__init__(file)
        self._columns = columns
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        self.column_names: list[str] = self._parquet.schema_arrow.names
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = numpy.cumsum([0, *sizes])  # of the groups, in rows of the file

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        number = int(numpy.searchsorted(self._ends, index, side="right")) - 1
        rows = self._group(number).slice(index - int(self._ends[number]), 1)
        row: dict[str, Any] = rows.to_pylist()[0]
        return row

    def _group(self, number: int) -> Any:
        if number not in self._groups:
            group = self._parquet.read_row_group(number, columns=self._columns, use_threads=False)
            self._groups[number] = group
            self.memory += group.nbytes
        self._groups.move_to_end(number)
        while len(self._groups) > 1 and self.memory > _GROUP_BYTES:
            self.memory -= self._groups.popitem(last=False)[1].nbytes
        return self._groups[number]


class TokenFiles(SampleFiles):
    """Windows of tokens: sample `i` has the tokens from `i * length` to `i * length + length`.

    Both ends are included, so a sample has `length` inputs and the target of each. The rest of a
    file that fills no window is not used.

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
