"""Source of samples in verified files, of which each process keeps a bounded number open."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from samestep.data.streams.data_file import DataFile, failed_read, is_failed_read
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError, SamestepError

_OPEN_FILES = 64
_OPEN_BYTES = 1 << 28


class Reader(Protocol):
    """Open file.

    Attributes:
        memory: bytes of the contents that the reader keeps in memory, without memory maps.
    """

    @property
    def memory(self) -> int: ...

    def close(self) -> None: ...


R = TypeVar("R", bound=Reader)


class IndexedSource(ABC, Generic[R]):
    """A `FileSource` of files whose numbers of samples are known.

    Each process opens at most 64 files, and fewer if their readers keep more than 256 MiB in memory together.

    Args:
        folder: the folder of the files.
        files: the files in their order.
        sizes: number of samples of each file.
    """

    def __init__(self, folder: StreamFolder, files: Sequence[DataFile], sizes: Sequence[int]) -> None:
        self.folder, self.files = folder, folder.with_versions(files)
        self.names, self.sizes = [file.name for file in files], [int(size) for size in sizes]
        self.fingerprint = fingerprint_of(self.names, self.sizes, [file.checksum for file in files])
        self._readers: OrderedDict[int, R] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": OrderedDict()}

    def read(self, file: int, index: int) -> Any:
        """Return one sample; see `FileSource.read`."""
        if not 0 <= index < self.sizes[file]:
            raise IndexError(f"sample {index} of {self.names[file]}, which has {self.sizes[file]}")
        with_name = f"{self.folder.address}/{self.names[file]}"
        try:
            return self.sample(self._reader(file), file, index)
        except (SamestepError, MemoryError, ImportError):
            raise
        except OSError as error:
            if is_failed_read(error):
                raise failed_read(with_name, error) from error
            raise damaged_file(with_name, f"sample {index} cannot be decoded: {error}") from error
        except (ValueError, LookupError, struct.error, TypeError, EOFError) as error:
            raise damaged_file(with_name, f"sample {index} cannot be decoded: {error}") from error

    def prepare(self, files: Sequence[int]) -> None:
        """Fetch files in the background; see `FileSource.prepare`."""
        self.folder.prefetch([self.files[file] for file in files if file not in self._readers])

    def close(self) -> None:
        """Close the open files of this process."""
        while self._readers:
            self._readers.popitem()[1].close()

    @abstractmethod
    def open(self, path: Path, file: int) -> R:
        """Open the local copy of the file number `file`.

        Raises:
            FileNotFoundError: another process has removed the copy.
        """

    @abstractmethod
    def sample(self, reader: R, file: int, index: int) -> Any:
        """Return one sample of an open file."""

    def _reader(self, file: int) -> R:
        if self._process != os.getpid():  # a fork shares the positions of its parent's files
            self._process, self._readers = os.getpid(), OrderedDict()
        reader = self._readers.get(file)
        if reader is None:
            reader = self.folder.use(self.files[file], lambda path: self.open(path, file))
            self._readers[file] = reader
        self._readers.move_to_end(file)
        while len(self._readers) > 1 and (
            len(self._readers) > _OPEN_FILES or sum(reader.memory for reader in self._readers.values()) > _OPEN_BYTES
        ):
            self._readers.popitem(last=False)[1].close()
        return reader


class RawFile:
    """Bytes of a file by position; a truncated file is an error, which a memory map would not report.

    Args:
        path: the file.
        data: its contents, if the file is compressed.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self._descriptor = -1
        self._path, self._data, self.memory = path, data, len(data or b"")
        if data is None:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes.

        Raises:
            DataError: the file ends before.
        """
        end = offset + size
        if self._data is not None:
            data = self._data[offset:end]
        else:
            data = os.pread(self._descriptor, size, offset)
            while len(data) < size and (rest := os.pread(self._descriptor, size - len(data), offset + len(data))):
                data += rest
        if size < 0 or len(data) < size:
            raise damaged_file(str(self._path), f"it ends at byte {offset + len(data):,}, a sample at byte {end:,}")
        return data

    def close(self) -> None:
        """Close the file; further calls have no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def damaged_file(name: str, problem: str) -> DataError:
    """Return the error of a file whose contents are invalid."""
    return DataError(
        f"{name} is damaged: {problem}",
        expected="an intact file of the format",
        fix="copy the file again, or write it again",
        code="E_UNREADABLE",
    )
