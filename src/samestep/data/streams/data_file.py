"""One file of samples: its facts in an index, their verification, and errors of missing or damaged files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.distributed.env import cache_folder
from samestep.errors import DataError, RunError

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class DataFile:
    """One file of a source.

    Attributes:
        name: path relative to the folder, with slashes.
        bytes: size, or -1 if the index of the format has none.
        checksum: `ALGORITHM:HEX` of the index, with an algorithm of `hashlib` or xxhash; empty if unknown.
        version: modification time or entity tag that the listing has returned; empty if unknown.
    """

    name: str
    bytes: int
    checksum: str = ""
    version: str = ""


def missing_file(name: str) -> DataError:
    """Return the error of a file that does not exist."""
    return DataError(
        f"there is no file {name}",
        expected="all files of the index of the data",
        fix="copy the file again",
        code="E_FILE_MISSING",
    )


def changed_file(name: str, difference: str) -> DataError:
    """Return the error of a file that differs from its index; `difference` is what the file has."""
    return DataError(
        f"{name} has {difference}",
        expected="the file that the index describes",
        fix="copy the file again, or write the index again if the change is intended",
        code="E_FILE_CHANGED",
    )


def damaged_file(name: str, problem: str) -> DataError:
    """Return the error of a file whose contents are invalid."""
    return DataError(
        f"{name} is damaged: {problem}",
        expected="an intact file of the format",
        fix="copy the file again, or write it again",
        code="E_UNREADABLE",
    )


def failed_read(name: str, error: Exception) -> RunError:
    """Return the error of a file that the disk or the network failed to read."""
    return RunError(
        f"{name} cannot be read now: {getattr(error, 'strerror', None) or error}",
        expected="a working disk and network, and access to the file",
        fix="resume the run when the disk or the network works again",
        code="E_IO",
    )


def is_failed_read(error: Exception) -> bool:
    """Return whether the disk or the network failed; errors of decoders, about the contents, have no number."""
    return getattr(error, "errno", None) is not None or isinstance(error, TimeoutError | ConnectionError)


def difference(path: Path, file: DataFile) -> str:
    """Return the difference in size or checksum between a local file and its index, or an empty text.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    size = path.stat().st_size
    if file.bytes not in (-1, size):
        return f"{size:,} bytes, not the {file.bytes:,} bytes of its index"
    if file.checksum and checksum_of(path, file.checksum.partition(":")[0]) != file.checksum:
        return f"another checksum than {file.checksum}"
    return ""


def contents_key(path: Path) -> str:
    """Return a text that identifies a local file with its present contents, in caches of this machine.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    status = path.stat()
    return "\0".join(map(str, (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))


def verify(path: Path, file: DataFile) -> None:
    """Compare a local file with its index; a checksum is computed once per machine and change of the file.

    Raises:
        DataError: the file is missing (`E_FILE_MISSING`) or differs (`E_FILE_CHANGED`).
    """
    try:
        status = path.stat()
        facts = f"{contents_key(path)}\0{file.checksum}"
        mark = cache_folder() / "verified" / hashlib.blake2b(os.fsencode(facts), digest_size=16).hexdigest()
        if not file.checksum and file.version not in ("", str(status.st_mtime_ns)):
            raise changed_file(str(path), "another modification time than at the start of the run")
        text = difference(path, replace(file, checksum="") if mark.exists() else file)
    except FileNotFoundError as error:
        raise missing_file(str(path)) from error
    if text:
        raise changed_file(str(path), text)
    if file.checksum and not mark.exists():
        try:
            mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch()
        except OSError:  # without a folder for marks each process computes the checksum
            return


def checksum_of(path: Path, algorithm: str) -> str:
    """Return `ALGORITHM:HEX` of a file.

    Raises:
        DataError: the algorithm is unknown, or xxhash is not installed.
    """
    digest = _digest(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def _digest(algorithm: str) -> Any:
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, usedforsecurity=False)
    try:
        import xxhash

        return getattr(xxhash, algorithm)()
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"the index has checksums of the algorithm {algorithm}",
            expected="an algorithm of hashlib or of the package xxhash",
            fix="pip install 'samestep[streams]'",
            code="E_NOT_INSTALLED",
        ) from error


def best_checksum(hashes: Mapping[str, str]) -> str:
    """Return one checksum of several, the fastest to compute, as `ALGORITHM:HEX`; empty without any."""
    order = ("xxh3_128", "xxh3_64", "xxh128", "xxh64", "sha1", "sha256", "blake2b", "md5")
    names = [*(name for name in order if name in hashes), *sorted(hashes)]
    return f"{names[0]}:{hashes[names[0]]}" if names else ""
