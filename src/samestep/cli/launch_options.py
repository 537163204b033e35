"""Launches of commands: options, restarts, requeueing, and ranks of other launchers.

Under another launcher no process is launched: every process runs the command. Rank 0 alone makes
the plan and sends it through the job's store. The rank that caused a failure reports it, once.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from samestep.cli.commands import PRELOAD
from samestep.cli.options import DeviceOption, count, option, option_conflict, parse_process_count
from samestep.config import Recipe, resolve_mesh
from samestep.distributed.devices import default_processes, parse_devices
from samestep.distributed.env import (
    VISIBLE_DEVICES,
    read_environment,
    read_rank_place,
    read_slurm_job,
    set_environment,
    sharing_variables,
    silence_torch_warnings,
)
from samestep.distributed.launcher_variables import RankPlace
from samestep.distributed.logging import logger
from samestep.distributed.resources import usable_processors
from samestep.errors import EXIT_STOPPED, InputError, PeerLostError, RunError, SamestepError
from samestep.launcher.failure import Failure, RankError
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.restarts import RestartPolicy
from samestep.launcher.watchdog import HANG_AFTER
from samestep.launcher.worker import exit_process
from samestep.number_text import parse_duration, plural

if TYPE_CHECKING:
    from samestep.cli.run_plans import RunPlan
    from samestep.launcher.process_state import Job

_MOST_PER_CORE = 4  # ranks on CPUs without a warning
_POLL_SECONDS = 0.02
_PLAN_KEY = "command/plan"
_joined: list[RankPlace] = []


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(DeviceOption):
    """Ranks and devices of a command."""

    group: ClassVar = "machine (results do not depend on these options)"
    default_size: ClassVar = "1"

    processes: str | None = option(
        "number of ranks, or auto: one per GPU, or one per core without GPUs, at most 8; or "
        "MIN:MAX for fewer ranks after failures (default: auto for train and resume, otherwise 1)",
        "N",
    )
    devices: str | None = option(
        "GPUs of the ranks, as positions among the visible GPUs; one rank per GPU unless "
        "--processes is smaller (default: the first ones)",
        "I,J,...",
    )
    share_gpu: bool = option(
        "let several ranks use one GPU; they communicate through host memory (not with pp)",
        default=False,
    )

    # Options of subclasses; constants of commands without them, so that the methods below need not
    # ask which options a command has.
    devices_per_process: int = 1
    max_restarts: int = 0
    hang_after: float = HANG_AFTER
    grace: float | None = None

    @cached_property
    def rank_place(self) -> RankPlace | None:
        """Rank of this process under another launcher, or None."""
        return read_rank_place()

    @cached_property
    def size(self) -> str:
        """`N`, `auto`, `MIN:MAX` or `MIN:auto`.

        Default: the size of another launcher's job or of `--devices`, if any.
        """
        if self.processes is not None:
            return self.processes
        if self.rank_place is not None:
            return str(self.rank_place.world_size)
        if self.devices:
            return str(self.devices.count(",") + 1)
        return self.default_size

    @cached_property
    def selected_devices(self) -> tuple[str, ...] | None:
        """Entries of CUDA_VISIBLE_DEVICES for the GPUs of `--devices`; None without the option."""
        if self.devices is None:
            return None
        if self.device == "cpu":
            raise option_conflict("--devices with --device cpu")
        return parse_devices(self.devices, read_environment().visible_devices, len(gpu_names()))

    @property
    def environment(self) -> dict[str, str] | None:
        """Environment variables that select the devices; None for all devices, one per rank."""
        if self.share_gpu and self.device == "cpu":
            raise option_conflict("--share-gpu with --device cpu")
        variables = sharing_variables(is_requested=self.share_gpu)
        if self.selected_devices:
            variables[VISIBLE_DEVICES] = ",".join(self.selected_devices)
        return variables or None

    def process_range(self, recipe: Recipe | None = None) -> tuple[int, int]:
        """Return the minimum number of ranks after failures, and the initial number.

        Raises:
            InputError: a number is impossible for the recipe or the devices.
        """
        text, colon, maximum = self.size.partition(":")
        if not colon:
            maximum = text
        if maximum == "auto":
            count = self._auto_processes(recipe)
        else:
            count = parse_process_count(maximum)
        may_share = self.share_gpu or read_environment().sharing is not None
        needed = count * self.devices_per_process
        if self.selected_devices and not may_share and needed > len(self.selected_devices):
            problem = f"--processes {count} with --devices {self.devices}"
            expected = f"{plural(self.devices_per_process, 'GPU')} per rank"
            fix = "more --devices, or --share-gpu"
            raise InputError(problem, expected, fix, code="E_PROCESSES")
        minimum = count
        if colon:
            minimum = parse_process_count(text)
        if recipe is not None:
            # Before ranks start: an impossible number would otherwise fail on each of them.
            for number in (count, minimum):
                resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
        cores = usable_processors()
        if count > _MOST_PER_CORE * cores and not (self.device != "cpu" and gpu_names()):
            text = f"{plural(count, 'process')} share {plural(cores, 'core')}"
            logger.warning("%s: slower than --processes %d", text, cores)
        return minimum, count

    def _auto_processes(self, recipe: Recipe | None) -> int:
        if self.selected_devices is not None:
            available = len(self.selected_devices) // self.devices_per_process
        else:
            gpus = 0 if self.device == "cpu" else len(gpu_names())
            available = default_processes(gpus, self.devices_per_process)
        if recipe is None:
            return available
        # More ranks than microbatches would have nothing to compute.
        strategy = recipe.strategy
        if strategy.name == "device_map":
            available = max(1, available // (strategy.devices or available))
        return min(recipe.microbatch_count * strategy.ranks_per_model, available)

    def launch(
        self, function: str, *arguments: Any, processes: int, config: LaunchConfig
    ) -> LaunchResult:
        """Run a function of `samestep.recipes.run` in `processes` ranks."""
        return run_workers(
            ByName("samestep.recipes.run", function),
            *arguments,
            processes=processes,
            launch_config=config,
            preload=PRELOAD,
            environment=self.environment,
        )


@dataclass(frozen=True, kw_only=True)
class FaultOptions(LaunchOptions):
    """Reaction to failures and to requests to stop."""

    group: ClassVar = "faults (results do not depend on these options)"

    max_restarts: int = option(
        "restarts from the newest complete checkpoint after ranks failed (default 0)",
        "K",
        default=0,
        type=count,
    )
    hang_after: float = option(
        "end the run, with the stacks of all ranks, after this time without progress, such as 90s "
        "or 10m (default 10m)",
        "TIME",
        default=HANG_AFTER,
        type=partial(parse_duration, "--hang-after"),
    )
    grace: float | None = option(
        "limit of step and checkpoint after a request to stop (Ctrl-C, SIGTERM, SIGUSR1, closed "
        "terminal); afterwards ranks are killed (default: no limit)",
        "TIME",
        type=partial(parse_duration, "--grace"),
    )

    def launch_with_restarts(
        self,
        process_range: tuple[int, int],
        attempt: Callable[[int, LaunchConfig], LaunchResult],
        *,
        log_dir: Path,
        first_step: int = 0,
        newest_step: Callable[[], int] | None = None,
    ) -> LaunchResult:
        """Launch ranks, restart them after failures, and return the result of the last attempt.

        `attempt` launches a number of ranks, after a failure from the newest complete checkpoint,
        that of `newest_step`; the first one begins after `first_step`.

        Raises:
            RankError: a rank failed, and no restart is left or useful.
        """
        restarts = RestartPolicy(self.max_restarts, *process_range)
        start_step = first_step
        while True:
            config = LaunchConfig(self.hang_after, self.grace, log_dir=log_dir)
            try:
                return attempt(restarts.processes, config)
            except RankError as error:
                # A failure without progress since the last start would repeat itself.
                message = restarts.restart(error, start_step + error.steps)
                if message is None:
                    raise
            if newest_step is not None:
                start_step = newest_step()
                message = f"{message}; resuming after step {start_step}"
            logger.warning(message)


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs in torch's order."""
    # A fork of the fork server reads the names: this process does not import torch.
    names: list[str] = call_in_worker("samestep.distributed.devices", "gpu_names")
    return names


