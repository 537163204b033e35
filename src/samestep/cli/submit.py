"""`samestep submit`: write the batch script of a Slurm job on several machines, and submit it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from samestep.cli.options import (
    JsonOption,
    SubjectOptions,
    argument,
    count,
    option,
    output_errors,
    parse_process_count,
    timed_name,
)
from samestep.cli.run_plans import load_resolved
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DONE, InputError, RunError
from samestep.tools.templates import render


@dataclass(frozen=True, kw_only=True)
class _System:
    system: Literal["slurm"] = argument("SYSTEM", "slurm")


@dataclass(frozen=True, kw_only=True)
class Submit(JsonOption, SubjectOptions, _System):
    """Write the batch script of a job on several machines, and submit it with sbatch.

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
    time: str | None = option("limit of the time, as for sbatch", "LIMIT")
    name: str | None = option(
        "name of the job and of the run (default: recipe, date and time)", "NAME"
    )
    runs: Path = option("folder of runs", "DIR", default=Path("runs"))
    dry_run: bool = option("print file and command; write and submit nothing", default=False)

    def run(self) -> int:
        """Print or submit the job."""
        script = self.script()
        minimum, maximum = self._rank_counts()
        name = self.name or timed_name(self.runs, Path(self.recipe).stem)
        # The name is a part of file names and of shell commands.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise InputError(
                f"--name {name}",
                "letters, digits, periods, hyphens and underscores, with a letter or digit first",
                "--name first",
                code="E_VALUE",
            )
        runs = str(self.runs.absolute())
        # This Python: on other machines, `samestep` can be another installation.
        rank = [sys.executable]
        if script is not None:
            rank += [self.recipe, *self.script_arguments]
        else:
            recipe = load_resolved(self.recipe, self.overrides, self.note)
            # Before the job waits in the queue.
            for number in (minimum, maximum):
                resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
            rank += ["-m", "samestep", "train", self.recipe, *self.overrides]
            rank += ["--name", name, "--runs", runs, "--or-resume", "--requeue"]
        per_node = maximum // self.nodes
        text = render(
            "slurm.sbatch",
            name=name,
            folder=str(Path.cwd()),
            runs=runs,
            nodes=f"{minimum // per_node}-{self.nodes}",
            per_node=per_node,
            gpus=self.gpus,
            time=self.time,
            command=rank,
        )
        path = Path(f"{name}.sbatch")
        command = ["sbatch", str(path)]
        output = ""
        shown = f"# {path}\n{text}\n# command\n{shlex.join(command)}"
        if not self.dry_run:
            output = _submit(path, text, command)
            shown = output.rstrip()
        data = {"command": command, "submitted": not self.dry_run, "output": output}
        self.result({"files": {str(path): text}, **data}, shown)
        return EXIT_DONE

    def _rank_counts(self) -> tuple[int, int]:
        """Return the smallest and the largest number of ranks.

        Raises:
            InputError: nodes have different numbers of ranks, or more ranks than GPUs.
        """
        most = self.nodes * max(1, self.gpus)
        text = self.processes or str(most)
        counts = [parse_process_count(part) for part in text.split(":", 1)]
        minimum = counts[0]
        maximum = counts[-1]
        per_node = maximum // self.nodes
        # With no ranks on a node, the last remainder would divide by zero.
        has_equal_nodes = per_node > 0 and maximum % self.nodes == 0 and minimum % per_node == 0
        if not has_equal_nodes or minimum > maximum or 0 < self.gpus < per_node:
            raise InputError(
                f"--processes {text} with --nodes {self.nodes} --gpus {self.gpus}",
                "the same number of ranks on each node, at most one per GPU; MIN <= MAX",
                f"--processes {most}",
                code="E_PROCESSES",
            )
        return minimum, maximum


def _submit(path: Path, text: str, command: list[str]) -> str:
    """Write and submit the script, and return the output of the command."""
    fix = "another --name, or another current folder"
    with output_errors(f"{path} cannot be written", "a writable folder", fix):
        # The same job can be submitted again.
        if path.exists() and path.read_bytes() != text.encode():
            problem = f"{path} exists with other content"
            expected = "a new file: no file is overwritten"
            fix = "another --name, or remove the file"
            raise InputError(problem, expected, fix, code="E_OUTPUT")
        path.write_text(text, encoding="utf-8")
    line = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        problem = f"{command[0]} is not installed; {path} is complete"
        fix = f"run on a machine of the system: {line}"
        raise InputError(
            problem, "the command of the system", fix, code="E_NOT_INSTALLED"
        ) from error
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip()
        problem = f"{line} failed with exit code {done.returncode}: {reason}"
        fix = "correct the cause, and repeat the command"
        raise RunError(problem, "a submitted job", fix, code="E_JOB")
    return done.stdout
