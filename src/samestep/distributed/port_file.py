"""Port file: rank 0 of several ranks on one machine publishes the port of its store.

Rank 0 holds a lock on a valid file, so a free lock identifies the file of a killed job. Only the user can enter the
folder.
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
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.errors import InputError, RunError

_POLL_SECONDS = 0.02


@contextmanager
def publish_port(job: str, port: int, folder: Path | None = None) -> Iterator[None]:
    """Publish a port for the other ranks of `job` for the duration of the block.

    The file is in `folder`, by default the user's own folder for temporary files.

    Raises:
        InputError: other users can enter the folder.
    """
    path = _port_file(job, folder)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the rename, so that no rank sees the file unlocked
        os.write(descriptor, str(port).encode())
        temporary.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def wait_for_port(job: str, seconds: float, folder: Path | None = None) -> int:
    """Return the port that rank 0 of `job` has published.

    Raises:
        InputError: other users can enter the folder.
        RunError: no port appears within `seconds`.
    """
    path = _port_file(job, folder)
    deadline = time.monotonic() + seconds
    while (port := _read_port(path)) is None:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank 0 has published no port in {path} within {seconds:g} s",
                expected="rank 0 listens on a free port and publishes the port in this file",
                fix="check that rank 0 has started; if ranks do not share this folder, set MASTER_PORT to a free port",
                code="E_RENDEZVOUS",
            )
        time.sleep(_POLL_SECONDS)
    return port


def _read_port(path: Path) -> int | None:
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
    return None  # the writer has ended


def _port_file(job: str, folder: Path | None) -> Path:
    folders = [folder] if folder is not None else _private_folders()
    private = next(filter(_is_private, folders), None)
    if private is None:
        raise InputError(
            f"{folders[0]} is not a folder that only this user can enter",
            expected="a private folder, in which ranks publish the port of the store",
            fix=f"remove {folders[0]}, or chmod 700 {folders[0]}, or set MASTER_PORT to a free port",
            code="E_PORT_FOLDER",
        )
    return private / (re.sub(r"[^\w.-]", "_", job) + ".port")


def _private_folders() -> list[Path]:
    """Return the user's own folder for temporary files, and one that no other user can occupy."""
    folders = [Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"]
    with suppress(RuntimeError):  # a user without a home
        folders.append(Path.home() / ".cache" / f"samestep-{socket.gethostname()}")
    return folders


def _is_private(folder: Path) -> bool:
    """Return whether only this user can enter a folder, which is created if missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:  # such as a dangling link with this name
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
