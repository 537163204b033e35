"""Features of the file system that a checkpoint needs."""

from __future__ import annotations

import secrets
from pathlib import Path

from samestep.checkpoint.files import disk_errors, link_name, remove, sync_folder, write_file

_TRIAL = ".trial-"


def unsupported_features(folder: Path) -> list[str]:
    """Try the operations of a save in a folder; return those that its file system replaces or omits.

    Raises:
        CheckpointWriteError: the file system lacks an operation that a save needs.
    """
    for leftover in folder.glob(f"{_TRIAL}*"):  # of a process that was killed
        remove(leftover)
    trial = folder / f"{_TRIAL}{secrets.token_hex(4)}"
    with disk_errors(f"a trial of the operations of a checkpoint failed in {folder}", "a folder for checkpoints"):
        try:
            (trial / "written").mkdir(parents=True)
            write_file(trial / "written" / "file", b"1")
            has_sync = sync_folder(trial / "written")
            (trial / "written").rename(trial / "renamed")
            has_links = link_name(trial / "link", "renamed")
        finally:
            remove(trial)
    return [name for name, is_present in (("folder fsync", has_sync), ("symbolic links", has_links)) if not is_present]
