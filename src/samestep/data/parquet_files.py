"""Rows of Parquet files in a folder, or in a store that fsspec opens."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from samestep.config.validation import require_package
from samestep.data.sample_files import files_below, fingerprint_of
from samestep.errors import DataError, RunError, SamestepError

_OPEN_FILES = 64
_OPEN_BYTES = 1 << 28
# Of the decoded row groups of a file: a window of a stream reads several in random order.
_GROUP_BYTES = 1 << 27
# Exceptions of readers for contents that they cannot decode.
_CONTENT_ERRORS = (OSError, ValueError, LookupError, TypeError, EOFError)


class _OpenFile:
    """Rows of an open file, whose row groups that were read last stay in memory.

    Attributes:
        memory: bytes of the row groups in memory.
    """

    def __init__(self, file: Any, columns: list[str] | None) -> None:
        import pyarrow.parquet

        self._file = file
        self._columns = columns
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        self.memory = 0
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

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ParquetFiles:
    """Rows of Parquet files, `*.parquet` (https://parquet.apache.org), as dictionaries.

    The files of a folder and its subfolders are opened once at the start, for their numbers of
    rows. Each process opens files itself, since a handle of its parent has a common position, and
    keeps at most 64 open, or fewer if they keep more than 256 MiB in memory. A read decodes its
    whole row group. The last ones of each file stay in memory, up to 128 MiB: small row groups are
    faster for reads in random order.

    Attributes:
        address: the folder.
        names: path of each file relative to the folder, sorted.
        sizes: number of rows of each file.
        fingerprint: hash of names and sizes.

    Args:
        address: path of a folder, or any address of fsspec: `s3://bucket/web`,
            `filecache::s3://bucket/web`.
        columns: names of the columns, also of nested ones as `a.b`; None for all.

    Raises:
        DataError: there are no such files, or one is damaged or lacks a column, or fsspec lacks the
            package of the protocol.
        RecipeError: pyarrow is not installed.
        RunError: the disk or the network failed (`E_IO`).
    """

    def __init__(self, address: str, columns: Sequence[str] | None = None) -> None:
        require_package("a Parquet file", "pyarrow", "pyarrow")
        self.address = address.rstrip("/")
        self._columns = None if columns is None else list(columns)
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._process = os.getpid()
        with _named_errors(self.address):
            self.names = self._find()
        self.sizes: list[int] = []
        for name in self.names:
            with _named_errors(self.place_of(name)):
                file = self._open(name)
                self.sizes.append(len(file))
                file.close()
        self.fingerprint = fingerprint_of(self.names, self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def place_of(self, name: str) -> str:
        """Return the address of a file, for errors."""
        return f"{self.address}/{name}"

    def read(self, file: int, index: int) -> dict[str, Any]:
        """Return one row.

        Raises:
            DataError: the file does not exist, is damaged, or has another number of rows than
                before.
            RunError: the disk or the network failed (`E_IO`).
        """
        if not 0 <= index < self.sizes[file]:
            raise IndexError(f"sample {index} of {self.names[file]}, which has {self.sizes[file]}")
        with _named_errors(self.place_of(self.names[file])):
            return self._opened(file)[index]

    def close(self) -> None:
        """Close the open files of this process."""
        while self._files:
            self._files.popitem()[1].close()

    def _opened(self, number: int) -> _OpenFile:
        if self._process != os.getpid():  # a fork shares the positions of its parent's files
            self._process = os.getpid()
            self._files = OrderedDict()
        if number not in self._files:
            name = self.names[number]
            file = self._open(name)
            if len(file) != self.sizes[number]:
                file.close()
                raise DataError(
                    f"{self.place_of(name)} has {len(file):,} samples, not {self.sizes[number]:,}",
                    expected="files that do not change during a run",
                    fix="restore the file, or begin a new run",
                    code="E_FILE_CHANGED",
                )
            self._files[number] = file
        self._files.move_to_end(number)
        while len(self._files) > 1 and (
            len(self._files) > _OPEN_FILES
            or sum(file.memory for file in self._files.values()) > _OPEN_BYTES
        ):
            self._files.popitem(last=False)[1].close()
        return self._files[number]

    def _open(self, name: str) -> _OpenFile:
        system, root = self._system()
        file = _OpenFile(system.open(f"{root}/{name}", "rb"), self._columns)
        known = file.column_names
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
        return file

    def _system(self) -> tuple[Any, str]:
        """Return the file system, of which fsspec keeps one per process, and the folder in it."""
        import fsspec

        try:
            system, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{self.address} cannot be opened: {error}",
                expected="a folder, or an address of fsspec, whose protocol can need a package "
                "such as s3fs or gcsfs",
                fix="correct the address, or install the package of the protocol",
                code="E_NOT_INSTALLED",
            ) from error
        return system, str(root)

    def _find(self) -> list[str]:
        from fsspec.implementations.local import LocalFileSystem

        system, root = self._system()
        if isinstance(system, LocalFileSystem):
            # fsspec does not follow links to folders.
            paths = [str(path) for path in files_below(Path(root))]
        else:
            paths = system.find(root)
        prefix = f"{root.rstrip('/')}/"
        # Names stay texts: a path would change the key `a//b` of a store.
        names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
        selected = [
            name for name in sorted(names) if name.endswith(".parquet") and "/." not in f"/{name}"
        ]
        if not selected:
            raise DataError(
                f"{self.address} has no file *.parquet",
                expected="a folder with Parquet files",
                fix="correct the path",
                code="E_FILE_MISSING",
            )
        return selected


@contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Convert errors of a file, or of the folder, to errors with its place."""
    try:
        yield
    except SamestepError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"there is no file {place}",
            expected="all files that the folder had at the start",
            fix="copy the file again",
            code="E_FILE_MISSING",
        ) from error
    except _CONTENT_ERRORS as error:
        is_connection = isinstance(error, TimeoutError | ConnectionError)
        if is_connection or getattr(error, "errno", None) is not None:
            raise RunError(
                f"{place} cannot be read now: {getattr(error, 'strerror', None) or error}",
                expected="a working disk and network, and access to the file",
                fix="resume the run when the disk or the network works again",
                code="E_IO",
            ) from error
        raise DataError(
            f"{place} is damaged: {error}",
            expected="an intact Parquet file",
            fix="copy the file again, or write it again",
            code="E_UNREADABLE",
        ) from error