def call_in_worker(module: str, function: str, *arguments: Any) -> Any:
    """Return the result of a function that needs torch, computed in one worker process."""
    call = ByName(module, function)
    config = LaunchConfig(HANG_AFTER)
    result = run_workers(call, *arguments, processes=1, launch_config=config, preload=PRELOAD)
    return result.value


# --- Slurm ---


def slurm_restarts(requeue: bool) -> int:
    """Return how often Slurm has restarted this job; 0 without a job.

    Raises:
        InputError: a job is to be requeued, and there is none.
    """
    job = read_slurm_job()
    if job is not None:
        return job.restarts
    if requeue:
        problem = "--requeue, but SLURM_JOB_ID is not set"
        raise InputError(problem, "a Slurm job", "leave --requeue out", code="E_JOB")
    return 0


def requeue_after(stop_signal: int | None) -> None:
    """Requeue the Slurm job if SIGUSR1 stopped the run; a refusal by Slurm is a `RunError`."""
    job = read_slurm_job()
    if stop_signal != signal.SIGUSR1 or job is None:
        return
    command = ["scontrol", "requeue", job.id]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        expected = "a batch job that scontrol can requeue (sbatch --requeue)"
        fix = "submit the job again, or `samestep resume`: the checkpoint is complete"
        problem = f"job {job.id} was not requeued: {str(reason).strip()}"
        raise RunError(problem, expected, fix, code="E_JOB") from error
    logger.info("job %s is requeued", job.id)


