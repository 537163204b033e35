"""Files of a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path


def files_below(root: Path, suffixes: Sequence[str] = ("",)) -> list[Path]:
    """Return the files of a folder and its subfolders with one of the suffixes, sorted by path.

    Suffixes can be in upper or lower case; by default, any file is returned. Hidden files and
    folders, whose names begin with a dot, are left out. Links to folders are followed, unless their
    files are already part of the result, as those of a link to a folder above.
    """

    def raise_unless_closed(error: OSError) -> None:
        # A folder that is closed to this account, or removed, has no files.
        if not isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
            raise error

    files: list[Path] = []
    starts = [str(root)]
    seen = set[str]()
    # Not `os.walk(followlinks=True)`, which does not end for a link to a folder above.
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, names, file_names in os.walk(start, onerror=raise_unless_closed):
                real = os.path.realpath(folder)
                if real in seen:
                    names.clear()
                    continue
                seen.add(real)
                # In place: `os.walk` descends into the names of this list.
                names[:] = [name for name in names if not name.startswith(".")]
                files += [Path(folder, name) for name in file_names if not name.startswith(".")]
                paths = [os.path.join(folder, name) for name in names]
                links += [path for path in paths if os.path.islink(path)]
        # After all folders: a folder counts under the path without a link.
        starts = sorted(links)
    endings = tuple(suffix.lower() for suffix in suffixes)
    return sorted(file for file in files if file.name.lower().endswith(endings))


def fingerprint_of(names: Sequence[str], checksums: Sequence[str] = ()) -> str:
    """Return a hash of names and checksums of files, as 32 hexadecimal digits."""
    content = json.dumps([list(names), list(checksums)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
