"""`samestep run`: user scripts on any number of processes; `samestep submit`: the file of a job."""

from __future__ import annotations

import argparse
import itertools
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from samestep.cli.launch import FaultOptions
from samestep.cli.options import (
    JsonOption,
    SubjectOptions,
    argument,
    count,
    integer,
    option,
    option_conflict,
    options_of,
    output_errors,
    output_folder,
    parse_process_count,
    require_file,
    timed_name,
)
from samestep.config import StrategyConfig, resolve_mesh
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError, RunError
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName
from samestep.script.mode import Mode, mode_of
from samestep.tools.submit import Job, Submission, kubernetes_submission, slurm_submission

# Options of one system.
_SYSTEMS = {"time": "slurm", "image": "kubernetes", "volume": "kubernetes"}


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
        "add the decision about each line that calls a model to the summary at the end; "
        "RUN/summary.json has both during the run, too",
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
        # Before anything starts, from the source: the mode decides which options have a meaning.
        mode = mode_of(self.script, is_module=self.module, own_group=self.own_group)
        stem = self.script.name if self.module else self.script.stem
        folder = self.runs / timed_name(self.runs, stem)
        log_dir = folder / "logs"
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
            options["folder"] = folder.resolve()
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


@dataclass(frozen=True, kw_only=True)
class _System:
    system: Literal["slurm", "kubernetes"] = argument("SYSTEM", "slurm or kubernetes")


@dataclass(frozen=True, kw_only=True)
class Submit(JsonOption, SubjectOptions, _System):
    """Write the file of a job on several machines, and submit it with the command of the system.

    A restarted job continues its run.
    """

    example: ClassVar = "samestep submit slurm digits --nodes 2 --gpus 4 --dry-run"
    group: ClassVar = "job (results do not depend on these options)"

    nodes: int = option("machines, at most", "N", required=True)
    gpus: int = option("GPUs of each machine; 0 for ranks on CPUs", "G", type=count, required=True)
    processes: str | None = option(
        "number of ranks, or MIN:MAX for a job that continues on fewer (default: one per GPU; one "
        "per machine without GPUs)",
        "N",
    )
    time: str | None = option("limit of the time, as for sbatch (slurm)", "LIMIT")
    image: str | None = option("container image with Samestep (kubernetes)", "IMAGE")
    volume: str | None = option("persistent volume claim of the runs (kubernetes)", "NAME")
    name: str | None = option(
        "name of the job and of the run (default: recipe, date and time)", "NAME"
    )
    runs: Path = option("folder of runs", "DIR", default=Path("runs"))
    dry_run: bool = option("print file and command; write and submit nothing", default=False)

    def run(self) -> int:
        """Print or submit the job."""
        for name, system in _SYSTEMS.items():
            if getattr(self, name) is not None and self.system != system:
                raise option_conflict(f"--{name} with {self.system}", f"leave --{name} out")
        write = slurm_submission if self.system == "slurm" else kubernetes_submission
        job = write(self._job())
        output = ""
        text = f"# {job.file}\n{job.text}\n# command\n{shlex.join(job.command)}"
        if not self.dry_run:
            output = _submit(job)
            text = output.rstrip()
        files = {job.file: job.text}
        data = {"command": job.command, "submitted": not self.dry_run, "output": output}
        self.result({"files": files, **data}, text)
        return EXIT_DONE

    def _job(self) -> Job:
        # Imported here: they import pydantic, which `samestep run` does not need.
        from samestep.cli.run_plans import load_resolved
        from samestep.recipes.recipe_files import shipped_recipes

        script = self.script()
        path = Path(self.recipe)
        ranks = self.processes or str(self.nodes * max(1, self.gpus))
        counts = [parse_process_count(text) for text in ranks.split(":", 1)]
        parameters = self.script_arguments
        if script is None:
            parameters = self.overrides
            recipe = load_resolved(self.recipe, self.overrides, self.note)
            for number in counts:
                resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
        return options_of(
            Job,
            self,
            subject=self.recipe,
            text=shipped_recipes().get(self.recipe, path).read_text(encoding="utf-8"),
            parameters=tuple(parameters),
            name=self.name or timed_name(self.runs, path.stem),
            minimum=counts[0],
            maximum=counts[-1],
            runs=str(self.runs.absolute()),
            folder=str(Path.cwd()),
            python=sys.executable,
        )


def _submit(submission: Submission) -> str:
    path = Path(submission.file)
    command = shlex.join(submission.command)
    fix = "another --name, or another current folder"
    with output_errors(f"{path} cannot be written", "a writable folder", fix):
        if path.exists() and path.read_bytes() != submission.text.encode():
            problem = f"{path} exists with other content"
            expected = "a new file: no file is overwritten"
            fix = "another --name, or remove the file"
            raise InputError(problem, expected, fix, code="E_OUTPUT")
        path.write_text(submission.text, encoding="utf-8")
    try:
        done = subprocess.run(submission.command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        problem = f"{submission.command[0]} is not installed; {path} is complete"
        expected = "the command of the system"
        fix = f"run on a machine of the system: {command}"
        raise InputError(problem, expected, fix, code="E_NOT_INSTALLED") from error
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip()
        problem = f"{command} failed with exit code {done.returncode}: {reason}"
        fix = "correct the cause, and repeat the command"
        raise RunError(problem, "a submitted job", fix, code="E_JOB")
    return done.stdout
