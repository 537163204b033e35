"""Source of samples in files: number of samples per file, and random access within a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol


class FileSource(Protocol):
    """Samples in files, in a fixed order of files.

    A source is pickled or forked into loader workers. It opens files when they are read, separately in each process: a
    file position is shared with a process that was forked later, so a handle is opened again after a fork, or is used
    by `os.pread` or a memory map only. The number of open files and the memory are bounded: a source closes the files
    that were not read for the longest time.

    Attributes:
        names: name of each file, the same on all machines: a path relative to the folder or address of the source.
        sizes: number of samples in each file; 0 is possible.
        fingerprint: hash of names, sizes and, if the index of the source has them, checksums of the files. Two sources
            with equal fingerprints have equal samples. See `fingerprint_of`.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, file: int, index: int) -> Any:
        """Return one sample.

        Args:
            file: index into `names`.
            index: position in the file, from 0 to `sizes[file] - 1`.

        Raises:
            DataError: the error names the file. `E_FILE_MISSING`: it does not exist. `E_UNREADABLE`: it is truncated or
                damaged. `E_FILE_CHANGED`: its size or checksum differs from the index. `E_IO`: disk or network failed.
        """

    def prepare(self, files: Sequence[int]) -> None:
        """Fetch files in the background, such as to the local disk; return at once.

        Args:
            files: the files of the next reads in this process, in the order of their use. A later call replaces the
                files; a file can be in both. A source of local files does nothing.

        An error of a file is raised by `read`.
        """


def fingerprint_of(names: Sequence[str], sizes: Sequence[int], checksums: Sequence[str] = ()) -> str:
    """Return a hash of the names and sizes of files, and of their checksums, if known, as 32 hexadecimal digits."""
    content = json.dumps([list(names), [int(size) for size in sizes], list(checksums)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
