"""Errors that end a script which another launcher started, or none: one report of all ranks, and the exit code."""

from __future__ import annotations

import faulthandler
import os
import sys
from functools import partial
from types import TracebackType
from typing import Any

from samestep.distributed.status import RankStatus
from samestep.distributed.streams import report_line
from samestep.distributed.torch_errors import fix_lines
from samestep.errors import SamestepError
from samestep.launcher.failure import Failure
from samestep.launcher.job import Job, process_state, report_failure

_EXIT_SECONDS = 10.0


class UncaughtErrors:
    """Hook for errors that a script does not catch: the first rank of a job reports its own, the others are silent.

    Args:
        job: the job of another launcher; None without ranks elsewhere: errors are then shown as
            Python does.
        status: activity of this rank.
    """

    def __init__(self, job: Job | None, status: RankStatus) -> None:
        self._job = job
        self._status = status
        self._hook_before = sys.excepthook
        if job is not None:
            sys.excepthook = self._hook

    def close(self, kind: type[BaseException] | None = None, *_: Any) -> None:
        """Restore the hook, unless the script has set another one, or an error is on its way to the hook."""
        if kind is None and sys.excepthook == self._hook:
            sys.excepthook = self._hook_before

    def report(self, error: BaseException) -> None:
        """Print an error, unless another rank has reported one."""
        if self._job is None:
            self._hook_before(type(error), error, error.__traceback__)
            return
        failure = Failure.of_exception(self._job.rank, error, self._status.activity)
        report_failure(self._job, failure, partial(self._show, error, failure))

    def limit_exit(self) -> None:
        """End this process with exit code 1 if the interpreter does not end within seconds after an uncaught error.

        The destructor of a process group waits for collectives in progress, which other ranks may
        never join.
        """
        if self._job is not None and isinstance(getattr(sys, "last_value", None), Exception):
            # A thread of C code, which ends the process at any point of the end of the interpreter.
            faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115

    def _show(self, error: BaseException, failure: Failure) -> None:
        if isinstance(error, SamestepError):
            report_line(failure.reported(None).text)
        else:
            self._hook_before(
                type(error), error, error.__traceback__
            )  # the traceback as the script formats it
            for line in fix_lines(error):
                report_line(f"  {line}")

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.report(error)
        else:
            self._hook_before(kind, error, trace)


def joined_job() -> Job | None:
    """Return the job of another launcher with several ranks, if this process is one of them."""
    job = process_state.job
    if job is not None and job.size > 1:
        return job
    return None
