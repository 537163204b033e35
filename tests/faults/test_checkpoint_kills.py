"""Kill of a saving process at every system call that changes the disk."""

import mmap
import os
import signal
from pathlib import Path

import pytest

from helpers.disk_faults import SAVES, content, intercepting, kill, names, run_saves
from samestep.checkpoint.manifest import verify
from samestep.checkpoint.store import CheckpointFolder


def killed_at(call: int, folder: CheckpointFolder, patch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Run the saves in a fork, killed at a call; return whether the kill happened and the number of completed saves."""
    with mmap.mmap(-1, 1) as done:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with intercepting(patch, call, call, kill):
                    run_saves(folder, lambda saves: done.__setitem__(0, saves))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL)
        return code != 0, done[0]


@pytest.mark.parametrize("stride", [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_kill_at_any_call_preserves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    for call in range(0, 1000, stride):
        folder = CheckpointFolder(tmp_path / str(call), keep=1)
        was_killed, done = killed_at(call, folder, monkeypatch)
        if not was_killed:
            break
        before, after = SAVES[done - 1][1] if done else None, SAVES[done][1]
        if folder.steps():
            checkpoint = folder.find("last")
            verify(checkpoint)
            assert folder.newest_valid() == checkpoint
            assert content(checkpoint) in (before, after), f"call {call}"
            for path in folder.steps():
                verify(path)
        else:
            assert before is None, f"call {call} lost a checkpoint"
        if done >= 2 or (folder.path / "best").is_symlink():
            verify(folder.find("best"))

        folder.clean()
        if before is not None:
            assert content(folder.find("last")) in (before, after)
        # A restarted run repeats the interrupted save and continues.
        run_saves(folder, begin=done)
        assert content(folder.find("last")) == SAVES[-1][1]
        assert names(folder) == ["best", "last", "step-000000004"], f"call {call}"
    assert call > 80, "the saves have more calls"
    assert done == len(SAVES)
