"""A process that saves is killed at every single call of the system that changes the disk."""

import mmap
import os
import signal
from pathlib import Path

import pytest

from disk_faults import STORY, acting, content, killing, names, tell
from samestep.checkpoint.manifest import verify
from samestep.checkpoint.store import CheckpointFolder


def killed_at(call: int, folder: CheckpointFolder, patch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Run the story in a fork that is killed at a call; whether that came, and how many saves were done by then."""
    with mmap.mmap(-1, 1) as done:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with acting(patch, call, call, killing):
                    tell(folder, lambda saves: done.__setitem__(0, saves))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL)
        return code != 0, done[0]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_call_leaves_the_checkpoint_before_or_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    for call in range(0, 1000, stride):
        folder = CheckpointFolder(tmp_path / str(call), keep=1)
        was_killed, done = killed_at(call, folder, monkeypatch)
        if not was_killed:
            break
        before, after = STORY[done - 1][1] if done else None, STORY[done][1]
        if folder.steps():
            found = folder.find("last")
            verify(found)
            assert folder.newest_whole() == found
            assert content(found) in (before, after), f"call {call}"
            for path in folder.steps():
                verify(path)
        else:
            assert before is None, f"call {call} lost a checkpoint"
        if done >= 2 or (folder.path / "best").is_symlink():
            verify(folder.find("best"))

        folder.clean()
        if before is not None:
            assert content(folder.find("last")) in (before, after)
        # Who starts again makes the step again that was being saved, and goes on.
        tell(folder, begin=done)
        assert content(folder.find("last")) == STORY[-1][1]
        assert names(folder) == ["best", "last", "step-000000004"], f"call {call}"
    assert call > 80, "the story has more calls than that"
    assert done == len(STORY)
