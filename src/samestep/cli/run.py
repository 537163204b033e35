"""`samestep run`: user scripts on any number of processes."""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from samestep.distributed.standard_streams import report_line
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName
from samestep.script.mode import Mode, mode_of


@dataclass(frozen=True, kw_only=True)
class Run(FaultOptions):
    """Run a script on several processes of this machine.

    The script takes itself for the only process: it sees one device, whole batches, and no
    launcher. Calls of its models are divided. A script that imports samestep runs with what it asks
    for. The output of ranks other than 0 is written to files.
    """

    example: ClassVar = "samestep run --processes 2 --explain train.py --epochs 3"

    processes: str = option(
        "number of ranks; auto: one per GPU, or one per core without GPUs, at most 8; or MIN:MAX",
        "N",
        default="auto",
    )
    runs: Path = option("folder of runs", "DIR", default=Path("runs"))
    own_group: bool = option(
        "set torchrun's variables, for a script that creates its own process group", default=False
    )
    exact: bool = option("the same bits on every number of processes up to 8", default=False)
    strategy: Literal["ddp", "fsdp"] = option(
        "fsdp: each rank keeps a part of the parameters, gradients and optimizer state (default "
        "ddp: all of them)",
        default="ddp",
    )
    devices_per_process: int = option(
        "GPUs of each process, for a script that places parts of its model on several",
        "K",
        default=1,
        type=integer,
    )
    explain: bool = option(
        "add the decision about each line that calls a model to the summary at the end",
        default=False,
    )
    module: bool = option(
        "SCRIPT is the name of a module, as of python -m", default=False, flag="-m"
    )
    script: Path = argument("SCRIPT", "a Python file")
    arguments: Sequence[str] = argument("...", "arguments of the script", nargs=argparse.REMAINDER)

    def run(self) -> int:
        """Run the script; return its exit code, or 130 after a request to stop."""
        if not self.module:
            require_file(self.script)
            _require_syntax(self.script)
        # Before anything starts, from the source: the mode decides which options have a meaning.
        mode = mode_of(self.script, is_module=self.module, own_group=self.own_group)
        stem = self.script.name if self.module else self.script.stem
        log_dir = self.runs / timed_name(self.runs, stem) / "logs"
        strategy = self._strategy()
        if mode is not Mode.UNCHANGED:
            self._require_no_options_of_calls(mode)
        processes = self.process_range()
        # A single process needs no folder: there are no other ranks with logs.
        output: AbstractContextManager[Any] = nullcontext()
        options: dict[str, Any] = {"is_module": self.module, "mode": mode, "strategy": strategy}
        options |= {"explains": self.explain, "reduction": "fast"}
        if self.exact:
            options["reduction"] = "exact"
        if processes[1] > 1:
            output = output_folder(log_dir, stem, "--runs")
        function = ByName("samestep.script.unchanged", "run")
        call = partial(function, self.script, tuple(self.arguments), **options)
        starts = itertools.count()

        def attempt(count: int, config: LaunchConfig) -> LaunchResult:
            return run_workers(
                call,
                next(starts),
                self.max_restarts,
                processes=count,
                launch_config=config,
                environment=self.environment,
            )

        with output:
            result = self.launch_with_restarts(processes, attempt, log_dir=log_dir)
        if result.stop_signal is not None or result.is_stopped:
            report_line(f"samestep: stopped on request; files that {self.script} has saved stay")
            return EXIT_STOPPED
        return int(result.value or EXIT_DONE)

    def _strategy(self) -> StrategyConfig:
        if self.devices_per_process == 1:
            return StrategyConfig(name=self.strategy)
        if self.strategy != "ddp":
            raise option_conflict(f"--devices-per-process with --strategy {self.strategy}")
        return StrategyConfig(name="device_map", devices=self.devices_per_process)

    def _require_no_options_of_calls(self, mode: Mode) -> None:
        options_of_calls = {
            "--exact": self.exact,
            "--strategy": self.strategy != "ddp",
            "--devices-per-process": self.devices_per_process > 1,
            "--explain": self.explain,
        }
        for name in filter(options_of_calls.__getitem__, options_of_calls):
            fix = "reduction and strategy of samestep.parallel in the script"
            if mode is Mode.OWN_GROUP:
                fix = f"leave {name} out"
            raise option_conflict(f"{name} with {self.script}: {mode}", fix)


def _require_syntax(script: Path) -> None:
    """Compile a script, before processes start."""
    try:
        with warnings.catch_warnings(action="ignore"):  # shown when the script runs
            # As bytes, since a script can declare an encoding; without the `__future__` imports of
            # this file.
            compile(script.read_bytes(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # the second for null bytes, in Python 3.11
        value = f"{script}: {error}"
        if isinstance(error, SyntaxError):
            line = (error.text or "").strip()
            value = f"{script}, line {error.lineno}: {error.msg}: {line}"
        raise InputError(
            value,
            expected="a file with Python code",
            fix="correct the syntax of the line, or of the one before",
            code="E_UNREADABLE",
        ) from None
