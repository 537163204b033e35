"""Options of launches: number of ranks, devices, restarts, requeueing; and launches with these options."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from samestep.cli.commands import PRELOAD
from samestep.cli.options import DeviceOption, count, option, option_conflict
from samestep.config import Recipe, resolve_mesh
from samestep.distributed.devices import select_devices
from samestep.distributed.env import (
    read_environment,
    read_rendezvous,
    read_slurm_job,
    sharing_variables,
)
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.logging import logger
from samestep.distributed.resources import usable_processors
from samestep.errors import InputError, RunError
from samestep.launcher.failure import RankError, RestartPolicy
from samestep.launcher.launch import LaunchConfig, LaunchResult, launch, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.watchdog import HANG_AFTER
from samestep.units import parse_duration, plural

_MOST_ON_CORES = 8  # ranks of `auto` on a machine without GPUs


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(DeviceOption):
    """Ranks and devices of a command."""

    group: ClassVar = "machine (results do not depend on these options)"
    default_size: ClassVar = "1"

    processes: str | None = option(
        "number of ranks, or auto: one per GPU, or one per core without GPUs, at most 8; or MIN:MAX for fewer ranks "
        "after failures (default: auto for train and resume, otherwise 1)",
        "N",
    )
    devices: str | None = option(
        "GPUs of the ranks, as positions among the visible GPUs; one rank per GPU unless --processes is smaller "
        "(default: the first ones)",
        "I,J,...",
    )
    share_gpu: bool = option(
        "let several ranks use one GPU; they communicate through host memory (not with pp)",
        default=False,
    )

    # Options of subclasses; constants of commands without them.
    devices_per_process: int = 1
    max_restarts: int = 0
    hang_after: float = HANG_AFTER
    grace: float | None = None

    @cached_property
    def rendezvous(self) -> Rendezvous | None:
        """Rank of this process under another launcher, or None."""
        return read_rendezvous()

    @cached_property
    def size(self) -> str:
        """`N`, `auto`, `MIN:MAX` or `MIN:auto`; default: size of another launcher's job or of `--devices`, if any."""
        if self.processes is not None:
            return self.processes
        if self.rendezvous is not None:
            return str(self.rendezvous.world_size)
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
        return select_devices(self.devices, read_environment().visible_devices, len(gpu_names()))

    @property
    def environment(self) -> dict[str, str] | None:
        """Environment variables that select the devices; None without `--devices` and `--share-gpu`."""
        if self.share_gpu and self.device == "cpu":
            raise option_conflict("--share-gpu with --device cpu")
        variables = sharing_variables(is_requested=self.share_gpu)
        if self.selected_devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.selected_devices)
        return variables or None

    def process_range(self, recipe: Recipe | None = None) -> tuple[int, int]:
        """Return the minimum number of ranks after failures, and the initial number, both possible for the recipe."""
        text, colon, maximum = self.size.partition(":")
        maximum = maximum if colon else text
        count = self._auto_processes(recipe) if maximum == "auto" else parse_process_count(maximum)
        has_enough = count * self.devices_per_process <= len(self.selected_devices or ())
        may_share = self.share_gpu or read_environment().sharing is not None
        if self.selected_devices and not may_share and not has_enough:
            problem = f"--processes {count} with --devices {self.devices}"
            expected = f"{plural(self.devices_per_process, 'GPU')} per rank"
            raise InputError(
                problem, expected, "more --devices, or --share-gpu", code="E_PROCESSES"
            )
        minimum = parse_process_count(text) if colon else count
        if recipe is not None:
            for number in (count, minimum):
                resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
        return minimum, count

    def _auto_processes(self, recipe: Recipe | None) -> int:
        if self.selected_devices is not None:
            available = len(self.selected_devices) // self.devices_per_process
        else:
            gpus = len(gpu_names()) if self.device != "cpu" else 0
            available = min(usable_processors(), _MOST_ON_CORES)
            if gpus:
                available = max(1, gpus // self.devices_per_process)
        if recipe is None:
            return available
        strategy = recipe.strategy
        if strategy.name == "device_map":
            available = max(1, available // (strategy.devices or available))
        return min(recipe.microbatch_count * strategy.ranks_per_model, available)

    def launch(
        self, function: str, *arguments: Any, processes: int, config: LaunchConfig
    ) -> LaunchResult:
        """Run a function of `samestep.recipes.run` in `processes` ranks."""
        call = partial(
            run_workers, ByName("samestep.recipes.run", function), *arguments, processes=processes
        )
        return call(launch_config=config, preload=PRELOAD, environment=self.environment)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(LaunchOptions):
    """Ranks, devices and loader processes of a command with a recipe."""

    group: ClassVar = "loader (results do not depend on these options)"

    workers: int | None = option(
        "loader processes per rank (default: depends on the cores)", "N", type=count
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
        "end the run, with the stacks of all ranks, after this time without progress, such as 90s or 10m (default 10m)",
        "TIME",
        default=HANG_AFTER,
        type=partial(parse_duration, "--hang-after"),
    )
    grace: float | None = option(
        "limit of step and checkpoint after a request to stop (Ctrl-C, SIGTERM, SIGUSR1, closed terminal); afterwards "
        "ranks are killed (default: no limit)",
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
        """Launch ranks, restart them after failures, and return the result of the successful attempt.

        `attempt` launches a number of ranks, after a failure from the newest complete checkpoint,
        that of `newest_step`; the first one begins after `first_step`.

        Raises:
            RankError: a rank failed, and no restart is left or useful.
        """
        restarts = RestartPolicy(self.max_restarts, *process_range)
        start_step = first_step
        while True:
            config = LaunchConfig(
                self.hang_after, self.grace, stop_at_checkpoint=restarts.is_short, log_dir=log_dir
            )
            try:
                result = attempt(restarts.processes, config)
            except RankError as error:
                message = restarts.restart(error, start_step + error.steps)
                if message is None:
                    raise
            else:
                is_stopped = result.is_stopped
                if isinstance(result.value, dict):
                    is_stopped = bool(result.value.get("stopped"))
                if (
                    result.stop_signal is not None
                    or not config.stop_at_checkpoint
                    or not is_stopped
                ):
                    return result
                message = restarts.grow()
            if newest_step is not None:
                start_step = newest_step()
                message = f"{message}; resuming after step {start_step}"
            logger.warning(message)


def parse_process_count(text: str) -> int:
    """Return a number of processes; text that is not a positive integer is an `InputError`."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(
            f"--processes {text}", "a number as in --help", "--processes 2", code="E_PROCESSES"
        )
    return int(text)


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs in torch's order."""
    # A fork of the fork server reads the names: this process does not import torch.
    names: list[str] = launch(
        ByName("samestep.distributed.devices", "gpu_names"), processes=1, preload=PRELOAD
    )
    return names


def call_in_worker(module: str, function: str, *arguments: Any) -> Any:
    """Return the result of a function that needs torch, computed in one worker process."""
    config = LaunchConfig(HANG_AFTER)
    return run_workers(
        ByName(module, function), *arguments, processes=1, launch_config=config, preload=PRELOAD
    ).value


def slurm_restarts(requeue: bool) -> int:
    """Return how often Slurm has restarted this job; without a job 0, and an `InputError` for `--requeue`."""
    job = read_slurm_job()
    if requeue and job is None:
        problem = "--requeue, but SLURM_JOB_ID is not set"
        raise InputError(problem, "a Slurm job", "leave --requeue out", code="E_JOB")
    if job is not None:
        return job.restarts
    return 0


def requeue_after(stop_signal: int | None) -> None:
    """Requeue the Slurm job if SIGUSR1 stopped the run; a refusal by Slurm is a `RunError`."""
    job = read_slurm_job()
    if stop_signal != signal.SIGUSR1 or job is None:
        return
    try:
        subprocess.run(
            ["scontrol", "requeue", job.id], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        expected = "a batch job that scontrol can requeue (sbatch --requeue)"
        fix = "submit the job again, or `samestep resume`: the checkpoint is complete"
        problem = f"job {job.id} was not requeued: {str(reason).strip()}"
        raise RunError(problem, expected, fix, code="E_JOB") from error
    logger.info("job %s is requeued", job.id)
