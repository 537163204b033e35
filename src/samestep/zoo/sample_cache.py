"""Cache of samples of files on the local disk, which processes, ranks and runs share.

A cache is a folder with one file per sample, named by its key. A file appears complete, by a
rename, so processes share no lock, and a killed process leaves nothing that another one reads.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.checkpoint.durable_files import replacing
from samestep.distributed.disk_operations import disk_operations, read_small
from samestep.distributed.env import cache_folder
from samestep.errors import RunError

DESCRIPTION = "cache.json"
_FORMAT = 3
_SUFFIX = ".data"
_SIZES = struct.Struct("<II")  # height and width of an image in pixels; 0 for other bytes
_HEADER = struct.Struct("<III")  # the same, and the CRC-32 of both and of the bytes that follow
# Share of the disk that stays free: checkpoints of this run and other programs need space.
_FREE_SHARE = 0.05
# With a limit, a process counts the bytes of all processes in this share of its time.
_COUNT_SHARE = 0.05
_MIN_SLOTS = 1 << 10
_MAX_REPORT_BYTES = 1024  # below the limit of an atomic write to a pipe (POSIX: 512; Linux: 4096)


class CachedSample(NamedTuple):
    """Bytes of a cached sample, mapped from the disk."""

    data: torch.Tensor
    height: int
    width: int


class SampleCache:
    """Samples of files in a folder.

    The key of a sample is a hash of path, size and modification time of its file. A damaged sample
    is reported and removed, so it is built again. Errors of the disk end the growth of the cache,
    never the run.

    Attributes:
        folder: folder of the cache.

    Args:
        folder: created if missing.
        description: facts about the contents for users, with `source`, the folder of the files.
        limit: bytes up to which the cache grows, or None. Each process can exceed the limit by the
            samples that others have written since it counted the bytes.
        samples: number of samples, for the size of a table.
    """

    def __init__(
        self, folder: Path, description: Mapping[str, object], *, limit: int | None, samples: int
    ) -> None:
        self.folder = folder
        self._limit = limit
        self._growth_ends = False
        self._bytes = 0
        self._next_count = 0.0
        slots = max(_MIN_SLOTS, 1 << (2 * samples).bit_length())
        # Shared with the loader workers, which are forks: each sample is verified once per rank.
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

    def get(self, key: str, name: str) -> CachedSample | None:
        """Return the sample of a key, or None; `name` is its file, for reports."""
        path = self._path(key)
        try:
            status = path.stat()
            # A pipe of this name would never end, and a header alone is no sample.
            if stat.S_ISREG(status.st_mode) and status.st_size > _HEADER.size:
                # A private mapping is writable, as torch requires, and never changes the file.
                content = torch.from_file(
                    str(path), shared=False, size=status.st_size, dtype=torch.uint8
                )
                height, width, checksum = _HEADER.unpack(content[: _HEADER.size].numpy().data)
                sample = CachedSample(content[_HEADER.size :], height, width)
                if self._is_intact(key, status, sample, checksum):
                    return sample
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, RuntimeError) as error:  # the second one is that of `from_file`
            self._end_growth(f"{self.folder} cannot be read: {error}")
            return None
        with suppress(OSError):  # without access, each process finds the damage
            path.unlink()
        self._report(f"the cached data of {name} are damaged; removed, and built again")
        return None

    def add(self, key: str, data: memoryview, height: int = 0, width: int = 0) -> None:
        """Write a sample, unless the growth of the cache has ended."""
        if self._growth_ends:
            return
        path = self._path(key)
        size = _HEADER.size + len(data)
        try:
            if self._limit is not None:
                self._count_bytes()
                if self._bytes + size > self._limit:
                    limit = f"data.cache_gb, {self._limit / 1e9:g} GB"
                    self._end_growth(f"{self.folder} has reached {limit}")
                    return
            disk = os.statvfs(self.folder)
            free = disk.f_bavail * disk.f_frsize - size
            if free < _FREE_SHARE * disk.f_blocks * disk.f_frsize:
                reason = f"less than {_FREE_SHARE:.0%} of the disk of {self.folder} is free"
                self._end_growth(reason)
                return
            header = _HEADER.pack(height, width, _checksum(height, width, data))
            with (
                disk_operations.run("write", path),
                replacing(path) as temporary,
                temporary.open("wb") as file,
            ):
                file.writelines((header, data))
        except OSError as error:  # also if another process clears the cache
            self._end_growth(f"{self.folder} cannot be written: {error.strerror}")
        else:
            self._bytes += size

    def usage(self) -> tuple[int, int]:
        """Return the numbers of samples and of bytes in the folder."""
        return _usage(self.folder)

    def take_reports(self) -> list[str]:
        """Return the reports of this process and its loader workers since the last call."""
        data = b""
        while True:
            try:
                data += os.read(self._report_reader, 1 << 16)
            except BlockingIOError:
                return list(dict.fromkeys(data.decode(errors="replace").splitlines()))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _is_intact(
        self, key: str, status: os.stat_result, sample: CachedSample, checksum: int
    ) -> bool:
        """Verify the checksum, unless a process of this rank has done so."""
        mark = hash((int(key, 16), status.st_ino, status.st_mtime_ns)) & (2**64 - 1) | 1
        slot = mark // 2 % len(self._verified)
        if self._verified[slot] != mark:
            if _checksum(sample.height, sample.width, sample.data.numpy().data) != checksum:
                return False
            self._verified[slot] = mark
        return True

    def _count_bytes(self) -> None:
        began = time.monotonic()
        if began >= self._next_count:
            self._bytes = self.usage()[1]
            now = time.monotonic()
            self._next_count = now + (now - began) / _COUNT_SHARE

    def _end_growth(self, reason: str) -> None:
        if not self._growth_ends:
            self._growth_ends = True
            self._report(f"the cache does not grow any more: {reason}")

    def _report(self, text: str) -> None:
        line = text.replace("\n", " ").encode(errors="replace")[: _MAX_REPORT_BYTES - 1] + b"\n"
        # The pipe is full after hundreds of reports since the last evaluation.
        with suppress(BlockingIOError):
            os.write(self._report_writer, line)


def _checksum(height: int, width: int, data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(_SIZES.pack(height, width)))


def _usage(folder: Path) -> tuple[int, int]:
    """Return the numbers of samples and of bytes in a folder."""
    samples = size = 0
    with suppress(FileNotFoundError), os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):  # removed by another process
                size += file.stat().st_size
                samples += file.name.endswith(_SUFFIX) and not file.name.startswith(".")
    return samples, size


def file_key(path: str | Path, status: os.stat_result, variant: int = 1) -> str:
    """Return a hash of path, size, modification time, and the number of one of several entries."""
    facts = f"{variant}\0{status.st_size}\0{status.st_mtime_ns}\0".encode()
    return blake2b(facts + os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()


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
    return CacheInfo(folder.name, kind, source, *_usage(folder))


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
