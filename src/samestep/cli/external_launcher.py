"""Commands as one rank of a job that another launcher started.

No process is launched in this case: every process runs the command. Rank 0 alone makes the plan and
sends the plan through the job's store. The rank that caused a failure reports the failure, once.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from samestep.distributed.env import read_rendezvous, set_environment, silence_torch_warnings
from samestep.distributed.launcher_detection import Rendezvous
from samestep.errors import EXIT_STOPPED, InputError, PeerLostError, SamestepError
from samestep.launcher.failure import Failure

if TYPE_CHECKING:
    from samestep.cli.launch_options import LaunchOptions
    from samestep.cli.run_plans import RunPlan
    from samestep.launcher.job import Job

_POLL_SECONDS = 0.02
_PLAN_KEY = "command/plan"
_joined: list[Rendezvous] = []


class ReportedError(SamestepError):
    """Failure that has been reported already; the process must exit with this code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exits with code {exit_code}")
        self.exit_code = exit_code


@contextmanager
def reported_by_rank_0() -> Iterator[None]:
    """Report invalid options, which all ranks of another launcher's job share, on rank 0 only."""
    try:
        yield
    except InputError as error:
        rendezvous = read_rendezvous()
        if rendezvous is not None and rendezvous.rank != 0:
            raise ReportedError(error.exit_code) from error
        raise


def run_as_rank(
    options: LaunchOptions,
    rendezvous: Rendezvous,
    function: str,
    make_plan: Callable[[int], RunPlan],
    rank_arguments: Callable[[RunPlan], tuple[Any, ...]],
) -> tuple[RunPlan, Any]:
    """Run a function of `samestep.recipes.run` as one rank; return the plan and the result on this rank.

    `make_plan` receives the number of restarts of the job, and runs on rank 0 alone.

    Raises:
        ReportedError: a rank failed, and the failure has been reported.
    """
    _joined.append(rendezvous)
    silence_torch_warnings()
    from samestep.config import resolve_mesh
    from samestep.launcher.job import process_state
    from samestep.launcher.rendezvous import join_job

    plan = None
    try:
        job = join_job(rendezvous, hang_after=options.hang_after)
        _require_compatible(options, rendezvous)
        set_environment(options.environment or {})  # which raises errors that one rank reports
        plan = _share(job, make_plan)
        resolve_mesh(plan.recipe.strategy, job.size, plan.recipe.microbatch_count)
        value = getattr(import_module("samestep.recipes.run"), function)(*rank_arguments(plan))
    except KeyboardInterrupt:
        raise ReportedError(EXIT_STOPPED) from None
    except (
        BaseException
    ) as error:  # boundary: every end of this rank is reported once among all ranks
        code = _report(
            process_state.job,
            Failure.of_exception(rendezvous.rank, error),
            plan.folder if plan else None,
        )
        raise ReportedError(code) from error
    return plan, value


def exit_if_rank(code: int) -> None:
    """Exit immediately if this process was a rank of another launcher's job.

    Python's own shutdown is skipped, as in ranks that `multiprocessing` forks: threads of torch and
    of Samestep that wait in C++ for other ranks or for the store can abort the process during
    shutdown.
    """
    if _joined:
        atexit._run_exitfuncs()
        exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Exit without destroying a process group in which other ranks can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _require_compatible(options: LaunchOptions, rendezvous: Rendezvous) -> None:
    """Require options that leave the launch to the other launcher."""
    launcher = rendezvous.launcher
    size = rendezvous.world_size
    values = {
        "devices": options.devices,
        "max-restarts": options.max_restarts,
        "grace": options.grace,
    }
    if options.size != str(size):
        values["processes"] = options.size
    for option, value in values.items():
        if value:
            raise InputError(
                f"--{option} {value}, but {launcher} has started {size} processes",
                expected=f"this setting in the configuration of {launcher}",
                fix=f"leave --{option} out",
                code="E_LAUNCH",
            )


def _share(job: Job, make_plan: Callable[[int], RunPlan]) -> RunPlan:
    """Return the plan of rank 0 on every rank."""
    from samestep.cli.run_plans import RunPlan
    from samestep.launcher.rendezvous import failure_reported

    if job.rank == 0:
        plan = make_plan(job.restarts)
        job.store.set(_PLAN_KEY, plan.to_json())
        return plan
    while not failure_reported(job.store) and not job.store.check([_PLAN_KEY]):
        time.sleep(_POLL_SECONDS)
    if failure_reported(job.store):
        raise PeerLostError("another rank ended before the work began")
    return RunPlan.from_json(job.store.get(_PLAN_KEY).decode())


def _report(job: Job | None, failure: Failure, folder: Path | None) -> int:
    """Print the first failure of the job, write later ones to the run's logs; return the first one's exit code."""
    from samestep.launcher.rendezvous import report_failure

    is_first, code = (True, failure.exit_code) if job is None else report_failure(job, failure)
    log_dir = folder / "logs" if folder is not None and folder.is_dir() else None
    if is_first:
        print(failure.reported(log_dir).text, file=sys.stderr, flush=True)
    else:
        failure.append_to_log(log_dir)
    return code
