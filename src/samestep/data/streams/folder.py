"""Files of a local folder, or of an object store with a cache on the local disk, with verification."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from samestep.data.folder_files import files_below
from samestep.data.streams.cache import FileCache
from samestep.data.streams.data_file import DataFile, contents_key, failed_read, is_failed_read, missing_file, verify
from samestep.data.streams.remote import RemoteFolder
from samestep.errors import DataError

Opened = TypeVar("Opened")
_ATTEMPTS = 5  # another process can remove a cached file between its download and its use


@dataclass
class StreamFolder:
    """Folder of sample files.

    Files of an object store are copied to the local disk when they are used or prefetched. Ranks, loader workers and
    later runs share the copies.

    Args:
        address: path of a folder, or an address that fsspec supports: `s3://`, `gs://`, `https://`, `memory://`.
        cache_gb: size of the cache in 10^9 bytes; the files that were not used for the longest time are removed.
        tries: attempts per file, with exponentially growing waits between them.
        storage_options: options of fsspec's file system, such as credentials.

    Raises:
        DataError: an argument has another type, or is outside of its range.
    """

    address: str
    cache_gb: float = 32.0
    tries: int = 5
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._require_values()
        self._remote: RemoteFolder | None = None
        self._cache: FileCache | None = None
        if "://" in self.address:
            self._remote = RemoteFolder(self.address.rstrip("/"), self.tries, dict(self.storage_options))
            self._cache = FileCache(self._remote, int(self.cache_gb * 1e9))

    def find(self, pattern: str) -> list[DataFile]:
        """Return the files whose names match a shell pattern, such as `*.tar`, sorted by name; subfolders included.

        Hidden files and files in hidden folders are left out.

        Raises:
            DataError: there is no such folder, or no such file, or a link to one is broken.
        """
        if self._remote is not None:
            files = [DataFile(name, size, "", version) for name, size, version in self._remote.list()]
            selected = [file for file in files if fnmatch.fnmatchcase(file.name.rpartition("/")[2], pattern)]
            selected = [file for file in selected if "/." not in f"/{file.name}"]
        else:
            paths = files_below(Path(self.address))
            selected = [self._stat(path) for path in paths if fnmatch.fnmatchcase(path.name, pattern)]
        if not selected:
            raise DataError(
                f"{self.address} has no file {pattern}",
                expected="a folder with files of the format",
                fix="correct the path or the format",
                code="E_FILE_MISSING",
            )
        return sorted(selected, key=lambda file: file.name)

    def with_versions(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Return the files with the version that each has now, if neither their index nor a listing has described one.

        So a file without a checksum that changes during a run, or that changes between runs with a cache, is noticed.
        """
        if all(file.checksum or file.version for file in files):
            return list(files)
        if self._remote is not None:
            versions = {name: version for name, _, version in self._remote.list()}
        else:
            paths = {file.name: Path(self.address) / file.name for file in files}
            versions = {name: self._stat(path).version for name, path in paths.items() if path.is_file()}
        return [replace(file, version=file.version or versions.get(file.name, "")) for file in files]

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file, such as an index, or None if it does not exist.

        Raises:
            RunError: the disk or the network failed (`E_IO`).
        """
        if self._remote is not None:
            return self._remote.read(name)
        try:
            with self._disk_errors(name):
                return (Path(self.address) / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextmanager
    def open(self, file: DataFile) -> Iterator[IO[bytes]]:
        """Open a file for a few reads at random positions, without a copy on the local disk.

        Raises:
            RunError: the disk or the network failed (`E_IO`), also in the block.
        """
        with self._disk_errors(file.name):
            path, remote = Path(self.address) / file.name, self._remote
            with path.open("rb") if remote is None else remote.open(file.name) as opened:
                yield opened

    def use(self, file: DataFile, function: Callable[[Path], Opened]) -> Opened:
        """Return `function(path)` for the verified local path of a file.

        Raises:
            DataError: the file is missing (`E_FILE_MISSING`), or its size or checksum differs from the index or from
                the start of the run (`E_FILE_CHANGED`).
            RunError: the file cannot be read, or cannot be copied from the object store (`E_IO`).
        """
        with self._disk_errors(file.name):
            if self._cache is None:
                path = Path(self.address) / file.name
                verify(path, file)
                return function(path)
            for _ in range(_ATTEMPTS):
                path = self._cache.fetch(file)
                try:
                    return function(path)
                except FileNotFoundError:  # removed by another process, to stay within the limit
                    continue
            return function(self._cache.fetch(file))

    def cache_key(self, file: DataFile) -> str:
        """Return a text that identifies a file with its present contents, for what is derived from them.

        Raises:
            DataError: the file of a local folder is missing (`E_FILE_MISSING`).
            RunError: the disk failed (`E_IO`).
        """
        if self._remote is not None:
            return "\0".join((self.address, file.name, str(file.bytes), file.checksum, file.version))
        path = Path(self.address) / file.name
        with self._disk_errors(file.name):
            try:
                return contents_key(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise missing_file(str(path)) from error

    def prefetch(self, files: Sequence[DataFile]) -> None:
        """Copy files to the local disk in the background, in this order; a later call replaces the files."""
        if self._cache is not None:
            self._cache.prefetch(files)

    @contextmanager
    def _disk_errors(self, name: str) -> Iterator[None]:
        """Convert errors of the disk and the network."""
        try:
            yield
        except OSError as error:
            if not is_failed_read(error) or isinstance(error, FileNotFoundError | NotADirectoryError):
                raise
            raise failed_read(f"{self.address}/{name}", error) from error

    def _require_values(self) -> None:
        size, tries = self.cache_gb, self.tries
        rules = {
            "address": (isinstance(self.address, str), "a text", "'folder'"),
            "cache_gb": (_is_number(size, int | float) and 0 < size < math.inf, "a finite number > 0", 32),
            "tries": (_is_number(tries, int) and tries >= 1, "an integer >= 1", 5),
            "storage_options": (isinstance(self.storage_options, Mapping), "a mapping", {}),
        }
        for name, (is_valid, expected, example) in rules.items():
            if not is_valid:
                problem = f"{name} of a folder of sample files is {getattr(self, name)!r}"
                raise DataError(problem, expected, f"{name}={example}", code="E_VALUE")

    def _stat(self, path: Path) -> DataFile:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise missing_file(str(path)) from error
        return DataFile(path.relative_to(self.address).as_posix(), status.st_size, "", str(status.st_mtime_ns))


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
