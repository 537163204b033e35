"""Parquet files (https://parquet.apache.org), read by row groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy

from samestep.data.streams.data_file import damaged_file, is_failed_read
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.arrow import require_columns, require_pyarrow, row_of
from samestep.data.streams.formats.index import find_files
from samestep.data.streams.source import IndexedSource

_GROUP_BYTES = 1 << 27  # of the decoded row groups of a file: a window of a stream reads several in random order


class _Reader:
    """Open Parquet file, and the row groups that were read last."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        arrow = require_pyarrow("Parquet files")
        import pyarrow.parquet

        # By position (pread), so that a truncated file is an error; a memory map would end the process.
        self._file = pyarrow.parquet.ParquetFile(arrow.OSFile(str(path)), pre_buffer=False)
        self._columns = None if columns is None else list(columns)
        metadata = self._file.metadata
        paths = [metadata.schema.column(number).path.split(".") for number in range(metadata.num_columns)]
        # A name selects all columns nested in it.
        known = {name: None for path in paths for name in accumulate(path, "{}.{}".format)}
        require_columns(self._columns or (), known, str(path))
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = numpy.cumsum(counts)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self.rows, self.memory = metadata.num_rows, 0

    def row(self, index: int) -> dict[str, Any]:
        group = int(numpy.searchsorted(self._ends, index, side="right"))
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group, columns=self._columns, use_threads=False)
            self.memory += self._groups[group].nbytes
        self._groups.move_to_end(group)
        while len(self._groups) > 1 and self.memory > _GROUP_BYTES:
            self.memory -= self._groups.popitem(last=False)[1].nbytes
        return row_of(self._groups[group], index - (int(self._ends[group - 1]) if group else 0))

    def close(self) -> None:
        self._groups.clear()
        self._file.close(force=True)


class ParquetSource(IndexedSource[_Reader]):
    """Rows of Parquet files: dictionaries with a Python value per column.

    A read decodes its whole row group. The last ones of each file stay in memory, up to 128 MiB: small row groups
    are faster for reads in random order.

    Args:
        folder: folder with files `*.parquet`. Without the index of `samestep pack --index`, the end of each file is
            read for its number of rows.
        columns: names of the columns, or None for all.

    Raises:
        DataError: there are no such files, or one is damaged, or pyarrow is not installed.
    """

    def __init__(self, folder: StreamFolder, columns: Sequence[str] | None = None) -> None:
        files, sizes = find_files(folder, "parquet")
        self._columns = columns
        if sizes is None:
            sizes = []
            for file in files:
                with folder.open(file) as opened:
                    sizes.append(count_rows(opened, f"{folder.address}/{file.name}"))
        super().__init__(folder, files, sizes)

    def open(self, path: Path, file: int) -> _Reader:
        """Open a file."""
        reader = _Reader(path, self._columns)
        if reader.rows != self.sizes[file]:
            raise damaged_file(str(path), f"it has {reader.rows:,} rows, its index {self.sizes[file]:,}")
        return reader

    def sample(self, reader: _Reader, file: int, index: int) -> dict[str, Any]:
        """Return one row."""
        return reader.row(index)


def count_rows(opened: IO[bytes], name: str) -> int:
    """Return the number of rows of an open file; `name` is for errors.

    Raises:
        DataError: the file is damaged.
        OSError: the disk or the network failed.
    """
    require_pyarrow("Parquet files")
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(opened).num_rows)
    except (ValueError, OSError) as error:
        if is_failed_read(error):
            raise
        raise damaged_file(name, str(error)) from error
