"""Rank functions for `unit/checkpoint/test_store.py`."""

import resource
import signal
from pathlib import Path

from samestep.checkpoint.store import CheckpointFolder
from samestep.session import start

FILES = {"model.safetensors": bytes(range(256)) * 3, "state.json": b'{"step": 7}', "empty": b""}


def write_together(path: Path) -> None:
    """Write the same checkpoint on every rank at the same time, repeatedly."""
    with start(device="cpu") as world:
        for attempt in range(5):
            world.barrier()
            CheckpointFolder(path / str(attempt)).write(5, FILES)


def exceed_file_size_limit(path: Path, step: int) -> None:
    """Write a checkpoint and exceed the file size limit, which kills the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    CheckpointFolder(path).write(step, FILES)
