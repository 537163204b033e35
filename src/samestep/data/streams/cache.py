"""Cache of the files of an object store on the local disk, bounded, shared by the processes of a machine.

`files/` has the copies, `reserved/` an empty file with the size of each copy in progress, `locks/` a lock per file.
The time of access of a copy is the time of its last use, which this module sets.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.data.streams.data_file import DataFile, difference
from samestep.data.streams.remote import RemoteFolder
from samestep.distributed.env import cache_folder
from samestep.distributed.logging import logger
from samestep.errors import InputError, RunError, SamestepError

KIND = "files"  # of the description of the cache
_PARTIAL = ".partial"
_THREADS = 2
_WAIT_SECONDS = 0.05


class FileCache:
    """Copies of the files of one remote folder.

    A copy has a temporary name until it is complete and verified. One process copies a file while others wait for it.
    The file that was not used for the longest time is removed first; a process that has it open can read on.

    Attributes:
        folder: folder of the cache.

    Args:
        remote: the remote folder.
        limit: bytes of all copies, including those in progress.
    """

    def __init__(self, remote: RemoteFolder, limit: int) -> None:
        name, digest = remote.address.rpartition("/")[2], hashlib.blake2b(remote.address.encode(), digest_size=5)
        self.folder = cache_folder() / f"{name or 'files'}-{digest.hexdigest()}"
        self._remote, self._limit = remote, limit
        self._background: _Background | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_background": None}

    def fetch(self, file: DataFile) -> Path:
        """Return the local copy of a file, after the transfer if necessary.

        Raises:
            DataError: the file is missing, or differs from its index.
            InputError: the file is larger than the limit.
            RunError: the transfer failed, or the disk of the cache.
        """
        path = self._fetch(file, waits=True)
        assert path is not None
        return path

    def prefetch(self, files: Sequence[DataFile]) -> None:
        """Copy files in the background, in this order; a later call replaces the files that are not in progress."""
        if self._background is None or self._background.process != os.getpid():
            self._background = _Background(self._prefetch_one)
        self._background.replace(files)

    def _prefetch_one(self, file: DataFile) -> None:
        try:
            self._fetch(file, waits=False)
        except SamestepError as error:  # the read of the file repeats the transfer, and reports its error
            logger.info("prefetch: %s", error.value)
        except OSError as error:
            logger.info("prefetch of %s: %s", file.name, error)

    def _fetch(self, file: DataFile, *, waits: bool) -> Path | None:
        """Return the copy, or None if the files in progress leave no room and this call does not wait."""
        path = self.folder / "files" / _local_name(file)
        try:
            status = path.stat()
            with suppress(PermissionError):  # a copy of another account, whose time of use cannot be set
                os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):
            return self._copy(file, path, waits=waits)
        if file.bytes not in (-1, status.st_size):  # damaged by another program
            path.unlink(missing_ok=True)
            return self._copy(file, path, waits=waits)
        return path

    def _copy(self, file: DataFile, path: Path, *, waits: bool) -> Path | None:
        if file.bytes > self._limit:
            raise InputError(
                f"{file.name} has {file.bytes:,} bytes, the cache {self._limit:,}",
                expected="a cache for the open files of all ranks of a machine",
                fix="raise cache_gb, or write smaller files: samestep pack --file-size 64MiB",
                code="E_VALUE",
            )
        try:
            self._describe()
            with self._lock(path.name):
                if path.exists():  # copied by another process meanwhile
                    return path
                return path if self._transfer(file, path, waits=waits) else None
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror or error}",
                expected="a disk with space for the cache",
                fix="free space, lower cache_gb, or name another folder with SAMESTEP_CACHE",
                code="E_IO",
            ) from error

    def _transfer(self, file: DataFile, path: Path, *, waits: bool) -> bool:
        reserved, partial = self.folder / "reserved" / path.name, self.folder / "reserved" / f"{path.name}{_PARTIAL}"
        for leftover in (reserved, partial):  # of a process that was killed; this one has the lock of the file
            leftover.unlink(missing_ok=True)
        while not self._reserve(reserved, max(file.bytes, 0)):
            if not waits:
                return False
            time.sleep(_WAIT_SECONDS)  # copies in progress end, and can be removed then
        try:
            self._remote.copy(file.name, partial, lambda: difference(partial, file))
            with partial.open("rb") as copy:  # a name without its contents after a crash would have the right size
                os.fsync(copy.fileno())
            now = time.time_ns()  # the kernel's own times of two copies can be equal
            os.utime(partial, ns=(now, now))
            partial.replace(path)
        finally:
            for leftover in (reserved, partial):
                leftover.unlink(missing_ok=True)
        return True

    def _reserve(self, reserved: Path, size: int) -> bool:
        """Reserve bytes for a copy; remove the least recently used copies if necessary."""
        with self._lock("room"):
            copies = [(path.stat(), path) for path in (self.folder / "files").iterdir()]
            room = self._limit - self._reserved_bytes() - sum(status.st_size for status, _ in copies)
            for status, path in sorted(copies, key=lambda copy: copy[0].st_atime_ns):
                if room >= size:
                    break
                path.unlink(missing_ok=True)
                room += status.st_size
            if room < size:
                return False
            reserved.touch()
            os.truncate(reserved, size)
        return True

    def _reserved_bytes(self) -> int:
        """Return the bytes of copies in progress, and remove the rest of copies of killed processes."""
        from filelock import Timeout

        total = 0
        with os.scandir(self.folder / "reserved") as entries:
            for entry in entries:
                try:
                    with self._lock(entry.name.removesuffix(_PARTIAL), timeout=0):
                        Path(entry.path).unlink(missing_ok=True)
                except Timeout:
                    with suppress(FileNotFoundError):  # complete meanwhile
                        total += 0 if entry.name.endswith(_PARTIAL) else entry.stat().st_size
        return total

    def _lock(self, name: str, timeout: float = -1) -> Any:
        from filelock import FileLock

        return FileLock(self.folder / "locks" / f"{name}.lock", timeout=timeout)

    def _describe(self) -> None:
        for name in ("files", "reserved", "locks"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        description = self.folder / "cache.json"
        if not description.exists():
            temporary = self.folder / f".cache.json-{os.getpid()}-{threading.get_ident()}"
            temporary.write_text(json.dumps({"kind": KIND, "source": self._remote.address}) + "\n", encoding="utf-8")
            temporary.replace(description)


class _Background:
    """Threads that copy files; they end when no file is left."""

    def __init__(self, function: Callable[[DataFile], None]) -> None:
        self.process = os.getpid()
        self._function, self._files, self._running = function, list[DataFile](), 0
        self._lock = threading.Lock()

    def replace(self, files: Sequence[DataFile]) -> None:
        with self._lock:
            self._files = list(files)
            missing = min(_THREADS, len(self._files)) - self._running
            self._running += max(missing, 0)
        for _ in range(missing):
            threading.Thread(target=self._run, name="samestep-prefetch", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._files:
                    self._running -= 1
                    return
                file = self._files.pop(0)
            try:
                self._function(file)
            except BaseException:  # ends this thread; `replace` starts another one
                with self._lock:
                    self._running -= 1
                raise


def _local_name(file: DataFile) -> str:
    """Return the name of a copy, which differs for another version of the file."""
    facts = "\0".join((file.name, str(file.bytes), file.checksum, file.version))
    digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return f"{digest}-{file.name.rpartition('/')[2]}"
