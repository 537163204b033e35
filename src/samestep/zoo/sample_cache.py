"""Cache of samples of files on the local disk, which processes, ranks and runs share.

A cache is a folder of parts. One process writes a part, a pair of files: `NAME.data` has the bytes
of samples, and `NAME.index` a record of fixed size for each, written after its sample, so a killed
process leaves no record without data. Processes share no lock: each reads the parts of the others,
and a sample can be in several parts.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import struct
import time
import weakref
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from samestep.checkpoint.files import replacing
from samestep.distributed.disk_operations import disk_operations, read_small, regular_file
from samestep.distributed.env import cache_folder
from samestep.errors import RunError

DESCRIPTION = "cache.json"
_FORMAT = 2
_DATA = ".data"
_INDEX = ".index"
_ALIGNMENT = 64
_RECORD = struct.Struct("<QQQQIIII")  # the fields of `Entry`
_TYPE = numpy.dtype(
    [(name, "<u8") for name in ("high", "low", "offset", "length")]
    + [(name, "<u4") for name in ("height", "width", "crc", "part")]
)
# Share of the disk that stays free: checkpoints of this run and other programs need space.
_FREE_SHARE = 0.05
# Entries are visible after this time, and after the time in which reading them takes this share.
_REFRESH_SECONDS = 0.05
_REFRESH_SHARE = 0.05
_MIN_SLOTS = 1 << 10
_MAX_REPORT_BYTES = 1024  # below the limit of an atomic write to a pipe (POSIX: 512; Linux: 4096)

Key = tuple[int, int]


class CachedSample(NamedTuple):
    """Bytes of a cached sample, mapped from the disk."""

    data: memoryview
    height: int
    width: int


class Entry(NamedTuple):
    """Record of one sample."""

    high: int  # of the key
    low: int
    offset: int
    length: int
    height: int  # of an image in pixels; 0 for other bytes
    width: int
    crc: int  # of the other fields, without the part, and of the bytes
    part: int  # number of the part in this process; 0 on the disk


@dataclass
class _Part:
    """A part as far as this process has read it."""

    name: str
    records: int = 0
    bytes: int = 0
    mapped: mmap.mmap | None = None
    is_removed: bool = False


class SampleCache:
    """Samples of files in a folder.

    The key of a sample is a hash of path, size and modification time of its file. A part with a
    damaged entry is reported and removed, so its samples are built again. Errors of the disk end
    the growth of the cache, never the run.

    Attributes:
        folder: folder of the cache.

    Args:
        folder: created if missing.
        description: facts about the contents for users, with `source`, the folder of the files.
        limit: bytes up to which the cache grows, or None. Each process can exceed the limit by the
            entries that others have written since its last `refresh`.
        samples: number of samples, for the size of a table.
    """

    def __init__(
        self, folder: Path, description: Mapping[str, object], *, limit: int | None, samples: int
    ) -> None:
        self.folder = folder
        self._limit = limit
        self._growth_ends = False
        self._parts: list[_Part] = []
        self._numbers: dict[str, int] = {}  # of parts, by name
        self._table: NDArray[Any] = numpy.empty(0, _TYPE)  # sorted by the first halves of keys
        self._keys: NDArray[numpy.uint64] = numpy.empty(0, numpy.uint64)
        self._writer: _Writer | None = None
        slots = max(_MIN_SLOTS, 1 << (2 * samples).bit_length())
        # Shared with the loader workers, which are forks: each entry is verified once per rank.
        self._verified = memoryview(mmap.mmap(-1, 8 * slots)).cast("Q")
        # Reports of loader workers; they are dropped while the pipe is full.
        self._report_reader, self._report_writer = os.pipe()
        for descriptor in (self._report_reader, self._report_writer):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (folder / DESCRIPTION).exists():
                with replacing(folder / DESCRIPTION) as temporary:
                    temporary.write_text(json.dumps(description, indent=1), encoding="utf-8")
        except OSError as error:
            self._end_growth(f"{folder} cannot be used: {error.strerror}")
        self.refresh()

    @property
    def entries(self) -> int:
        """Number of entries that this process has read; one in two parts can count twice."""
        return len(self._table)

    @property
    def bytes(self) -> int:
        """Bytes of all entries, as far as this process has read the parts."""
        return sum(part.bytes for part in self._parts)

    def refresh(self) -> None:
        """Read the entries that were added since the last call, also by this process."""
        began = time.monotonic()
        try:
            rows = [self._new_rows(path) for path in self.folder.glob(f"*{_INDEX}")]
        except OSError as error:
            rows = []
            self._end_growth(f"{self.folder} cannot be read: {error.strerror}")
        if any(map(len, rows)):
            self._set_table(numpy.concatenate([self._table, *rows]))
        now = time.monotonic()
        self._next_refresh = now + max(_REFRESH_SECONDS, (now - began) / _REFRESH_SHARE)

    def get(self, key: Key, name: str) -> CachedSample | None:
        """Return the sample of a key, or None; `name` is its file, for reports."""
        entry = self._find(key)
        if entry is None and time.monotonic() > self._next_refresh:
            self.refresh()
            entry = self._find(key)
        while entry is not None:
            try:
                data = self._view(entry)
            except FileNotFoundError:  # another process has removed the part
                self._forget(entry.part)
                entry = self._find(key)
                continue
            except OSError as error:
                self._end_growth(f"{self.folder} cannot be read: {error.strerror}")
                return None
            if data is not None and self._is_intact(entry, data):
                return CachedSample(data, entry.height, entry.width)
            part = self._forget(entry.part)
            problem = f"the cached data of {name} are damaged"
            self._report(f"{problem}; removed {part}, whose samples are built again")
            entry = self._find(key)
        return None

    def add(self, key: Key, data: memoryview, height: int = 0, width: int = 0) -> None:
        """Write a sample, unless the growth of the cache has ended."""
        if self._growth_ends:
            return
        if self._limit is not None and self.bytes + len(data) > self._limit:
            self._end_growth(f"{self.folder} has reached data.cache_gb, {self._limit / 1e9:g} GB")
            return
        try:
            disk = os.statvfs(self.folder)
            free = disk.f_bavail * disk.f_frsize - len(data)
            if free < _FREE_SHARE * disk.f_blocks * disk.f_frsize:
                reason = f"less than {_FREE_SHARE:.0%} of the disk of {self.folder} is free"
                self._end_growth(reason)
                return
            if self._writer is None or not self._writer.is_current():
                self._writer = _Writer(self.folder)
            self._writer.append(key, data, height, width)
        except OSError as error:  # also if another process clears the cache
            self._end_growth(f"{self.folder} cannot be written: {error.strerror}")
        else:
            self._parts[self._number_of(self._writer.name)].bytes = self._writer.bytes

    def take_reports(self) -> list[str]:
        """Return the reports of this process and its loader workers since the last call."""
        data = b""
        while True:
            try:
                data += os.read(self._report_reader, 1 << 16)
            except BlockingIOError:
                return list(dict.fromkeys(data.decode(errors="replace").splitlines()))

    def _find(self, key: Key) -> Entry | None:
        """Return the entry of a key among those read so far, or None."""
        place = int(numpy.searchsorted(self._keys, numpy.uint64(key[0])))
        while place < len(self._keys) and int(self._keys[place]) == key[0]:
            entry = Entry(*self._table[place].item())
            if entry.low == key[1]:
                return entry
            place += 1
        return None

    def _view(self, entry: Entry) -> memoryview | None:
        """Return the mapped bytes of an entry, or None if the data file is too short."""
        part = self._parts[entry.part]
        end = entry.offset + entry.length
        if part.mapped is None or len(part.mapped) < end:
            with open(self.folder / f"{part.name}{_DATA}", "rb", opener=regular_file) as file:
                if os.fstat(file.fileno()).st_size < end:
                    return None
                # A private mapping is writable, as torch requires, and never changes the file.
                part.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # A page beyond the end of a file that was truncated later would end this process with
        # SIGBUS.
        if part.mapped.size() >= end:
            return memoryview(part.mapped)[entry.offset : end]
        return None

    def _is_intact(self, entry: Entry, data: memoryview) -> bool:
        """Verify the checksum, unless a process of this rank has done so."""
        slot = entry.high % len(self._verified)
        mark = (entry.low ^ hash((self._parts[entry.part].name, entry.offset))) & (2**64 - 1) | 1
        if self._verified[slot] != mark:
            if _checksum(entry, data) != entry.crc:
                return False
            self._verified[slot] = mark
        return True

    def _forget(self, number: int) -> str:
        """Remove a part and its entries, and return its name."""
        part = self._parts[number]
        part.is_removed = True
        part.bytes = 0
        self._set_table(self._table[self._table["part"] != number])
        for suffix in (_INDEX, _DATA):
            with suppress(OSError):  # without access, each process finds the damage
                (self.folder / f"{part.name}{suffix}").unlink()
        return part.name

    def _new_rows(self, path: Path) -> NDArray[Any]:
        """Return the records of an index that were not read yet."""
        number = self._number_of(path.stem)
        part = self._parts[number]
        rows = numpy.empty(0, _TYPE)
        if part.is_removed:
            return rows
        with suppress(FileNotFoundError):  # another process clears the cache
            with open(path, "rb", opener=regular_file) as file:
                file.seek(part.records * _TYPE.itemsize)
                data = file.read()
            part.bytes = path.with_suffix(_DATA).stat().st_size
            rows = numpy.frombuffer(data, _TYPE, len(data) // _TYPE.itemsize).copy()
            rows["part"] = number
            part.records += len(rows)
        return rows

    def _set_table(self, rows: NDArray[Any]) -> None:
        self._table = rows[numpy.argsort(rows["high"], kind="stable")]
        self._keys = numpy.ascontiguousarray(self._table["high"])

    def _number_of(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._parts)
            self._parts.append(_Part(name))
        return self._numbers[name]

    def _end_growth(self, reason: str) -> None:
        if not self._growth_ends:
            self._growth_ends = True
            self._report(f"the cache does not grow any more: {reason}")

    def _report(self, text: str) -> None:
        line = text.replace("\n", " ").encode(errors="replace")[: _MAX_REPORT_BYTES - 1] + b"\n"
        # The pipe is full after hundreds of reports since the last evaluation.
        with suppress(BlockingIOError):
            os.write(self._report_writer, line)


class _Writer:
    """The part of one process; a fork needs its own."""

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        self.name = f"{self._process}-{secrets.token_hex(8)}"
        self._path = folder / self.name
        self._records = 0
        self.bytes = 0
        with disk_operations.run("open", self._path):
            self._data = self._create(_DATA)
            self._index = self._create(_INDEX)

    def is_current(self) -> bool:
        """Return whether the files belong to this process and still have their names."""
        return self._process == os.getpid() and self._path.with_suffix(_INDEX).exists()

    def append(self, key: Key, data: memoryview, height: int, width: int) -> None:
        """Write an entry; after an error, the part ends with the previous one."""
        offset = -(-self.bytes // _ALIGNMENT) * _ALIGNMENT
        entry = Entry(*key, offset, len(data), height, width, 0, 0)
        entry = entry._replace(crc=_checksum(entry, data))
        try:
            self._write(self._data, data, offset)
            self._write(self._index, memoryview(_RECORD.pack(*entry)), self._records * _RECORD.size)
        except OSError:
            # The rest of a record would be read as one when another follows.
            os.ftruncate(self._index, self._records * _RECORD.size)
            os.ftruncate(self._data, self.bytes)
            raise
        self._records += 1
        self.bytes = offset + len(data)

    def _create(self, suffix: str) -> int:
        descriptor = os.open(
            self._path.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _write(self, descriptor: int, rest: memoryview, offset: int) -> None:
        with disk_operations.run("write", self._path):
            while rest:
                count = os.pwrite(descriptor, rest, offset)
                rest = rest[count:]
                offset += count


def _checksum(entry: Entry, data: memoryview) -> int:
    """Return the CRC-32 of the fields of an entry, without the checksum itself, and its bytes."""
    return zlib.crc32(data, zlib.crc32(_RECORD.pack(*entry[:6], 0, 0)))


def file_key(path: str | Path, status: os.stat_result, variant: int = 1) -> Key:
    """Return a hash of path, size, modification time, and the number of one of several entries."""
    facts = f"{variant}\0{status.st_size}\0{status.st_mtime_ns}\0".encode()
    digest = blake2b(facts + os.fsencode(os.path.abspath(path)), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def cache_name(root: Path, description: Mapping[str, object]) -> str:
    """Return the name of the folder for files below `root`, with a hash of the contents."""
    text = json.dumps([_FORMAT, str(root), dict(description)], sort_keys=True)
    return f"{root.name or 'root'}-{blake2b(text.encode(), digest_size=5).hexdigest()}"


@dataclass(frozen=True)
class CacheInfo:
    """One cache on the disk."""

    name: str  # of the folder in `cache_folder()`
    kind: str  # `decoded`, or `unknown` for a damaged cache
    source: str  # folder of the files
    entries: int
    bytes: int


def list_caches() -> list[CacheInfo]:
    """Return the caches, sorted by name."""
    return [_info(path.parent) for path in sorted(cache_folder().glob(f"*/{DESCRIPTION}"))]


def _info(folder: Path) -> CacheInfo:
    try:
        facts = json.loads(read_small(folder / DESCRIPTION, 1 << 16))
        kind = str(facts["kind"])
        source = str(facts["source"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged: listed, so that it can be removed
        kind = "unknown"
        source = "unknown"
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    entries = sum(size // _RECORD.size for path, size in sizes.items() if path.suffix == _INDEX)
    return CacheInfo(folder.name, kind, source, entries, sum(sizes.values()))


def remove_cache(name: str) -> None:
    """Remove a cache; runs that use it continue without.

    Raises:
        RunError: the files cannot be removed.
    """
    folder = cache_folder() / name
    # A run that builds the cache finds no folder for new files, so that the removal meets no new
    # names.
    removed = folder.with_name(f"removed-{secrets.token_hex(4)}")
    try:
        folder.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        problem = f"{folder} cannot be removed: {error.strerror}"
        raise RunError(
            problem, "a writable folder", "make the folder writable, and repeat", code="E_OUTPUT"
        ) from error
