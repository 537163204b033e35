"""Sources of samples in files: the protocol, and sources of verified files of which a process keeps some open."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from samestep.data.streams.data_file import DataFile, damaged_file, failed_read, is_failed_read
from samestep.data.streams.folder import StreamFolder
from samestep.errors import SamestepError

_OPEN_FILES = 64
_OPEN_BYTES = 1 << 28


class FileSource(Protocol):
    """Samples in files, in a fixed order of files.

    A source is pickled or forked into loader workers. It opens files when they are read, separately in each process: a
    file position is shared with a process that was forked later, so a handle is opened again after a fork, or is used
    by `os.pread` or a memory map only. The number of open files and the memory are bounded: a source closes the files
    that were not read for the longest time.

    Attributes:
        names: name of each file, the same on all machines: a path relative to the folder or address of the source.
        sizes: number of samples in each file; 0 is possible.
        fingerprint: hash of names, sizes and, if the index of the source has them, checksums of the files. Two sources
            with equal fingerprints have equal samples. See `fingerprint_of`.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, file: int, index: int) -> Any:
        """Return one sample.

        Args:
            file: index into `names`.
            index: position in the file, from 0 to `sizes[file] - 1`.

        Raises:
            DataError: the error names the file. `E_FILE_MISSING`: it does not exist. `E_UNREADABLE`: it is truncated or
                damaged. `E_FILE_CHANGED`: its size or checksum differs from the index. `E_IO`: disk or network failed.
        """

    def prepare(self, files: Sequence[int]) -> None:
        """Fetch files in the background, such as to the local disk; return at once.

        Args:
            files: the files of the next reads in this process, in the order of their use. A later call replaces the
                files; a file can be in both. A source of local files does nothing.

        An error of a file is raised by `read`.
        """


def fingerprint_of(names: Sequence[str], sizes: Sequence[int], checksums: Sequence[str] = ()) -> str:
    """Return a hash of the names and sizes of files, and of their checksums, if known, as 32 hexadecimal digits."""
    content = json.dumps([list(names), [int(size) for size in sizes], list(checksums)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


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
        name = f"{self.folder.address}/{self.names[file]}"
        try:
            return self.sample(self._reader(file), file, index)
        except SamestepError:
            raise
        except (OSError, ValueError, LookupError, struct.error, TypeError, EOFError) as error:
            if is_failed_read(error):
                raise failed_read(name, error) from error
            raise damaged_file(name, f"sample {index} cannot be decoded: {error}") from error

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
