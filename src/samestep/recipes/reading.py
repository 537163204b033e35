"""What is wrong when a file cannot be read: the file, or the machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import DataError, RunError, SamestepError

# What these say is about the file; other errors of the system are about the machine.
_OF_THE_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Name the file that cannot be read as `what`, such as `a mask`.

    Raises:
        DataError: it is not there, is something else, or is damaged.
        RunError: the disk or the network failed, which says nothing about the file.
    """
    try:
        yield
    except (MemoryError, SamestepError):
        raise
    except Exception as error:  # readers of damaged files raise of many kinds, each of them means this
        number = getattr(error, "errno", None)
        if number not in _OF_THE_FILE:
            raise RunError(
                f"{path} cannot be read now: {error}",
                rule="what the disk or the network does wrong makes no file a bad one",
                do="resume when it is back",
            ) from error
        raise DataError(
            f"{path} cannot be read as {what}: {error}",
            rule="every file of the data is whole and of a known kind",
            do="remove or replace it, then resume; or leave such samples out: data.bad_samples: skip",
        ) from error
