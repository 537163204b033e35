"""Full, failing and read-only disks: the error is reported, and no checkpoint is lost."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.disk_faults import SAVES, content, fail_with, intercepting, mounted, names, run_saves
from samestep.checkpoint.manifest import verify
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import EXIT_FAILED, CheckpointWriteError

FILES = {"model": bytes(range(256)) * 300, "state": b"{}"}


@pytest.mark.parametrize(
    ("number", "removing", "lasting"),
    [
        pytest.param(errno.ENOSPC, False, False, id="ENOSPC-once", marks=pytest.mark.long),
        pytest.param(errno.ENOSPC, False, True, id="ENOSPC-from-then-on"),
        pytest.param(errno.EIO, True, False, id="EIO-once"),
        pytest.param(errno.EIO, True, True, id="EIO-from-then-on", marks=pytest.mark.long),
        pytest.param(errno.EDQUOT, False, False, id="EDQUOT-once", marks=pytest.mark.long),
        pytest.param(errno.EDQUOT, False, True, id="EDQUOT-from-then-on"),
        pytest.param(errno.EROFS, True, False, id="EROFS-once", marks=pytest.mark.long),
        pytest.param(errno.EROFS, True, True, id="EROFS-from-then-on"),
    ],
)
def test_error_of_any_call_is_raised_and_preserves_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, removing: bool, lasting: bool
) -> None:
    raised_errors = 0
    for call in range(1000):
        folder = CheckpointFolder(tmp_path / str(call), keep=1)
        done = 0

        def count(saves: int) -> None:
            nonlocal done
            done = saves

        try:
            with intercepting(
                monkeypatch, call, float("inf") if lasting else call, fail_with(number, removing=removing)
            ):
                run_saves(folder, count)
        except CheckpointWriteError as error:
            raised_errors += 1
            step = SAVES[done][0]
            assert f"the checkpoint of step {step} " in error.value
            assert str(folder.path) in error.value
            assert os.strerror(number) in error.value
            assert error.expected is not None
            assert error.fix is not None
            assert error.exit_code == EXIT_FAILED
            if done:
                assert content(folder.find("last")) in (SAVES[done - 1][1], SAVES[done][1])
                assert folder.newest_valid() == folder.find("last")
            for path in folder.steps():
                verify(path)
        else:
            if done == len(SAVES) and call > 80:
                break
            assert not removing, f"call {call} failed without an error"
        # The disk works again.
        run_saves(folder, begin=done)
        folder.clean()
        assert names(folder) == ["best", "last", "step-000000004"], f"call {call}"
        assert content(folder.find("last")) == SAVES[-1][1]
    assert raised_errors > 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for two and a half checkpoints."""
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=200k", "tmpfs")


def test_full_disk_preserves_older_checkpoints(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk, keep=2)
    folder.write(1, FILES)
    folder.write(2, FILES, is_best=True)
    before = names(folder)
    for _ in range(2):
        with pytest.raises(CheckpointWriteError) as raised:
            folder.write(3, FILES)
        assert f"the checkpoint of step 3 cannot be written to {small_disk}: No space left" in raised.value.value
        assert "free space" in (raised.value.fix or "")
        assert names(folder) == before
    assert content(folder.find("last")) == FILES
    shutil.rmtree(small_disk / "step-000000001")
    verify(folder.write(3, FILES))


def test_read_only_disk_preserves_checkpoints(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk)
    folder.write(1, FILES)
    done = subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    with pytest.raises(CheckpointWriteError, match=r"step 2 .*Read-only file system") as raised:
        folder.write(2, FILES)
    assert "make the folder writable" in (raised.value.fix or "")
    assert content(folder.find("last")) == FILES


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(1, {"small": b"1"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write which is too long is an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r"step 2 .*File too large") as raised:
            folder.write(2, FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in (raised.value.fix or "")
    assert names(folder) == ["last", "step-000000001"]
    verify(folder.write(2, FILES))
