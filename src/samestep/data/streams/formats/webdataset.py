"""WebDataset tar files (https://github.com/webdataset/webdataset), read by the positions of their members.

The index of the positions, `NAME.tar.idx`, has the format of NVIDIA DALI's `wds2idx`, version 1.2: a first line with
the version and the number of samples, and a line per sample with extension, offset, size and name of each member,
separated by spaces. Spaces, `%` and characters beyond ASCII in names are percent-encoded.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote

from samestep.data.streams.data_file import DataFile, damaged_file
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import find_files
from samestep.data.streams.source import IndexedSource, RawFile
from samestep.distributed.env import cache_folder

SUFFIX = ".idx"
_VERSION = "v1.2"
_CHUNK_BYTES = 1 << 20
_KEPT = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


class _Reader(RawFile):
    def __init__(self, path: Path, samples: list[list[Member]]) -> None:
        super().__init__(path)
        self.samples = samples


class WebDatasetSource(IndexedSource[_Reader]):
    """Samples of tar files: dictionaries with the bytes of each extension, and the common name as `__key__`.

    Args:
        folder: folder with files `*.tar`. A file without an index next to it is read once, and its index is kept in
            the folder of the caches of this account, or in memory if that cannot be written; `samestep pack --index`
            avoids this.

    Raises:
        DataError: there are no such files, or one is damaged.
    """

    def __init__(self, folder: StreamFolder) -> None:
        self._in_memory: dict[str, list[list[Member]]] = {}
        files, sizes = find_files(folder, "webdataset")
        super().__init__(folder, files, sizes or [0] * len(files))
        if sizes is None:
            super().__init__(folder, files, [len(self._index(file)) for file in files])

    def open(self, path: Path, file: int) -> _Reader:
        """Open a file with its index."""
        samples = self._index(self.files[file])
        if len(samples) != self.sizes[file]:
            raise damaged_file(str(path), f"it has {len(samples):,} samples, its index {self.sizes[file]:,}")
        return _Reader(path, samples)

    def sample(self, reader: _Reader, file: int, index: int) -> dict[str, Any]:
        """Return the members of one sample."""
        members = reader.samples[index]
        sample: dict[str, Any] = {"__key__": _split_name(members[0].name)[0]}
        return sample | {member.extension: reader.read(member.offset, member.size) for member in members}

    def _index(self, file: DataFile) -> list[list[Member]]:
        if file.name in self._in_memory:
            return self._in_memory[file.name]
        data = self.folder.read(f"{file.name}{SUFFIX}")
        if data is not None:
            return _parsed(data, f"{self.folder.address}/{file.name}{SUFFIX}")
        key = hashlib.sha256(os.fsencode(self.folder.cache_key(file))).hexdigest()[:32]
        path = cache_folder() / "indexes" / f"{key}{SUFFIX}"
        with suppress(OSError):  # not written yet, or no access
            return _parsed(path.read_bytes(), str(path))
        samples = self.folder.use(file, read_members)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{secrets.token_hex(4)}")  # other ranks may write the same
            temporary.write_text(index_of_tar(samples), encoding="utf-8")
            temporary.replace(path)
        except OSError:  # a folder of caches without access or space; the index is also that of loader workers
            self._in_memory[file.name] = samples
        return samples


def _parsed(data: bytes, place: str) -> list[list[Member]]:
    try:
        return parse_index(data.decode())
    except ValueError as error:
        raise damaged_file(place, str(error)) from error


class Member(NamedTuple):
    """One file in a tar file."""

    extension: str  # after the first dot of the name
    offset: int
    size: int
    name: str


def read_members(path: Path) -> list[list[Member]]:
    """Return the members of each sample of a tar file: consecutive files with one name up to the first dot.

    Raises:
        DataError: the file is truncated or damaged, has several archives, or a sample has two files of one extension.
    """
    samples: list[list[Member]] = []
    key, name, size = None, "", path.stat().st_size
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for entry in tar:
                name = entry.name
                present, extension = _split_name(entry.name)
                if not entry.isreg() or not extension or entry.name.startswith("__"):
                    continue
                if entry.offset_data + entry.size > size:
                    raise damaged_file(str(path), f"it ends within {entry.name}")
                if present != key:
                    samples.append([])
                    key = present
                if any(member.extension == extension for member in samples[-1]):
                    raise damaged_file(str(path), f"{entry.name} is the second file .{extension} of its sample")
                samples[-1].append(Member(extension, entry.offset_data, entry.size, entry.name))
            _require_end(path, file, tar.offset, name)
    except tarfile.TarError as error:
        raise damaged_file(str(path), str(error)) from error
    return samples


def _require_end(path: Path, file: IO[bytes], offset: int, name: str) -> None:
    """Require that only zeros follow the last member, `name`: `tarfile` ends at any invalid header without an error."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        problem = f"byte {offset:,}, after {name or 'its start'}, begins neither a file nor the end of the archive"
        raise damaged_file(str(path), problem)
    while chunk := file.read(_CHUNK_BYTES):
        if chunk.strip(b"\0"):
            problem = f"data follow the end of the archive at byte {offset:,}, such as a second archive"
            raise damaged_file(str(path), problem)


def index_of_tar(samples: list[list[Member]]) -> str:
    """Return the contents of an index file."""
    lines = (
        " ".join(f"{quote(m.extension, _KEPT)} {m.offset} {m.size} {quote(m.name, _KEPT)}" for m in members)
        for members in samples
    )
    return "\n".join((f"{_VERSION} {len(samples)}", *lines)) + "\n"


def parse_index(text: str) -> list[list[Member]]:
    """Return the members of each sample.

    Raises:
        ValueError: the text is no index.
    """
    first, *lines = text.splitlines()
    version, _, count = first.partition(" ")
    if version != _VERSION or int(count) != len(lines):
        raise ValueError(f"the first line is {first!r}, with {len(lines):,} more; expected {_VERSION} and their number")
    samples = []
    for line in lines:
        words = line.split(" ")
        rows = [words[place : place + 4] for place in range(0, len(words), 4)]
        members = [Member(unquote(e), int(o), int(s), unquote(name)) for e, o, s, name in rows]
        if len({member.extension for member in members}) < len(members):
            raise ValueError(f"the sample of {members[0].name} has two files of one extension")
        samples.append(members)
    return samples


def _split_name(name: str) -> tuple[str, str]:
    """Return a name up to the first dot of its last part, and the extension; hidden files have none."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension.lower() if stem else ""
