"""Folder of an object store: listing and transfer through fsspec, with retries."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from samestep.data.streams.data_file import changed_file, missing_file
from samestep.distributed.disk_operations import disk_operations
from samestep.distributed.logging import logger
from samestep.errors import DataError, RunError, SamestepError

Result = TypeVar("Result")
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.5, 30.0
_LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_jitter = random.SystemRandom()  # ranks that failed together do not repeat together; no seeded generator is used


class _Incomplete(OSError):
    """Transfer with another number of bytes, or another checksum, than the index has."""


@dataclass
class RemoteFolder:
    """Folder of an object store.

    Attributes:
        address: the folder, with its protocol.
        tries: attempts per operation.
        options: options of fsspec's file system.
    """

    address: str
    tries: int
    options: dict[str, Any]

    def list(self) -> list[tuple[str, int, str]]:
        """Return name, size and version of all files below the folder; none for a web server without listings."""
        system, root = self._system()
        try:
            entries = self._repeat("list", "", lambda: system.find(root, detail=True))
        except FileNotFoundError:  # no such folder, or a web server without listings
            return []
        prefix = f"{root.rstrip('/')}/"
        return [
            (path.removeprefix(prefix), _size(entry), _version(entry))
            for path, entry in entries.items()
            if path.startswith(prefix) and entry.get("type") != "directory"
        ]

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file, or None if it does not exist."""
        system, root = self._system()
        try:
            data: bytes = self._repeat("read", name, lambda: system.cat_file(f"{root}/{name}"))
        except FileNotFoundError:
            return None
        return data

    def open(self, name: str) -> IO[bytes]:
        """Return a file for reads at random positions.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        system, root = self._system()
        file: IO[bytes] = self._repeat("open", name, lambda: system.open(f"{root}/{name}", "rb", block_size=1 << 20))
        return file

    def copy(self, name: str, path: Path, difference: Callable[[], str]) -> None:
        """Copy a file to the local disk.

        Args:
            name: name of the file.
            path: local file, replaced.
            difference: returns the difference between the copy and its index, or an empty text.

        Raises:
            DataError: the file does not exist, or all copies differ from the index.
            RunError: all attempts have failed, or access is denied.
            OSError: the local disk failed.
        """
        system, root = self._system()

        def copy() -> None:
            with disk_operations.run("copy", path):
                system.get_file(f"{root}/{name}", str(path))
            if text := difference():
                raise _Incomplete(text)

        try:
            self._repeat("copy", name, copy)
        except FileNotFoundError as error:
            raise missing_file(f"{self.address}/{name}") from error

    def _system(self) -> tuple[Any, str]:
        """Return the file system of this process, which fsspec keeps, and the path of the folder."""
        try:
            import fsspec

            system, root = fsspec.core.url_to_fs(self.address, **self.options)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{self.address} cannot be opened: {error}",
                expected="fsspec with the package of the protocol, such as s3fs or gcsfs",
                fix="pip install 'samestep[streams]' and the package of the protocol",
                code="E_NOT_INSTALLED",
            ) from error
        return system, str(root)

    def _repeat(self, verb: str, name: str, function: Callable[[], Result]) -> Result:
        """Return `function()`, repeated after errors with exponentially growing waits.

        Raises:
            FileNotFoundError: the file does not exist.
            RunError: all attempts have failed, or access is denied.
        """
        address = f"{self.address}/{name}".rstrip("/")
        for attempt in range(1, self.tries + 1):
            try:
                return function()
            except (FileNotFoundError, SamestepError, MemoryError):
                raise  # another attempt has the same result
            except PermissionError as error:
                raise RunError(
                    f"{verb} of {address}: {error}",
                    expected="read access to the object store, and write access to the folder of the cache",
                    fix="check the credentials, and the folder SAMESTEP_CACHE",
                    code="E_IO",
                ) from error
            except Exception as error:  # stores and their HTTP clients have exceptions of many types
                if getattr(error, "errno", None) in _LOCAL_ERRORS:
                    raise
                cause = f"{type(error).__name__}: {error}".rstrip(": ")
                if attempt == self.tries:
                    raise _failure(verb, address, self.tries, cause, error) from error
                wait = min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _MAX_WAIT_SECONDS) * _jitter.uniform(0.5, 1)
                logger.info("%s of %s, attempt %d of %d: %s", verb, address, attempt, self.tries, cause)
                time.sleep(wait)
        raise AssertionError("at least one attempt")


def _failure(verb: str, address: str, tries: int, cause: str, error: Exception) -> SamestepError:
    if isinstance(error, _Incomplete):
        return changed_file(address, f"{error}, in each of {tries} attempts")
    return RunError(
        f"{verb} of {address} failed {tries} times: {cause}",
        expected="an object store that answers",
        fix="resume the run when the store or the network works again",
        code="E_IO",
    )


def _size(entry: dict[str, Any]) -> int:
    size = entry.get("size")
    return -1 if size is None else int(size)


def _version(entry: dict[str, Any]) -> str:
    """Return the entity tag or the time of a change; stores name them differently."""
    for key in ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "updated", "created"):
        if entry.get(key):
            return str(entry[key])
    return ""