# --- ranks of other launchers ---


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
        rank_place = read_rank_place()
        if rank_place is not None and rank_place.rank != 0:
            raise ReportedError(error.exit_code) from error
        raise


def run_as_rank(
    options: LaunchOptions,
    function: str,
    make_plan: Callable[[int], RunPlan],
    rank_arguments: Callable[[RunPlan], tuple[Any, ...]],
) -> tuple[RunPlan, Any]:
    """Run a function of `samestep.recipes.run` as one rank; return the plan and the result.

    `make_plan` receives the number of restarts of the job, and runs on rank 0 alone.

    Raises:
        ReportedError: a rank failed, and the failure has been reported.
    """
    rank_place = options.rank_place
    assert rank_place is not None
    _joined.append(rank_place)
    silence_torch_warnings()  # before torch is imported
    from samestep.launcher.process_state import process_state
    from samestep.launcher.rendezvous import join_job, report_failure

    plan = None
    try:
        job = join_job(rank_place, hang_after=options.hang_after)
        # After the ranks have joined: of the errors of all ranks, one is reported.
        _require_compatible(options, rank_place)
        set_environment(options.environment or {})  # which raises errors that one rank reports
        plan = _share_plan(job, make_plan)
        resolve_mesh(plan.recipe.strategy, job.size, plan.recipe.microbatch_count)
        value = getattr(import_module("samestep.recipes.run"), function)(*rank_arguments(plan))
    except KeyboardInterrupt:
        raise ReportedError(EXIT_STOPPED) from None
    except BaseException as error:  # boundary: among all ranks, one reports one failure
        failure = Failure.of_exception(rank_place.rank, error)
        log_dir = None
        if plan is not None and plan.folder.is_dir():
            log_dir = plan.folder / "logs"
        is_first = True
        code = failure.exit_code
        if process_state.job is not None:
            is_first, code = report_failure(process_state.job, failure)
        if is_first:
            print(failure.reported(log_dir).text, file=sys.stderr, flush=True)
        else:
            failure.append_to_log(log_dir)
        raise ReportedError(code) from error
    return plan, value


def _require_compatible(options: LaunchOptions, rank_place: RankPlace) -> None:
    launcher = rank_place.launcher
    size = rank_place.world_size
    values = {
        "devices": options.devices,
        "max-restarts": options.max_restarts,
        "grace": options.grace,
    }
    if options.size != str(size):
        values["processes"] = options.size
    for name, value in values.items():
        if value:
            raise InputError(
                f"--{name} {value}, but {launcher} has started {size} processes",
                expected=f"this setting in the configuration of {launcher}",
                fix=f"leave --{name} out",
                code="E_LAUNCH",
            )


def _share_plan(job: Job, make_plan: Callable[[int], RunPlan]) -> RunPlan:
    from samestep.cli.run_plans import RunPlan
    from samestep.launcher.rendezvous import failure_reported

    if job.rank == 0:
        plan = make_plan(job.restarts)
        job.store.set(_PLAN_KEY, plan.to_json())
        return plan
    # Not `store.get` alone: after a failure of rank 0 it would wait for its time limit.
    while not failure_reported(job.store) and not job.store.check([_PLAN_KEY]):
        time.sleep(_POLL_SECONDS)
    if failure_reported(job.store):
        raise PeerLostError("another rank ended before the work began")
    return RunPlan.from_json(job.store.get(_PLAN_KEY).decode())


def exit_if_rank(code: int) -> None:
    """Exit immediately if this process was a rank of another launcher's job.

    Python's own shutdown is skipped, as in ranks that `multiprocessing` forks: threads of torch and
    of Samestep that wait in C++ for other ranks or for the store can abort the process during
    shutdown.
    """
    if _joined:
        atexit._run_exitfuncs()
        exit_process(code)
