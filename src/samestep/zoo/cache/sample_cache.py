"""Cache of samples: limits, checksums and reports on top of the files of `parts`."""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import shutil
import time
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from samestep.checkpoint.files import replacing
from samestep.distributed.env import cache_folder
from samestep.errors import RunError
from samestep.zoo.cache.parts import Entry, Key, Parts

DESCRIPTION = "cache.json"
_FORMAT = 1
# Share of the disk that stays free: checkpoints of this run and other programs need space.
_FREE_SHARE = 0.05
_REFRESH_SECONDS = 0.05  # two runs that build at once see the entries of each other after this time
_MAX_REPORT_BYTES = 1024  # below the limit of an atomic write to a pipe (POSIX: 512; Linux: 4096)
_MIN_SLOTS = 1 << 10
_REMOVED = ".removed-"


class CachedSample(NamedTuple):
    """Bytes of a cached sample, mapped from the disk."""

    data: memoryview
    height: int
    width: int


class SampleCache:
    """Samples of files in a folder that processes, ranks and runs share.

    The key of a sample is a hash of path, size and modification time of its file. The folder belongs to one kind of
    contents. A damaged entry counts as missing. Errors of the disk end the growth of the cache, never the run.

    Attributes:
        folder: folder of the cache.

    Args:
        folder: created if missing.
        description: facts about the contents for users, such as the folder of the files.
        limit: bytes up to which the cache grows, or None. Each process can exceed the limit by the entries that others
            have written within 50 milliseconds.
        samples: number of samples, for the size of a table.
    """

    def __init__(self, folder: Path, description: Mapping[str, object], *, limit: int | None, samples: int) -> None:
        self.folder, self._limit, self._growth_ends = folder, limit, ""
        self._open_reports()
        slots = max(_MIN_SLOTS, 1 << (2 * samples).bit_length())
        # Shared with the loader workers, which are forks: each entry is verified once per rank.
        self._verified = memoryview(mmap.mmap(-1, 8 * slots)).cast("Q")
        self._parts: Parts | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _describe(folder, description)
            self._parts = Parts(folder)
        except OSError as error:
            self._end_growth(f"{folder} cannot be used: {error.strerror}")
        self._refreshed, self._reported_records = time.monotonic(), 0
        self._report_records()

    def _open_reports(self) -> None:
        """Open a pipe for the reports of loader workers; reports are dropped while the pipe is full."""
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    @property
    def entries(self) -> int:
        """Number of entries, as far as this process has read the index."""
        return len(self._parts) if self._parts is not None else 0

    @property
    def bytes(self) -> int:
        """Bytes of all entries, as far as this process has read the index."""
        return self._parts.bytes if self._parts is not None else 0

    def refresh(self) -> None:
        """Read the entries that other processes have added."""
        if self._parts is None:
            return
        try:
            self._parts.refresh()
        except OSError as error:
            self._end_growth(f"{self.folder} cannot be read: {error.strerror}")
        self._refreshed = time.monotonic()
        self._report_records()

    def get(self, key: Key, name: str) -> CachedSample | None:
        """Return the sample of a key, or None; `name` is its file, for reports."""
        if self._parts is None:
            return None
        entry = self._parts.find(key)
        if entry is None and time.monotonic() - self._refreshed > _REFRESH_SECONDS:
            self.refresh()
            entry = self._parts.find(key)
        while entry is not None:
            try:
                data = self._parts.view(entry)
            except OSError as error:
                is_removed = error.errno == errno.ENOENT  # another process clears the cache
                self._end_growth(
                    f"{self.folder} {'was removed' if is_removed else f'cannot be read: {error.strerror}'}"
                )
                self._parts = None
                return None
            if data is not None and self._is_intact(key, entry, data):
                return CachedSample(data, entry.height, entry.width)
            self._parts.discard(key, entry)
            place = self.folder / entry.part
            self._report(f"the cached data of {name} are damaged ({place}, byte {entry.offset}) and are built again")
            self.refresh()
            entry = self._parts.find(key)
        return None

    def add(self, key: Key, data: memoryview, height: int = 0, width: int = 0) -> None:
        """Write a sample, unless the growth of the cache has ended."""
        if self._parts is None or self._growth_ends:
            return
        if self._limit is not None and self._parts.bytes + len(data) > self._limit:
            self._end_growth(f"{self.folder} has reached data.cache_gb, {self._limit / 1e9:g} GB")
            return
        try:
            disk = os.statvfs(self.folder)
            if disk.f_bavail * disk.f_frsize - len(data) < _FREE_SHARE * disk.f_blocks * disk.f_frsize:
                self._end_growth(f"less than {_FREE_SHARE:.0%} of the disk of {self.folder} is free")
                return
            self._parts.add(key, data, height, width)
        except OSError as error:
            if error.errno == errno.ENOENT:  # another process clears the cache
                self._end_growth(f"{self.folder} was removed")
            else:
                self._end_growth(f"{self.folder} cannot be written: {error.strerror}")

    def take_reports(self) -> list[str]:
        """Return the reports of this process and its loader workers since the last call."""
        data = b""
        while True:
            try:
                data += os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return list(dict.fromkeys(data.decode(errors="replace").splitlines()))

    def _is_intact(self, key: Key, entry: Entry, data: memoryview) -> bool:
        """Verify the checksum, unless a process of this rank has done so."""
        slot = key[0] % len(self._verified)
        mark = (key[1] ^ hash((entry.part, entry.offset))) & (2**64 - 1) | 1
        if self._verified[slot] == mark:
            return True
        if zlib.crc32(data) != entry.crc:
            return False
        self._verified[slot] = mark
        return True

    def _end_growth(self, reason: str) -> None:
        if not self._growth_ends:
            self._growth_ends = reason
            self._report(f"the cache does not grow any more: {reason}")

    def _report_records(self) -> None:
        if self._parts is not None and self._parts.damaged_records > self._reported_records:
            count = self._parts.damaged_records - self._reported_records
            self._reported_records = self._parts.damaged_records
            self._report(f"{count} damaged records in the index of {self.folder}; these samples are built again")

    def _report(self, text: str) -> None:
        line = text.replace("\n", " ").encode(errors="replace")[: _MAX_REPORT_BYTES - 1] + b"\n"
        try:
            os.write(self._writer, line)
        except BlockingIOError:  # the pipe is full: hundreds of reports since the last evaluation
            return


