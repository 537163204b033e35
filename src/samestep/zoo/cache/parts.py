"""Files of a cache: parts, each with entries of one process, and their indices.

A part is a pair of files that one process writes: `NAME.data` with the bytes of entries, and `NAME.index` with one
record of fixed size per entry. A record is written after its entry, so a killed process leaves no record without data.
Processes share no lock: readers find the parts of others in the folder, and an entry can be in several parts.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from samestep.distributed.disk_operations import disk_operations

DATA, INDEX = ".data", ".index"
# Key (two halves), offset, length, height, width, CRC-32 of the entry, check word of the record.
_RECORD = struct.Struct("<QQQQIIII")
_TYPE = numpy.dtype(
    [(name, "<u8") for name in ("high", "low", "offset", "length")]
    + [(name, "<u4") for name in ("height", "width", "crc", "check")]
)
_WORDS = struct.Struct(f"<{_RECORD.size // 4}I")
# The exclusive or of all words of a record, so that zeros of a lost write are no record.
_MAGIC = 0x53534331
_ALIGNMENT = 64
_MIN_MERGED = 4096  # new records that are kept in a dictionary before they join the table

Key = tuple[int, int]


class Entry(NamedTuple):
    """Place of the bytes of one sample."""

    part: str
    record: int  # number of the record in the index
    offset: int
    length: int
    height: int  # of an image in pixels; 0 for other bytes
    width: int
    crc: int


@dataclass
class _Part:
    """A part as far as this process has read its index."""

    name: str
    records: int = 0
    end: int = 0  # bytes of the data file that records cover
    mapped: mmap.mmap | None = None


class Parts:
    """Entries of all parts of a folder, of which this process writes at most one.

    Attributes:
        damaged_records: records with an invalid check word that this process has read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, _Part] = {}
        self._numbers: list[str] = []  # names of parts, by the number in the table
        self._keys: NDArray[numpy.uint64] = numpy.empty(0, numpy.uint64)  # sorted first halves of keys
        self._table: NDArray[Any] = numpy.empty(0, _TYPE)
        self._places: NDArray[Any] = numpy.empty((0, 2), numpy.int64)  # number of part and of record
        self._fresh: dict[Key, Entry] = {}
        self._writer: _Writer | None = None
        self.damaged_records = 0
        self.refresh()

    def __len__(self) -> int:
        """Number of entries that this process has read; an entry in two parts can count twice."""
        return len(self._table) + len(self._fresh)

    @property
    def bytes(self) -> int:
        """Bytes of the entries of all parts."""
        return sum(part.end for part in self._parts.values())

    def refresh(self) -> None:
        """Read the records that were added since the last call.

        Raises:
            OSError: the folder cannot be read.
        """
        with os.scandir(self._folder) as files:
            names = [entry.name for entry in files if entry.name.endswith(INDEX)]
        for name in names:
            self._read_index(name.removesuffix(INDEX))
        if len(self._fresh) > max(_MIN_MERGED, len(self._table) // 4):
            self._merge()

    def find(self, key: Key) -> Entry | None:
        """Return the entry of a key among those read so far, or None."""
        entry = self._fresh.get(key)
        if entry is not None:
            return entry
        high, low = key
        place = int(numpy.searchsorted(self._keys, numpy.uint64(high)))
        while place < len(self._keys) and int(self._keys[place]) == high:
            row = self._table[place]
            if int(row["low"]) == low and int(row["length"]):
                return self._entry(place)
            place += 1
        return None

    def view(self, entry: Entry) -> memoryview | None:
        """Return the mapped bytes of an entry, or None if the data file is too short.

        Raises:
            OSError: the data file is missing, or cannot be mapped.
        """
        part, end = self._parts[entry.part], entry.offset + entry.length
        if part.mapped is None or len(part.mapped) < end:
            try:
                # A private mapping is writable, as torch requires, and never changes the file.
                with (self._folder / f"{entry.part}{DATA}").open("rb") as file:
                    part.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError:  # an empty file
                return None
        # A page beyond the end of a file that was truncated later would end this process with SIGBUS.
        if part.mapped.size() < end or len(part.mapped) < end:
            return None
        return memoryview(part.mapped)[entry.offset : end]

    def add(self, key: Key, data: memoryview, height: int = 0, width: int = 0) -> None:
        """Write an entry to the part of this process.

        Raises:
            OSError: the disk is full, or failed; the part ends with the previous entry.
        """
        if self._writer is None or not self._writer.is_current():
            self._writer = _Writer(self._folder)
        entry = self._writer.append(key, data, height, width)
        part = self._parts.setdefault(entry.part, _Part(entry.part))
        part.records, part.end = entry.record + 1, entry.offset + entry.length
        self._fresh[key] = entry

    def discard(self, key: Key, entry: Entry) -> None:
        """Forget a damaged entry, and overwrite its record so that no process uses it again."""
        if self._fresh.get(key) == entry:
            del self._fresh[key]
        if len(self._table):
            number = self._numbers.index(entry.part) if entry.part in self._numbers else -1
            matches = (self._places[:, 0] == number) & (self._places[:, 1] == entry.record)
            self._table["length"][matches] = 0
        path = self._folder / f"{entry.part}{INDEX}"
        try:
            descriptor = os.open(path, os.O_WRONLY)
        except OSError:  # removed, or not writable: each process finds the damage
            return
        with open(descriptor, "wb", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(_RECORD.size), entry.record * _RECORD.size)

    def _entry(self, place: int) -> Entry:
        row, (number, record) = self._table[place], self._places[place]
        values = (int(row[name]) for name in ("offset", "length", "height", "width", "crc"))
        return Entry(self._numbers[int(number)], int(record), *values)

    def _read_index(self, name: str) -> None:
        part = self._parts.get(name)
        begin = part.records * _RECORD.size if part is not None else 0
        try:
            with (self._folder / f"{name}{INDEX}").open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size - begin < _RECORD.size:
                    return
                file.seek(begin)
                data = file.read((size - begin) // _RECORD.size * _RECORD.size)
        except FileNotFoundError:  # another process clears the cache
            return
        part = self._parts.setdefault(name, _Part(name))
        rows = numpy.frombuffer(data, _TYPE)
        words = numpy.frombuffer(data, "<u4").reshape(len(rows), -1)
        is_valid = numpy.bitwise_xor.reduce(words, axis=1) == _MAGIC
        self.damaged_records += int((~is_valid & words.any(axis=1)).sum())  # zeros: discarded, or never written
        numbers = numpy.arange(part.records, part.records + len(rows))[is_valid]
        part.records += len(rows)
        rows = rows[is_valid]
        if len(rows):
            part.end = max(part.end, int((rows["offset"] + rows["length"]).max()))
        if len(rows) > _MIN_MERGED:
            self._insert(name, rows, numbers)
        else:
            for number, row in zip(numbers, rows.tolist(), strict=True):
                self._fresh[row[0], row[1]] = Entry(name, int(number), *row[2:7])

    def _merge(self) -> None:
        """Move new records to the table, which needs less memory than a dictionary."""
        by_part: dict[str, list[tuple[Key, Entry]]] = {}
        for key, entry in self._fresh.items():
            by_part.setdefault(entry.part, []).append((key, entry))
        self._fresh = {}
        for name, pairs in by_part.items():
            rows = numpy.array([(*key, *entry[2:], 0) for key, entry in pairs], _TYPE)
            self._insert(name, rows, numpy.array([entry.record for _, entry in pairs]))

    def _insert(self, name: str, rows: NDArray[Any], records: NDArray[Any]) -> None:
        if name not in self._numbers:
            self._numbers.append(name)
        places = numpy.stack([numpy.full_like(records, self._numbers.index(name)), records], axis=1)
        table, places = numpy.concatenate([self._table, rows]), numpy.concatenate([self._places, places])
        order = numpy.argsort(table["high"], kind="stable")
        self._table, self._places = table[order], places[order]
        self._keys = numpy.ascontiguousarray(self._table["high"])


class _Writer:
    """The part of one process; a fork needs its own."""

    def __init__(self, folder: Path) -> None:
        self.name, self._process = f"{os.getpid()}-{secrets.token_hex(8)}", os.getpid()
        self._records = self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._data_path, self._index_path = (folder / f"{self.name}{suffix}" for suffix in (DATA, INDEX))
        with disk_operations.run("open", self._data_path):
            self._data = os.open(self._data_path, flags, 0o600)
            self._index = os.open(self._index_path, flags, 0o600)
        for descriptor in (self._data, self._index):
            weakref.finalize(self, os.close, descriptor)

    def is_current(self) -> bool:
        """Return whether the files belong to this process and still have their names."""
        return self._process == os.getpid() and self._index_path.exists()

    def append(self, key: Key, data: memoryview, height: int, width: int) -> Entry:
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        entry = Entry(self.name, self._records, offset, len(data), height, width, zlib.crc32(data))
        record = _RECORD.pack(*key, *entry[2:], 0)
        check = _MAGIC
        for word in _WORDS.unpack(record):
            check ^= word
        try:
            self._write(self._data, data, offset)
            self._write(self._index, memoryview(_RECORD.pack(*key, *entry[2:], check)), self._records * _RECORD.size)
        except OSError:
            # The rest of a record would be read as one when another follows.
            os.ftruncate(self._index, self._records * _RECORD.size)
            os.ftruncate(self._data, self._end)
            raise
        self._records, self._end = self._records + 1, offset + len(data)
        return entry

    def _write(self, descriptor: int, rest: memoryview, offset: int) -> None:
        with disk_operations.run("write", self._data_path):
            while rest:
                count = os.pwrite(descriptor, rest, offset)
                rest, offset = rest[count:], offset + count
