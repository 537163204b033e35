"""Errors that end a script: reported once by all ranks, by the hook that the script has."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from samestep.distributed.status import local_rank_status
from samestep.distributed.torch_errors import MEMORY_FIX
from samestep.errors import RankDesyncError
from samestep.launcher.job import Job, process_state
from samestep.session import UncaughtErrors


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Errors that a hook of the script has shown."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    hook = sys.excepthook
    yield errors
    assert sys.excepthook is hook


def job() -> Job:
    """Return a job of one rank, which waits for no other."""
    return Job(0, 1, dist.HashStore(), 0, ("127.0.0.1", 1), True, 60.0)


def raised(error: BaseException) -> None:
    """Call the hook as the interpreter does."""
    sys.excepthook(type(error), error, error.__traceback__)


def test_first_error_of_the_job_is_shown_by_the_hook_of_the_script(shown: list[Any]) -> None:
    same_job, error = job(), OSError("the switch was off")
    for each in (error, OSError("a consequence")):
        uncaught = UncaughtErrors(same_job, local_rank_status())
        raised(each)
        uncaught.close()
    assert shown == [error]


def test_fix_follows_the_traceback(shown: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    uncaught, error = UncaughtErrors(job(), local_rank_status()), MemoryError()
    raised(error)
    uncaught.close()
    assert shown == [error]
    assert capfd.readouterr().err.splitlines() == [f"  fix:      {MEMORY_FIX}"]


def test_error_of_samestep_has_no_traceback(shown: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    uncaught = UncaughtErrors(job(), local_rank_status())
    raised(RankDesyncError("rank 1 has left the loop", expected="all ranks in step", fix="leave together"))
    uncaught.close()
    assert shown == []
    assert capfd.readouterr().err.splitlines() == [
        "error: rank 1 has left the loop [E_RANK_DESYNC]",
        "  expected: all ranks in step",
        "  fix:      leave together",
    ]


def test_interrupt_is_the_matter_of_the_hook_before(shown: list[Any]) -> None:
    uncaught = UncaughtErrors(job(), local_rank_status())
    for _ in range(2):
        raised(KeyboardInterrupt())
    uncaught.close()
    assert len(shown) == 2


def test_later_hook_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    uncaught = UncaughtErrors(job(), local_rank_status())
    later = sys.excepthook = lambda *_: None
    uncaught.close()
    assert sys.excepthook is later


def test_error_that_leaves_the_block_of_the_session_reaches_the_hook(shown: list[Any]) -> None:
    uncaught, error = UncaughtErrors(job(), local_rank_status()), OSError("the switch was off")
    uncaught.close(OSError, error, None)
    raised(error)
    uncaught.close()
    assert shown == [error]


def test_without_a_job_errors_are_shown_as_python_does(shown: list[Any]) -> None:
    assert process_state.external_job is None
    uncaught, error = UncaughtErrors(None, local_rank_status()), OSError("no space")
    uncaught.report(error)
    assert shown == [error]
