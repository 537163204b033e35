"""A command as one rank of a job that another launcher started.

Nothing is launched then: every process runs the command. What to do is settled by rank 0 alone, which tells the others
through the job's store; the report of a failure is told once, by the rank that caused it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from samestep.cli.durations import seconds
from samestep.config import Recipe
from samestep.config import settle as layout_of
from samestep.errors import EXIT_STOPPED, InputError, PeerLostError, SamestepError
from samestep.recipes.parse import make_recipe, recipe_data
from samestep.runtime.env import quiet_torch, read_rendezvous
from samestep.runtime.failure import Failure
from samestep.runtime.rendezvous import Rendezvous
from samestep.runtime.watchdog import HANG_AFTER
from samestep.tools.tune.setting import Choice

if TYPE_CHECKING:
    from samestep.runtime.job import Job

_NAP_SECONDS = 0.02
_PLAN = "command/plan"
_joined: list[Rendezvous] = []


class LeaveError(SamestepError):
    """The command has failed and that is told; the process is to end now with this exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ends with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Plan:
    """What all ranks are to do, as rank 0 settles it.

    Attributes:
        run: the run's folder.
        checkpoint: what to begin from, if anything.
        step: optimizer steps done by then.
        tuned: what was found for the machine, if it is taken up.
    """

    recipe: Recipe
    run: Path
    checkpoint: Path | None = None
    step: int = 0
    tuned: Choice | None = None

    def to_text(self) -> str:
        """As text that `from_text` reads."""
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        tuned = asdict(self.tuned) if self.tuned else None
        return json.dumps([recipe_data(self.recipe), str(self.run), checkpoint, self.step, tuned])

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that rank 0 made."""
        recipe, run, checkpoint, step, tuned = json.loads(text)
        path = Path(checkpoint) if checkpoint else None
        choice = Choice(**tuned) if tuned else None
        return cls(make_recipe(recipe, (), origin="rank 0's recipe"), Path(run), path, step, choice)


def settled(arguments: argparse.Namespace) -> Rendezvous | None:
    """Which rank of another launcher's job this process is, if it is one.

    `--processes` is said from here on: it is the size of the job, or one a device, or 1 where nothing is given.

    Raises:
        InputError: the launcher's variables cannot be.
    """
    found = read_rendezvous()
    if arguments.processes is None:
        devices = arguments.devices.count(",") + 1 if arguments.devices else 1
        arguments.processes = str(found.world_size if found is not None else devices)
    return found


def refuse_launchers(command: str) -> None:
    """For commands that start ranks of their own, however they are started.

    Raises:
        InputError: another launcher started this process as one of several.
    """
    found = read_rendezvous()
    if found is not None and found.world_size > 1:
        raise InputError(
            f"samestep {command} is rank {found.rank} of {found.world_size} processes that {found.launcher} started",
            rule=f"samestep {command} is one process, which starts ranks of its own",
            do=f"start it without {found.launcher}",
        )


def take_part(
    arguments: argparse.Namespace,
    found: Rendezvous,
    function: str,
    settle: Callable[[int], Plan],
    call: Callable[[Callable[..., Any], Plan], Any],
) -> tuple[Plan, Any]:
    """Do the command's work as one rank.

    Args:
        function: of `samestep.recipes.run`.
        settle: makes the plan, in rank 0 alone; takes how often the job was started anew.
        call: calls the function as the plan says.

    Returns:
        The plan, and what the function returned here.

    Raises:
        LeaveError: a rank failed, and that is told.
    """
    _joined.append(found)
    quiet_torch()
    from samestep.runtime.job import join_job

    hang_after = seconds("--hang-after", getattr(arguments, "hang_after", f"{HANG_AFTER:g}s"))

    job, plan = None, None
    try:
        job = join_job(found, hang_after=hang_after)
        _require_possible(arguments, found)
        plan = _share(job, settle)
        layout_of(plan.recipe.strategy, job.size, plan.recipe.shards)
        value = call(getattr(import_module("samestep.recipes.run"), function), plan)
    except KeyboardInterrupt:
        raise LeaveError(EXIT_STOPPED) from None
    except BaseException as error:  # boundary: whatever ends this rank is told once among all ranks
        code = _tell(job, Failure.of_exception(found.rank, error), plan.run if plan else None)
        raise LeaveError(code) from error
    return plan, value


def end_as_rank(code: int) -> None:
    """End this process if it was a rank of a job, whose work is done.

    Python's own end is not waited for, as in ranks that `multiprocessing` forks: threads of torch and of ours that
    wait in C++ for other ranks or for the store can abort the process in the middle of it.
    """
    if _joined:
        atexit._run_exitfuncs()
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process without tearing down a group whose other ranks may be stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _require_possible(arguments: argparse.Namespace, found: Rendezvous) -> None:
    size, launcher = found.world_size, found.launcher
    if arguments.processes != str(size):
        raise InputError(
            f"--processes {arguments.processes}, but {launcher} has started {size} processes",
            rule="every process that another launcher starts is one rank",
            do=f"leave --processes out, or start the command without {launcher}",
        )
    if arguments.devices is not None:
        raise InputError(
            f"--devices {arguments.devices}, but {launcher} has started this process",
            rule="another launcher gives its ranks their devices",
            do="leave --devices out; CUDA_VISIBLE_DEVICES narrows what ranks see",
        )
    if getattr(arguments, "max_restarts", 0):
        raise InputError(
            f"--max-restarts {arguments.max_restarts}, but {launcher} has started this process",
            rule="who starts ranks starts them again",
            do="leave --max-restarts out; give it to torchrun, or let Slurm requeue the job",
        )
    if getattr(arguments, "grace", None) is not None:
        raise InputError(
            f"--grace {arguments.grace}, but {launcher} has started this process",
            rule="who starts ranks ends them when they take too long",
            do=f"leave --grace out; {launcher} has a time of its own for that",
        )


def _share(job: Job, settle: Callable[[int], Plan]) -> Plan:
    from samestep.runtime.tell_once import somebody_told

    if job.rank == 0:
        plan = settle(job.restarts)
        job.store.set(_PLAN, plan.to_text())
        return plan
    while not somebody_told(job.store) and not job.store.check([_PLAN]):
        time.sleep(_NAP_SECONDS)
    if somebody_told(job.store):
        raise PeerLostError("another rank ended before the work began")
    return Plan.from_text(job.store.get(_PLAN).decode())


def _tell(job: Job | None, failure: Failure, run: Path | None) -> int:
    """Tell of a failure if nobody else does, else keep the report in the run; the exit code of what was told."""
    from samestep.runtime.tell_once import tell_once

    is_first, code = True, failure.exit_code
    if job is not None:
        is_first, code = tell_once(job, failure)
    if is_first:
        print(failure.text, file=sys.stderr, flush=True)
    elif run is not None and run.is_dir():
        log = run / "logs" / f"rank-{failure.rank}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(failure.text + "\n")
    return code
