"""One process at a time writes into a folder; how a process ends does not matter."""

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

from samestep.checkpoint.lock import LOCK, FolderLock, is_locked
from samestep.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from samestep.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def is_free(folder: Path) -> bool:
    """Whether another process could have it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_another_process_is_named_and_kept_out(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        began = time.monotonic()
        with pytest.raises(InputError) as refused:
            FolderLock(tmp_path, patience=0.3)
        assert time.monotonic() - began >= 0.3
        assert f"{tmp_path} is in use by process {process.pid} on " in refused.value.value
        assert refused.value.do is not None
        assert not is_free(tmp_path)


def test_a_holder_that_is_killed_while_somebody_waits_lets_go(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        with FolderLock(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_it_is_free_after_release_after_the_block_and_when_nobody_refers_to_it(tmp_path: Path) -> None:
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


def test_objects_of_one_process_share_it(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, patience=0)
    second = FolderLock(tmp_path / ".." / tmp_path.name, patience=0)
    first.release()
    assert not is_free(tmp_path)
    second.release()
    assert is_free(tmp_path)


def test_a_fork_that_lives_longer_does_not_keep_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    process.start()
    try:
        lock.release()
        assert is_free(tmp_path)
    finally:
        process.kill()
        process.join()


def test_a_fork_that_ends_does_not_give_it_away(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=lock.release)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not is_free(tmp_path)
    lock.release()


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    FolderLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be locked: Not a directory"):
        FolderLock(tmp_path / "file" / "folder")


def test_a_failure_after_the_lock_was_taken_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(InputError, match="No space left on device"):
            FolderLock(tmp_path)
    assert is_free(tmp_path)


def test_who_only_looks_sees_whether_it_is_held_and_keeps_nobody_out(tmp_path: Path) -> None:
    assert is_locked(tmp_path / "nowhere") is False
    with FolderLock(tmp_path):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False
    with FolderLock(tmp_path, patience=0):
        pass


def test_where_there_are_no_locks_it_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderLock(tmp_path).release()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert is_locked(tmp_path) is None
