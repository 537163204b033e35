"""`samestep run`: user scripts on any number of processes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from samestep.cli.launch_options import FaultOptions
from samestep.cli.options import (
    argument,
    integer,
    option,
    option_conflict,
    output_folder,
    require_file,
    timed_name,
)
from samestep.config import StrategyConfig
from samestep.errors import EXIT_DONE, EXIT_STOPPED
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName
from samestep.script.mode import Mode, mode_of


@dataclass(frozen=True, kw_only=True)
class Options(FaultOptions):
    """Run a script on several processes of this machine.

    The script takes itself for the only process: it sees one device, whole batches, and no
    launcher. Calls of its models are divided. A script that imports samestep runs with what it asks
    for. The output of ranks other than 0 is written to files.
    """

    example: ClassVar = "samestep run --processes 2 --explain train.py --epochs 3"

    processes: str = option(
        "number of ranks; auto: one per GPU, or one per core without GPUs, at most 8; or MIN:MAX (default auto)",
        "N",
        default="auto",
    )
    runs: Path = option("folder of runs (default runs)", "DIR", default=Path("runs"))
    own_group: bool = option(
        "set torchrun's variables, for a script that creates its own process group", default=False
    )
    exact: bool = option("the same bits on every number of processes up to 8", default=False)
    strategy: Literal["ddp", "fsdp"] = option(
        "fsdp: each rank keeps a part of the parameters, gradients and optimizer state (default ddp: all of them)",
        default="ddp",
    )
    devices_per_process: int = option(
        "GPUs of each process, for a script that places parts of its model on several (default 1)",
        "K",
        default=1,
        type=integer,
    )
    explain: bool = option(
        "add the decision about each line that calls a model to the summary at the end; RUN/summary.json has both "
        "during the run, too",
        default=False,
    )
    module: bool = option(
        "SCRIPT is the name of a module, as of python -m", default=False, flag="-m"
    )
    script: Path = argument("SCRIPT", "a Python file")
    arguments: Sequence[str] = argument("...", "arguments of the script", nargs=argparse.REMAINDER)

    @property
    def strategy_config(self) -> StrategyConfig:
        """Strategy of the divided calls."""
        if self.devices_per_process == 1:
            return StrategyConfig(name=self.strategy)
        if self.strategy != "ddp":
            raise option_conflict(f"--devices-per-process with --strategy {self.strategy}")
        return StrategyConfig(name="device_map", devices=self.devices_per_process)


def run(options: Options) -> int:
    """Run the script; return its exit code if every rank succeeded, 130 after a request to stop."""
    if not options.module:
        require_file(options.script)
    mode = mode_of(options.script, is_module=options.module, own_group=options.own_group)
    stem = options.script.name if options.module else options.script.stem
    folder = options.runs / timed_name(options.runs, stem)
    log_dir = folder / "logs"
    strategy = options.strategy_config
    if mode is not Mode.UNCHANGED:
        _require_no_options_of_calls(options, mode)
    processes = options.process_range()
    function = ByName("samestep.script.unchanged", "run")
    call = partial(
        function,
        options.script,
        tuple(options.arguments),
        is_module=options.module,
        mode=mode,
        reduction="exact" if options.exact else "fast",
        strategy=strategy,
        explains=options.explain,
        folder=folder.resolve() if processes[1] > 1 else None,
    )
    starts = itertools.count()

    def attempt(count: int, config: LaunchConfig) -> LaunchResult:
        restarts = (next(starts), options.max_restarts)
        return run_workers(
            call, *restarts, processes=count, launch_config=config, environment=options.environment
        )

    # Rank 0 writes to the terminal.
    with output_folder(log_dir, stem, "--runs") if processes[1] > 1 else nullcontext():
        result = options.launch_with_restarts(processes, attempt, log_dir=log_dir)
    if result.stop_signal is not None or result.is_stopped:
        return EXIT_STOPPED
    return int(result.value or EXIT_DONE)


def _require_no_options_of_calls(options: Options, mode: Mode) -> None:
    """Require that options of divided calls are absent: a script of another mode would ignore them.

    Raises:
        InputError: one is given.
    """
    options_of_calls = {
        "--exact": options.exact,
        "--strategy": options.strategy != "ddp",
        "--devices-per-process": options.devices_per_process > 1,
        "--explain": options.explain,
    }
    for name in filter(options_of_calls.__getitem__, options_of_calls):
        fix = "reduction and strategy of samestep.parallel in the script"
        if mode is Mode.OWN_GROUP:
            fix = f"leave {name} out"
        raise option_conflict(f"{name} with {options.script}: {mode}", fix)
