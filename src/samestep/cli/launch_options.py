"""Options of launches: number of ranks, devices, restarts, requeueing; and launches with these options."""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from samestep.cli.commands import PRELOAD
from samestep.cli.options import option_conflict, options_of
from samestep.config import DeviceKind, Recipe, resolve_mesh
from samestep.distributed.devices import select_devices
from samestep.distributed.env import SHARE_GPU, read_environment, read_rendezvous, read_slurm_job
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.logging import logger
from samestep.distributed.resources import read_processors
from samestep.errors import InputError, RunError
from samestep.launcher.failure import RankError
from samestep.launcher.launch import LaunchConfig, LaunchResult, launch, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.restarts import RestartPolicy
from samestep.launcher.watchdog import HANG_AFTER
from samestep.units import parse_duration


def add_fault_options(parser: argparse.ArgumentParser, *, requeue: bool = False) -> None:
    """Add `--max-restarts`, `--hang-after`, `--grace`, and `--requeue` on request."""
    group = parser.add_argument_group("faults (results do not depend on these options)")
    text = "restart up to K times from the newest complete checkpoint after ranks failed (default 0)"
    group.add_argument("--max-restarts", type=int, default=0, metavar="K", help=text)
    group.add_argument(
        "--hang-after",
        type=partial(parse_duration, "--hang-after"),
        default=f"{HANG_AFTER:g}s",
        metavar="TIME",
        help="end the run, with the stacks of all ranks, after this time without progress, such as 90s or 10m "
        "(default 10m)",
    )
    group.add_argument(
        "--grace",
        type=partial(parse_duration, "--grace"),
        metavar="TIME",
        help="limit of step and checkpoint after a request to stop (Ctrl-C, SIGTERM, SIGUSR1, closed terminal); "
        "afterwards ranks are killed (default: no limit)",
    )
    if requeue:
        group.add_argument(
            "--requeue",
            action="store_true",
            help="under Slurm: after a stop by SIGUSR1 (sbatch --signal) and the checkpoint, requeue the job, which "
            "continues the run of the same --name",
        )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options that decide how the ranks of a command start."""

    processes: str  # `N`, `auto`, `MIN:MAX` or `MIN:auto`
    devices: str | None = None
    share_gpu: bool = False
    device: DeviceKind = "auto"
    max_restarts: int = 0
    hang_after: float = HANG_AFTER  # seconds without progress after which ranks count as hung
    grace: float | None = None  # seconds between a request to stop and the kill; None for no limit
    requeue: bool = False
    rendezvous: Rendezvous | None = None  # rank of this process under another launcher, or None

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> LaunchOptions:
        """Return the options among the arguments of a command.

        `processes` defaults to the size of another launcher's job, the number of `--devices`, or 1.

        Raises:
            InputError: an option or the launcher's variables are invalid.
        """
        rendezvous, processes = read_rendezvous(), arguments.processes
        if processes is None:
            count = arguments.devices.count(",") + 1 if arguments.devices else 1
            processes = str(rendezvous.world_size if rendezvous is not None else count)
        return options_of(cls, arguments, processes=processes, rendezvous=rendezvous)

    @cached_property
    def selected_devices(self) -> tuple[str, ...] | None:
        """Entries of CUDA_VISIBLE_DEVICES for the GPUs of `--devices`; None without the option.

        Raises:
            InputError: a device does not exist, or `--device` is cpu.
        """
        if self.devices is None:
            return None
        if self.device == "cpu":
            raise option_conflict(f"--devices {self.devices} with --device cpu", "--devices selects GPUs")
        return select_devices(self.devices, read_environment().visible_devices, len(gpu_names()))

    @property
    def environment(self) -> dict[str, str] | None:
        """Environment variables that select the devices; None without `--devices` and `--share-gpu`."""
        if self.share_gpu and self.device == "cpu":
            raise option_conflict("--share-gpu with --device cpu", "ranks on a CPU share the cores without an option")
        variables = {SHARE_GPU: "1"} if self.share_gpu else {}
        if self.selected_devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.selected_devices)
        return variables or None

    def process_range(self, recipe: Recipe | None = None) -> tuple[int, int]:
        """Return the minimum number of ranks after failures, and the initial number of ranks.

        Raises:
            InputError: `processes` is invalid, there are fewer devices than ranks, or the recipe's strategy has no mesh
                of this size.
        """
        text, colon, maximum = self.processes.partition(":")
        maximum = maximum if colon else text
        count = self._auto_processes(recipe) if maximum == "auto" else parse_process_count(maximum)
        if self.selected_devices is not None and count > len(self.selected_devices) and not self.share_gpu:
            raise InputError(
                f"--processes {self.processes} with {len(self.selected_devices)} devices",
                expected="one GPU per rank",
                fix="leave --processes out for one rank per device, name more devices, or add --share-gpu",
                code="E_PROCESSES",
            )
        minimum = parse_process_count(text) if colon else count
        if recipe is not None:
            for number in (count, minimum):
                resolve_mesh(recipe.strategy, number, recipe.microbatch_count, recipe.batch_size)
        return minimum, count

    def _auto_processes(self, recipe: Recipe | None) -> int:
        if self.selected_devices is not None:
            available = len(self.selected_devices)
        else:
            available = (len(gpu_names()) if self.device != "cpu" else 0) or read_processors().usable
        if recipe is None:
            return available
        strategy = recipe.strategy
        if strategy.name == "dp":
            return 1
        if strategy.name == "device_map":
            available = max(1, available // (strategy.devices or available))
        return min(recipe.microbatch_count * strategy.ranks_per_model, available)


def parse_process_count(text: str, others: str = ", auto, or MIN:MAX") -> int:
    """Return a number of processes; text that is not a positive integer is an `InputError`.

    Args:
        text: the text.
        others: other texts that the command accepts, for the error.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InputError(f"--processes {text}", f"a positive number{others}", "--processes 2", code="E_PROCESSES")
    return int(text)


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs in torch's order."""
    # A fork of the fork server reads the names: this process does not import torch.
    names: list[str] = launch(ByName("samestep.distributed.devices", "gpu_names"), processes=1, preload=PRELOAD)
    return names