def file_key(path: str | Path, status: os.stat_result, variant: int = 1) -> Key:
    """Return the key of a file: a hash of path, size, modification time, and the number of one of several entries."""
    text = f"{variant}\0{status.st_size}\0{status.st_mtime_ns}\0".encode() + os.fsencode(os.path.abspath(path))
    digest = blake2b(text, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _describe(folder: Path, description: Mapping[str, object]) -> None:
    path = folder / DESCRIPTION
    if not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"format": _FORMAT, **description}, indent=1) + "\n", encoding="utf-8")


def cache_name(root: Path, description: Mapping[str, object]) -> str:
    """Return the name of the folder for files below `root`: the name of `root` and a hash of the contents."""
    text = json.dumps([_FORMAT, str(root), dict(description)], sort_keys=True)
    return f"{root.name or 'root'}-{blake2b(text.encode(), digest_size=5).hexdigest()}"


@dataclass(frozen=True)
class CacheInfo:
    """One cache on the disk.

    Attributes:
        name: name of the folder in `cache_folder()`.
        kind: `decoded` or `encoded` samples.
        source: folder of the files.
        entries: number of samples.
        bytes: size of all files of the cache.
    """

    name: str
    kind: str
    source: str
    entries: int
    bytes: int


def list_caches() -> list[CacheInfo]:
    """Return the caches, sorted by name."""
    paths = sorted(cache_folder().glob(f"*/{DESCRIPTION}"))
    return [_info(path.parent) for path in paths if not path.parent.name.startswith(_REMOVED)]


def remove_cache(name: str) -> None:
    """Remove a cache; runs that use it continue without.

    Raises:
        RunError: the files cannot be removed.
    """
    folder = cache_folder() / name
    try:
        # A run that builds the cache finds no folder for new files, so that the removal meets no new names.
        folder.rename(folder.with_name(f"{_REMOVED}{name}-{secrets.token_hex(4)}"))
        for removed in folder.parent.glob(f"{_REMOVED}*"):  # those of killed commands too
            shutil.rmtree(removed)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be removed: {error.strerror}",
            expected="a folder that can be written",
            fix="make the folder writable, and repeat the command",
            code="E_OUTPUT",
        ) from error


def _info(folder: Path) -> CacheInfo:
    try:
        facts = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        kind, source = str(facts["kind"]), str(facts["source"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged: listed, so that it can be removed
        kind, source = "unknown", "unknown"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return CacheInfo(folder.name, kind, source, len(Parts(folder)), sum(path.stat().st_size for path in files))
