"""Files of a folder and its subfolders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def files_below(root: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by path.

    Hidden files and folders, whose names begin with a dot, are left out. Links to folders are
    followed, unless their files are already part of the result, as those of a link to a folder
    above.
    """
    files: list[Path] = []
    starts = [str(root)]
    seen = set[str]()
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, names, file_names in os.walk(start, onerror=_require_readable):
                real = os.path.realpath(folder)
                names[:] = (
                    [] if real in seen else [name for name in names if not name.startswith(".")]
                )
                if real not in seen:
                    files += [Path(folder, name) for name in file_names if not name.startswith(".")]
                seen.add(real)
                links += [
                    path for name in names if os.path.islink(path := os.path.join(folder, name))
                ]
        starts = sorted(links)
    return sorted(files)


def _require_readable(error: OSError) -> None:
    """Raise errors of the disk and the network; a folder that is closed to this account, or removed, has no files."""
    if not isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
        raise error


def by_suffix(files: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files with one of the suffixes, in upper or lower case."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    return [file for file in files if file.name.lower().endswith(endings)]
