"""Notes before the first step on properties of the machine that a run notices late."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from samestep.checkpoint.files import unsupported_features
from samestep.units import format_bytes

_SHARED_MEMORY = Path("/dev/shm")
# The default of docker run is 64 MiB.
_SMALL_SHARED_MEMORY = 128 << 20
_EFFECTS = {
    "folder fsync": "the newest checkpoint can be lost when the machine loses power",
    "symbolic links": "checkpoints/last and checkpoints/best are files with the name of a checkpoint",
}


def machine_notes(run: Path, workers: int) -> list[str]:
    """Return notes on the file system of a run and on shared memory for loader processes.

    Args:
        run: directory of the run.
        workers: loader processes per rank.

    Raises:
        CheckpointWriteError: the file system lacks an operation that a save needs.
    """
    notes = [f"{run} is on a file system without {name}: {_EFFECTS[name]}" for name in unsupported_features(run)]
    if workers and os.path.isdir(_SHARED_MEMORY):
        size = shutil.disk_usage(_SHARED_MEMORY).total
        if size < _SMALL_SHARED_MEMORY:
            notes.append(
                f"{_SHARED_MEMORY} has {format_bytes(size)} for the microbatches of loader processes; if they end with "
                "a bus error: docker run --shm-size=8g or --ipc=host, or --workers 0, which needs none"
            )
    return notes
