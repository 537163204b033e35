"""Files of a folder or a store that fsspec opens, and the samples in them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from samestep.errors import DataError, RunError, SamestepError

_OPEN_FILES = 64
_OPEN_BYTES = 1 << 28
# Exceptions of readers for contents that they cannot decode.
_CONTENT_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    struct.error,
)


def files_below(root: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by path.

    Hidden files and folders, whose names begin with a dot, are left out. Links to folders are
    followed, unless their files are already part of the result, as those of a link to a folder
    above.
    """

    def raise_unless_closed(error: OSError) -> None:
        # A folder that is closed to this account, or removed, has no files.
        if not isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
            raise error

    files: list[Path] = []
    starts = [str(root)]
    seen = set[str]()
    # Not `os.walk(followlinks=True)`, which does not end for a link to a folder above.
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, names, file_names in os.walk(start, onerror=raise_unless_closed):
                real = os.path.realpath(folder)
                if real in seen:
                    names.clear()
                    continue
                seen.add(real)
                names[:] = [name for name in names if not name.startswith(".")]
                files += [Path(folder, name) for name in file_names if not name.startswith(".")]
                paths = [os.path.join(folder, name) for name in names]
                links += [path for path in paths if os.path.islink(path)]
        starts = sorted(links)
    return sorted(files)


def by_suffix(files: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files with one of the suffixes, in upper or lower case."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    return [file for file in files if file.name.lower().endswith(endings)]


def fingerprint_of(
    names: Sequence[str], sizes: Sequence[int] = (), checksums: Sequence[str] = ()
) -> str:
    """Return a hash of names, sizes and checksums of files, as 32 hexadecimal digits."""
    content = json.dumps([list(names), [int(size) for size in sizes], list(checksums)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class FileSource(Protocol):
    """Samples in files, in a fixed order of files; pickled or forked into loader workers.

    Attributes:
        names: name of each file, the same on all machines.
        sizes: number of samples in each file; 0 is possible.
        fingerprint: hash that is equal for equal samples, such as `fingerprint_of`.
    """

    names: list[str]
    sizes: list[int]
    fingerprint: str

    def read(self, file: int, index: int) -> Any:
        """Return sample `index` of a file of `names`."""


class Reader(ABC):
    """Samples of one open file.

    Attributes:
        memory: bytes of the contents that the reader keeps in memory, without memory maps.
    """

    memory = 0

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of the file.

        Raises:
            EOFError: the file ends before.
        """
        self.file.seek(offset)
        data = self.file.read(size)
        if len(data) < size:
            end = offset + len(data)
            raise EOFError(f"it ends at byte {end:,}, a sample at byte {offset + size:,}")
        return data


class SampleFiles(ABC):
    """Samples in the files of one format in a folder, with its subfolders.

    Each file is opened once at the start, for its number of samples. Each process opens files
    itself, since a handle of its parent has a common position, and keeps at most 64 open, or fewer
    if they keep more than 256 MiB in memory.

    Attributes:
        address: the folder.
        names: path of each file relative to the folder, sorted.
        sizes: number of samples of each file.
        fingerprint: hash of names and sizes.

    Args:
        address: path of a folder, or any address of fsspec: `s3://bucket/web`,
            `filecache::s3://bucket/web`.
        suffix: end of the names of the files.

    Raises:
        DataError: there are no such files, or one is damaged, or fsspec lacks the package of the
            protocol.
        RunError: the disk or the network failed (`E_IO`).
    """

    def __init__(self, address: str, suffix: str) -> None:
        self.address = address.rstrip("/")
        self._readers: OrderedDict[int, Reader] = OrderedDict()
        self._process = os.getpid()
        with _named_errors(self.address):
            self.names = self._find(suffix)
        self.sizes: list[int] = []
        for name in self.names:
            with _named_errors(self.place_of(name)):
                reader = self._open(name)
                self.sizes.append(len(reader))
                reader.file.close()
        self.fingerprint = fingerprint_of(self.names, self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": OrderedDict()}

    @abstractmethod
    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of an open file; an error names the defect of its contents."""

    def place_of(self, name: str) -> str:
        """Return the address of a file, for errors."""
        return f"{self.address}/{name}"

    def read(self, file: int, index: int) -> Any:
        """Return one sample.

        Raises:
            DataError: the file does not exist, is damaged, or has another number of samples than at
                the start.
            RunError: the disk or the network failed (`E_IO`).
        """
        if not 0 <= index < self.sizes[file]:
            raise IndexError(f"sample {index} of {self.names[file]}, which has {self.sizes[file]}")
        with _named_errors(self.place_of(self.names[file])):
            return self._reader(file)[index]

    def close(self) -> None:
        """Close the open files of this process."""
        while self._readers:
            self._readers.popitem()[1].file.close()

    def _reader(self, number: int) -> Reader:
        if self._process != os.getpid():  # a fork shares the positions of its parent's files
            self._process = os.getpid()
            self._readers = OrderedDict()
        if number not in self._readers:
            name = self.names[number]
            reader = self._open(name)
            if len(reader) != self.sizes[number]:
                reader.file.close()
                raise DataError(
                    f"{self.place_of(name)} has {len(reader):,} samples, not "
                    f"{self.sizes[number]:,}",
                    expected="files that do not change during a run",
                    fix="restore the file, or begin a new run",
                    code="E_FILE_CHANGED",
                )
            self._readers[number] = reader
        self._readers.move_to_end(number)
        while len(self._readers) > 1 and (
            len(self._readers) > _OPEN_FILES
            or sum(reader.memory for reader in self._readers.values()) > _OPEN_BYTES
        ):
            self._readers.popitem(last=False)[1].file.close()
        return self._readers[number]

    def _open(self, name: str) -> Reader:
        system, root = self._system()
        return self.reader(system.open(f"{root}/{name}", "rb"), name)

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

    def _find(self, suffix: str) -> list[str]:
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
            name for name in sorted(names) if name.endswith(suffix) and "/." not in f"/{name}"
        ]
        if not selected:
            raise DataError(
                f"{self.address} has no file *{suffix}",
                expected="a folder with files of the format",
                fix="correct the path or the format",
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
            expected="an intact file of the format",
            fix="copy the file again, or write it again",
            code="E_UNREADABLE",
        ) from error
