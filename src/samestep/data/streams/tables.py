"""Rows of Parquet and Arrow files (https://parquet.apache.org, https://arrow.apache.org), read with pyarrow."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import IO, Any

import numpy

from samestep.config.validation import require_package
from samestep.data.streams.source import Reader, SampleFiles
from samestep.errors import DataError

_GROUP_BYTES = (
    1 << 27
)  # of the decoded row groups of a file: a window of a stream reads several in random order
_ARROW_MAGIC = b"ARROW1"


class _TableFiles(SampleFiles):
    """Rows of files that pyarrow reads: dictionaries with a Python value per column.

    Args:
        address: folder with the files; see `SampleFiles`.
        columns: names of the columns, in Parquet files also of nested ones as `a.b`; None for all.

    Raises:
        DataError: there are no such files, or one is damaged or lacks a column.
        RecipeError: pyarrow is not installed.
    """

    suffix: str

    def __init__(self, address: str, columns: Sequence[str] | None = None) -> None:
        self._columns = columns
        require_package("a Parquet or Arrow file", "pyarrow", "pyarrow")
        super().__init__(address, self.suffix)


class ParquetFiles(_TableFiles):
    """Rows of Parquet files, `*.parquet`.

    A read decodes its whole row group. The last ones of each file stay in memory, up to 128 MiB:
    small row groups are faster for reads in random order.
    """

    suffix = ".parquet"

    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of a file."""
        return _ParquetReader(file, self._columns, self.place_of(name))


class ArrowFiles(_TableFiles):
    """Rows of Arrow IPC files and streams, `*.arrow`, such as those of Hugging Face `save_to_disk`.

    A local file is mapped into memory; another one is read as a whole.
    """

    suffix = ".arrow"

    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of a file."""
        return _ArrowReader(file, self._columns, self.place_of(name))


class _ParquetReader(Reader):
    """Open Parquet file, and the row groups that were read last."""

    def __init__(self, file: IO[bytes], columns: Sequence[str] | None, place: str) -> None:
        import pyarrow.parquet

        super().__init__(file)
        self._parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        _require_columns(columns, self._parquet.schema_arrow.names, place)
        self._columns = columns
        metadata = self._parquet.metadata
        self._ends = numpy.cumsum(
            [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        )
        self._rows = metadata.num_rows
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._rows)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        group = int(numpy.searchsorted(self._ends, index, side="right"))
        if group not in self._groups:
            self._groups[group] = self._parquet.read_row_group(
                group, columns=self._columns, use_threads=False
            )
            self.memory += self._groups[group].nbytes
        self._groups.move_to_end(group)
        while len(self._groups) > 1 and self.memory > _GROUP_BYTES:
            self.memory -= self._groups.popitem(last=False)[1].nbytes
        table = self._groups[group]
        return _row(table, index - (int(self._ends[group]) - table.num_rows))


class _ArrowReader(Reader):
    """Record batches of an Arrow file or stream."""

    def __init__(self, file: IO[bytes], columns: Sequence[str] | None, place: str) -> None:
        import pyarrow.ipc

        super().__init__(file)
        try:
            contents = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError:  # a file of a store has no number
            contents = memoryview(file.read())
            self.memory = len(contents)
        buffer = pyarrow.py_buffer(contents)
        if contents[: len(_ARROW_MAGIC)] == _ARROW_MAGIC:
            opened = pyarrow.ipc.open_file(buffer)
            batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        else:
            opened = pyarrow.ipc.open_stream(buffer)
            batches = list(opened)
        _require_columns(columns, opened.schema.names, place)
        self._batches = (
            batches if columns is None else [batch.select(list(columns)) for batch in batches]
        )
        self._ends = numpy.cumsum([batch.num_rows for batch in batches])

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        number = int(numpy.searchsorted(self._ends, index, side="right"))
        batch = self._batches[number]
        return _row(batch, index - (int(self._ends[number]) - batch.num_rows))


def _require_columns(columns: Sequence[str] | None, known: Collection[str], place: str) -> None:
    """Require that a file has all selected columns, of which pyarrow leaves out unknown ones.

    Raises:
        DataError: it has not.
    """
    if unknown := [
        name for name in columns or () if name not in known and name.partition(".")[0] not in known
    ]:
        raise DataError(
            f"{place} has no column {', '.join(unknown)}",
            expected=f"columns of the file: {', '.join(known)}",
            fix="correct the option columns",
            code="E_UNKNOWN_NAME",
        )


def _row(table: Any, index: int) -> dict[str, Any]:
    """Return one row of a table or record batch, with a Python value per column."""
    row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    return row
