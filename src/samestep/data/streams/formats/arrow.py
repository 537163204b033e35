"""Arrow IPC files and streams, such as those of Hugging Face `save_to_disk` (https://arrow.apache.org).

The import of pyarrow, the check of columns and the conversion of rows are also those of Parquet files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

from samestep.data.streams.data_file import damaged_file, is_failed_read
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import find_files
from samestep.data.streams.source import IndexedSource
from samestep.errors import DataError

_FILE_MAGIC = b"ARROW1"


class _Reader:
    """Record batches of a memory-mapped file."""

    memory = 0  # the batches are parts of the memory map; compressed ones are decompressed when they are read

    def __init__(self, path: Path) -> None:
        arrow = require_pyarrow("Arrow files")
        with path.open("rb") as file:
            is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        self._map = arrow.memory_map(str(path))
        if is_file:
            opened = arrow.ipc.open_file(self._map)
            self._batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        else:
            opened = arrow.ipc.open_stream(self._map)
            self._batches = list(opened)
        self.columns: list[str] = opened.schema.names
        self._ends = numpy.cumsum([batch.num_rows for batch in self._batches])
        self.rows = int(self._ends[-1]) if self._batches else 0

    def row(self, index: int) -> dict[str, Any]:
        number = int(numpy.searchsorted(self._ends, index, side="right"))
        return row_of(self._batches[number], index - (int(self._ends[number - 1]) if number else 0))

    def close(self) -> None:
        self._batches = []
        self._map.close()


class ArrowSource(IndexedSource[_Reader]):
    """Rows of Arrow files: dictionaries with a Python value per column.

    Args:
        folder: folder with files `*.arrow`, each an IPC file or stream. Without the index of `samestep pack --index`,
            each file is opened once for its number of rows.
        columns: names of the columns, or None for all.

    Raises:
        DataError: there are no such files, or one is damaged, or pyarrow is not installed.
    """

    def __init__(self, folder: StreamFolder, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else set(columns)
        files, sizes = find_files(folder, "arrow")
        if sizes is None:
            sizes = [folder.use(file, count_rows) for file in files]
        super().__init__(folder, files, sizes)

    def open(self, path: Path, file: int) -> _Reader:
        """Map a file."""
        reader = _Reader(path)
        require_columns(self._columns or (), reader.columns, str(path))
        if reader.rows != self.sizes[file]:
            raise damaged_file(str(path), f"it has {reader.rows:,} rows, its index {self.sizes[file]:,}")
        return reader

    def sample(self, reader: _Reader, file: int, index: int) -> dict[str, Any]:
        """Return one row."""
        row = reader.row(index)
        return row if self._columns is None else {name: row[name] for name in row if name in self._columns}


def count_rows(path: Path) -> int:
    """Return the number of rows of a local file.

    Raises:
        DataError: the file is damaged.
        OSError: the disk failed, or another process has removed the file.
    """
    try:
        reader = _Reader(path)
    except (ValueError, OSError, EOFError) as error:
        if is_failed_read(error):
            raise
        raise damaged_file(str(path), str(error)) from error
    reader.close()
    return reader.rows


def require_pyarrow(needed_by: str) -> Any:
    """Return the module pyarrow.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{needed_by} need pyarrow: {error}",
            expected="the optional package pyarrow",
            fix="pip install 'samestep[streams]'",
            code="E_NOT_INSTALLED",
        ) from error
    return pyarrow


def require_columns(columns: Iterable[str], known: Collection[str], name: str) -> None:
    """Require that a file has all selected columns; `name` is for errors.

    Raises:
        DataError: it has not.
    """
    if unknown := [column for column in columns if column not in known]:
        raise DataError(
            f"{name} has no column {', '.join(map(str, unknown))}",
            expected=f"columns of the file: {', '.join(known)}",
            fix="correct the option columns",
            code="E_COLUMN",
        )


def row_of(table: Any, index: int) -> dict[str, Any]:
    """Return one row of a table or record batch, with a Python value per column."""
    row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    return row
