"""WebDataset tar files (https://github.com/webdataset/webdataset), read by the positions of their members."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.data.streams.data_file import DataFile
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.index import find_files
from samestep.data.streams.formats.tar_index import SUFFIX, Member, index_of_tar, parse_index, read_members, split_name
from samestep.data.streams.opened import IndexedSource, RawFile, damaged_file
from samestep.distributed.env import cache_folder


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
        sample: dict[str, Any] = {"__key__": split_name(members[0].name)[0]}
        return sample | {member.extension: reader.read(member.offset, member.size) for member in members}

    def _index(self, file: DataFile) -> list[list[Member]]:
        if file.name in self._in_memory:
            return self._in_memory[file.name]
        data = self.folder.read(f"{file.name}{SUFFIX}")
        if data is not None:
            return _parsed(data, f"{self.folder.address}/{file.name}{SUFFIX}")
        facts = "\0".join((self.folder.address, file.name, str(file.bytes), file.checksum, file.version))
        path = cache_folder() / "indexes" / f"{hashlib.sha256(os.fsencode(facts)).hexdigest()[:32]}{SUFFIX}"
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
