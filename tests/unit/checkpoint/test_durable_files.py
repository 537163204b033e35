"""Folder lock: one writing process at a time, released however the process ends."""

import errno
import fcntl
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.checkpoint.folder_lock import LOCK, FolderLock, is_locked
from samestep.errors import InputError

HOLDER = """
import sys, time
from pathlib import Path
from samestep.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(100)
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def is_free(folder: Path) -> bool:
    """Return whether another open file description can get the lock."""
    descriptor = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def failing_flock(number: int, patch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(fcntl, "flock", flock)


def test_error_names_the_other_process(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        start = time.monotonic()
        with pytest.raises(InputError) as raised:
            FolderLock(tmp_path, timeout=0.3)
        assert time.monotonic() - start >= 0.3
        assert raised.value.code == "E_LOCKED"
        assert f"{tmp_path} is in use by process {process.pid} on " in raised.value.value
        assert not is_free(tmp_path)


def test_kill_of_the_holder_releases_the_lock(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        with FolderLock(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_release_end_of_block_and_deletion_free_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "a" / "b")
    assert not is_free(tmp_path / "a" / "b")
    lock.release()
    lock.release()
    assert is_free(tmp_path / "a" / "b")
    with FolderLock(tmp_path):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    lock = FolderLock(tmp_path)
    del lock
    gc.collect()
    assert is_free(tmp_path)


def test_objects_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, timeout=0)
    second = FolderLock(tmp_path / ".." / tmp_path.name, timeout=0)
    first.release()
    assert not is_free(tmp_path)
    second.release()
    assert is_free(tmp_path)


def test_release_frees_the_lock_despite_a_living_fork(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    process.start()
    try:
        lock.release()
        assert is_free(tmp_path)
    finally:
        process.kill()
        process.join()


def test_release_in_a_fork_does_not_free_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=lock.release)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not is_free(tmp_path)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_system_without_locks_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    failing_flock(number, monkeypatch)
    with FolderLock(tmp_path):
        assert "without locks" in caplog.text


def test_failure_after_locking_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="No space left on device"):
            FolderLock(tmp_path)
    gc.collect()
    assert is_free(tmp_path)


def test_is_locked(tmp_path: Path) -> None:
    assert is_locked(tmp_path / "missing") is False
    with FolderLock(tmp_path):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False
    with FolderLock(tmp_path, timeout=0):
        pass
