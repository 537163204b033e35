"""Index of existing files: their sizes in samples and their checksums, and the members of tar files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.checkpoint.files import write_atomically
from samestep.checkpoint.lock import FolderLock
from samestep.data.streams.data_file import checksum_of
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.arrow import count_rows
from samestep.data.streams.formats.index import INDEX, PATTERNS, index_text, list_files
from samestep.data.streams.formats.parquet import count_rows as count_parquet_rows
from samestep.data.streams.formats.webdataset import SUFFIX, index_of_tar, read_members
from samestep.errors import DataError


@dataclass(frozen=True)
class Indexed:
    """Result of `write_index`.

    Attributes:
        samples: number of samples; 0 for tokens, whose samples depend on their length.
        files: number of files.
        bytes: size of all files.
    """

    samples: int
    files: int
    bytes: int


def write_index(folder: Path, kind: str, report: Callable[[str], None]) -> Indexed:
    """Write `samestep-index.json`, and for tar files `NAME.tar.idx`, next to the files of a folder.

    Raises:
        InputError: the folder has no such files, one is damaged, or the format has an index of its own.
        RunError: the disk failed.
    """
    if kind not in PATTERNS:
        raise DataError(
            f"--index of {kind} files", f"one of {', '.join(PATTERNS)}", "their own library has written their index"
        )
    files, sizes = list_files(StreamFolder(str(folder)), kind), []  # before the lock, which creates a missing folder
    with FolderLock(folder):
        (folder / INDEX).unlink(missing_ok=True)
        for number, file in enumerate(files):
            path = folder / file.name
            files[number] = replace(file, checksum=checksum_of(path, "sha256"))
            sizes.append(_count(path, kind))
            report(f"{file.name}: {sizes[-1]:,} samples")
        write_atomically(folder / INDEX, index_text(kind, files, sizes))
    return Indexed(sum(sizes), len(files), sum(file.bytes for file in files))


def _count(path: Path, kind: str) -> int:
    if kind == "webdataset":
        samples = read_members(path)
        write_atomically(path.with_name(f"{path.name}{SUFFIX}"), index_of_tar(samples))
        return len(samples)
    if kind == "arrow":
        return count_rows(path)
    if kind == "tokens":
        return 0
    with path.open("rb") as file:
        return count_parquet_rows(file, str(path))
