"""Rendezvous: the ranks of a job find each other in its store, whose port rank 0 may publish in a file.

A store may hold keys of other jobs and of earlier attempts. Rank 0 generates a new name for the attempt. Every other
rank posts a nonce of its own until rank 0 answers the nonce with that name; the rank then confirms under the name. All
keys have a prefix of the job's token and number of ranks, so a job with another token or size is invisible.

Port file: on one machine, rank 0 publishes the port of its store if no variable has one. Rank 0 holds a lock on a valid
file, so a free lock identifies the file of a killed job. Only the user can enter the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from samestep.distributed.status import ranks_text
from samestep.errors import InputError, RunError

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.0005, 0.1
_PORT_POLL_SECONDS = 0.02


def wait_for_ranks(
    store: dist.Store, *, rank: int, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    """Wait until all ranks have joined, each with its number of restarts according to its launcher.

    Returns:
        The part of the store that belongs to this attempt alone, and the largest number of restarts of any rank.

    Raises:
        RunError: a rank is missing after `timeout`, or two processes have the same rank.
    """
    store = dist.PrefixStore(str(size), store)
    if rank == 0:
        return _admit_ranks(store, size, restarts, timeout, hint)
    nonce = uuid4().hex
    store.set(f"hello/{rank}", f"{nonce} {restarts}")

    def wait(store: dist.Store, key: str) -> str:
        _poll(
            lambda: store.check([key]), lambda: f"rank {rank} of {size} received no answer from rank 0", timeout, hint
        )
        return store.get(key).decode()

    attempt = dist.PrefixStore(wait(store, f"welcome/{nonce}"), store)
    if attempt.add(f"here/{rank}", 1) > 1:
        raise RunError(
            f"two processes are rank {rank} of {size}",
            expected="every process of a job has its own rank",
            fix=hint,
            code="E_RENDEZVOUS",
        )
    return attempt, int(wait(attempt, "begin"))


def _admit_ranks(store: dist.Store, size: int, restarts: int, timeout: timedelta, hint: str) -> tuple[dist.Store, int]:
    name = uuid4().hex
    attempt = dist.PrefixStore(name, store)
    missing = set(range(1, size))
    nonces: dict[int, str] = {}
    counts = {0: restarts}

    def all_joined() -> bool:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]):
                nonce, count = store.get(f"hello/{rank}").decode().split()
                if nonces.get(rank) != nonce:
                    nonces[rank], counts[rank] = nonce, int(count)
                    store.set(f"welcome/{nonce}", name)
            if attempt.check([f"here/{rank}"]):
                missing.remove(rank)
        return not missing

    _poll(all_joined, lambda: f"{ranks_text(sorted(missing))} of {size} did not join", timeout, hint)
    attempt.set("begin", str(max(counts.values())))
    return attempt, max(counts.values())


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Wait until all keys are set, at most for some seconds; return whether they are set."""
    # No blocking read: Python would handle no signal meanwhile, and torch prints warnings when one ends without an
    # answer.
    began = time.monotonic()
    while not (is_complete := not keys or store.check(keys)) and (waited := time.monotonic() - began) < seconds:
        time.sleep(_poll_seconds(waited))
    return is_complete


def _poll(is_done: Callable[[], bool], problem: Callable[[], str], timeout: timedelta, hint: str) -> None:
    began, limit = time.monotonic(), timeout.total_seconds()
    while not _answer(is_done, hint):
        waited = time.monotonic() - began
        if waited > limit:
            raise RunError(
                f"{problem()} within {limit:g} s",
                expected="every rank connects to the store of rank 0, with the same SAMESTEP_TOKEN and number of ranks",
                fix=hint,
                code="E_RENDEZVOUS",
            )
        time.sleep(_poll_seconds(waited))


def _poll_seconds(waited: float) -> float:
    """Return the time until the next read after a wait of some seconds."""
    return min(max(waited / 8, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)


def _answer(is_done: Callable[[], bool], hint: str) -> bool:
    try:
        return is_done()
    except dist.DistError as error:
        raise RunError(
            f"the store of the job is gone: {str(error).splitlines()[0]}",
            expected="rank 0, or the launcher, hosts the store until the job ends",
            fix=hint,
            code="E_LAUNCHER_GONE",
        ) from error


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
        time.sleep(_PORT_POLL_SECONDS)
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