def call_in_worker(module: str, function: str, *arguments: Any) -> Any:
    """Return the result of a function that needs torch, computed in one worker process."""
    config = LaunchConfig(HANG_AFTER)
    return run_workers(ByName(module, function), *arguments, processes=1, launch_config=config, preload=PRELOAD).value


def launch_ranks(
    function: str,
    *arguments: Any,
    processes: int,
    launch_config: LaunchConfig,
    options: LaunchOptions,
) -> LaunchResult:
    """Run a function of `samestep.recipes.run` in `processes` ranks."""
    return run_workers(
        ByName("samestep.recipes.run", function),
        *arguments,
        processes=processes,
        launch_config=launch_config,
        preload=PRELOAD,
        environment=options.environment,
    )


def launch_with_restarts(
    options: LaunchOptions,
    process_range: tuple[int, int],
    attempt: Callable[[int, LaunchConfig], LaunchResult],
    *,
    log_dir: Path,
    first_step: int = 0,
    newest_step: Callable[[], int] | None = None,
) -> LaunchResult:
    """Launch ranks, restart them after failures, and return the result of the successful attempt.

    Args:
        options: options of the launch.
        process_range: minimum number of ranks after failures, and initial number.
        attempt: launches a number of ranks; after a failure, from the newest complete checkpoint.
        log_dir: folder of the ranks' output.
        first_step: optimizer steps done before the first attempt.
        newest_step: returns the optimizer steps of the newest complete checkpoint, if known.

    Raises:
        RankError: a rank failed, and no restart is left or useful.
    """
    restarts = RestartPolicy(options.max_restarts, *process_range)
    start_step = first_step
    while True:
        launch_config = LaunchConfig(
            options.hang_after, options.grace, stop_at_checkpoint=restarts.is_short, log_dir=log_dir
        )
        try:
            result = attempt(restarts.processes, launch_config)
        except RankError as error:
            message = restarts.restart(error, start_step + error.steps)
            if message is None:
                raise
        else:
            is_stopped = isinstance(result.value, dict) and bool(result.value.get("stopped"))
            if result.stop_signal is not None or not launch_config.stop_at_checkpoint or not is_stopped:
                return result
            message = restarts.grow()
        if newest_step is not None:
            start_step = newest_step()
            message = f"{message}; resuming after step {start_step}"
        logger.warning(message)


def slurm_restarts(requeue: bool) -> int:
    """Return how often Slurm has restarted this job; without a job 0, and an `InputError` for `--requeue`."""
    job = read_slurm_job()
    if requeue and job is None:
        value = "--requeue, but SLURM_JOB_ID is not set"
        raise InputError(value, expected="a Slurm job", fix="leave --requeue out", code="E_REQUEUE")
    return job.restarts if job is not None else 0


def requeue_after(stop_signal: int | None) -> None:
    """Requeue the Slurm job if SIGUSR1 stopped the run; a refusal by Slurm is a `RunError`."""
    job = read_slurm_job()
    if stop_signal != signal.SIGUSR1 or job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", job.id], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise RunError(
            f"job {job.id} was not requeued: {str(reason).strip()}",
            expected="a batch job that scontrol can requeue (sbatch --requeue)",
            fix="submit the job again: the checkpoint is complete, and `samestep resume` continues the run",
            code="E_REQUEUE",
        ) from error
    logger.info("job %s is requeued", job.id)
