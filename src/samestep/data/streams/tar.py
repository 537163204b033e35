"""WebDataset tar files (https://github.com/webdataset/webdataset), read by the positions of their members."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

from samestep.data.streams.source import Reader, SampleFiles

_CHUNK_BYTES = 1 << 20


class TarFiles(SampleFiles):
    """Samples of tar files: dictionaries with the bytes of each extension, and the common name as `__key__`.

    The headers of a file are read when it is opened.

    Args:
        address: folder with files `*.tar`; see `SampleFiles`.

    Raises:
        DataError: there are no such files, or one is damaged.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address, ".tar")

    def reader(self, file: IO[bytes], name: str) -> Reader:
        """Return the reader of a file with the positions of its members."""
        return _TarReader(file, _samples(_members_of_tar(file)))


class _Member(NamedTuple):
    """One file in a tar file."""

    name: str
    offset: int
    size: int


class _TarReader(Reader):
    """Samples of one tar file."""

    def __init__(self, file: IO[bytes], samples: list[tuple[str, dict[str, _Member]]]) -> None:
        super().__init__(file)
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        key, members = self._samples[index]
        sample: dict[str, Any] = {"__key__": key}
        for extension, member in members.items():
            sample[extension] = self.bytes_at(member.offset, member.size)
        return sample


def _samples(members: Iterable[_Member]) -> list[tuple[str, dict[str, _Member]]]:
    """Return key and members of each sample: consecutive files with one name up to the first dot of its last part.

    Raises:
        ValueError: a sample has two files of one extension.
    """
    samples: list[tuple[str, dict[str, _Member]]] = []
    for member in members:
        folder, slash, last = member.name.rpartition("/")
        stem, _, extension = last.partition(".")
        if not stem or not extension or member.name.startswith("__"):
            continue
        key = f"{folder}{slash}{stem}"
        extension = extension.lower()
        if not samples or samples[-1][0] != key:
            samples.append((key, {}))
        if extension in samples[-1][1]:
            raise ValueError(f"{member.name} is the second file .{extension} of its sample")
        samples[-1][1][extension] = member
    return samples


def _members_of_tar(file: IO[bytes]) -> list[_Member]:
    """Return the members of a tar file.

    Raises:
        ValueError: the file ends early, or is more than one archive.
    """
    members: list[_Member] = []
    with tarfile.open(fileobj=file, mode="r:") as tar:
        last = "its start"
        for entry in tar:
            last = entry.name
            if entry.isreg():
                members.append(_Member(entry.name, entry.offset_data, entry.size))
        _require_end(file, tar.offset, last)
    return members


def _require_end(file: IO[bytes], offset: int, last: str) -> None:
    """Require that only zeros follow the last member: `tarfile` ends at any invalid header without an error."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(
            f"byte {offset:,}, after {last}, begins neither a file nor the end of the archive"
        )
    while chunk := file.read(_CHUNK_BYTES):
        if chunk.strip(b"\0"):
            raise ValueError(
                f"data follow the end of the archive at byte {offset:,}, such as a second archive"
            )
