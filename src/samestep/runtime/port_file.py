"""A port that rank 0 publishes to the other ranks on its machine, in a file.

The file is held locked by rank 0 for as long as it counts, so one that a killed job left behind is known by its lock
being free. It lies in a folder that only this user can enter.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import InputError, RunError

_NAP_SECONDS = 0.02


@contextmanager
def published(job: str, port: int, folder: Path | None = None) -> Iterator[None]:
    """Tell the other ranks of `job` the port while the block runs.

    Args:
        folder: where the file lies; None for this user's own folder among the temporary files.

    Raises:
        InputError: the folder is not safe.
    """
    path = _path(job, folder)
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # before it has its name, so that nobody sees it free
        os.write(descriptor, str(port).encode())
        aside.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def wait_for_port(job: str, seconds: float, folder: Path | None = None) -> int:
    """The port that rank 0 of `job` has published.

    Raises:
        InputError: the folder is not safe.
        RunError: there was none within `seconds`.
    """
    path = _path(job, folder)
    deadline = time.monotonic() + seconds
    while (port := _read(path)) is None:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank 0 has published no port in {path} within {seconds:g} s",
                rule="rank 0 listens on a free port of its own and tells the others by this file",
                do="see whether rank 0 has started; if ranks do not share this folder, set MASTER_PORT to a free port",
            )
        time.sleep(_NAP_SECONDS)
    return port


def free_loopback_socket() -> socket.socket:
    """A socket that listens on a free port which only this machine reaches."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


def _read(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(descriptor, 8))
    finally:
        os.close(descriptor)
    return None  # who wrote it has ended


def _path(job: str, folder: Path | None) -> Path:
    folder = folder or Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InputError(
            f"{folder} is not a folder that only this user can enter",
            rule="ranks tell each other there where they meet",
            do=f"remove it, or chmod 700 {folder}, or set MASTER_PORT to a free port",
        )
    return folder / (re.sub(r"[^\w.-]", "_", job) + ".port")
