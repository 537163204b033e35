"""Files of a folder and its subfolders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from samestep.units import plural


def files_below(root: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by path.

    Hidden files and folders, whose names begin with a dot, are left out. Links to folders are followed, unless their
    files are already part of the result, as those of a link to a folder above.
    """
    files: list[Path] = []
    starts, seen = [str(root)], set[str]()
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, names, file_names in os.walk(start, onerror=_require_readable):
                real = os.path.realpath(folder)
                names[:] = [] if real in seen else [name for name in names if not name.startswith(".")]
                if real not in seen:
                    files += [Path(folder, name) for name in file_names if not name.startswith(".")]
                seen.add(real)
                links += [path for name in names if os.path.islink(path := os.path.join(folder, name))]
        starts = sorted(links)
    return sorted(files)


def _require_readable(error: OSError) -> None:
    """Raise errors of the disk and the network; a folder that is closed to this account, or removed, has no files."""
    if not isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
        raise error


def by_suffix(files: Sequence[Path], suffixes: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the files whose names end in one of the suffixes, in upper or lower case, and the other files."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    parts: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        parts[not file.name.lower().endswith(endings)].append(file)
    return parts


def left_out_notes(root: Path, files: Sequence[Path], suffixes: Sequence[str]) -> tuple[str, ...]:
    """Return a note about the files of a folder that are left out because of their suffixes, if there are any."""
    if not files:
        return ()
    count, endings = plural(len(files), "file"), ", ".join(suffixes)
    return (f"left out {count} of {root}, such as {files[0]}: their names do not end in {endings}",)
