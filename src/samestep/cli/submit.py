"""`samestep submit`: the file of a job for Slurm or Kubernetes, and the command that submits it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import (
    JsonOption,
    argument,
    count,
    option,
    option_conflict,
    options_of,
    output_errors,
    timed_name,
)
from samestep.cli.recipe_options import SubjectOptions, load_resolved
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DONE, InputError, RunError
from samestep.recipes.recipe_files import shipped_recipes
from samestep.tools.submit import Job, Submission, kubernetes_submission, slurm_submission

# Options of one system.
_OPTIONS = {"time": "slurm", "image": "kubernetes", "volume": "kubernetes"}


@dataclass(frozen=True, kw_only=True)
class _System:
    system: Literal["slurm", "kubernetes"] = argument("SYSTEM", "slurm or kubernetes")


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, SubjectOptions, _System):
    """Write the file of a job on several machines, and submit it with the command of the system.

    A restarted job continues its run.
    """

    example: ClassVar = "samestep submit slurm digits --nodes 2 --gpus 4 --dry-run"
    group: ClassVar = "job (results do not depend on these options)"

    nodes: int = option("machines, at most", "N", required=True)
    gpus: int = option("GPUs of each machine; 0 for ranks on CPUs", "G", type=count, required=True)
    processes: str | None = option(
        "number of ranks, or MIN:MAX for a job that continues on fewer (default: one per GPU; one per machine without "
        "GPUs)",
        "N",
    )
    time: str | None = option("limit of the time, as for sbatch (slurm)", "LIMIT")
    image: str | None = option("container image with Samestep (kubernetes)", "IMAGE")
    volume: str | None = option("persistent volume claim of the runs (kubernetes)", "NAME")
    name: str | None = option(
        "name of the job and of the run (default: recipe, date and time)", "NAME"
    )
    runs: Path = option("folder of runs (default runs)", "DIR", default=Path("runs"))
    dry_run: bool = option("print file and command; write and submit nothing", default=False)


def run(options: Options) -> int:
    """Print or submit the job."""
    for name, system in _OPTIONS.items():
        if getattr(options, name) is not None and options.system != system:
            raise option_conflict(f"--{name} with {options.system}", f"leave --{name} out")
    write = slurm_submission if options.system == "slurm" else kubernetes_submission
    submission = write(_job(options))
    output = "" if options.dry_run else _run(submission)
    data = {"command": submission.command, "submitted": not options.dry_run, "output": output}
    text = f"# {submission.file}\n{submission.text}\n# command\n{shlex.join(submission.command)}"
    options.result(
        {"files": {submission.file: submission.text}, **data},
        text if options.dry_run else output.rstrip(),
    )
    return EXIT_DONE


def _job(options: Options) -> Job:
    script = options.script()
    path = Path(options.recipe)
    minimum, colon, maximum = (
        options.processes or str(options.nodes * max(1, options.gpus))
    ).partition(":")
    counts = [parse_process_count(text) for text in (minimum, maximum if colon else minimum)]
    if script is None:
        recipe = load_resolved(options.recipe, options.overrides, options.note)
        for number in counts:
            resolve_mesh(recipe.strategy, number, recipe.microbatch_count)
    return options_of(
        Job,
        options,
        subject=options.recipe,
        text=shipped_recipes().get(options.recipe, path).read_text(encoding="utf-8"),
        parameters=tuple(options.overrides if script is None else options.script_arguments),
        name=options.name or timed_name(options.runs, path.stem),
        minimum=counts[0],
        maximum=counts[1],
        runs=str(options.runs.absolute()),
        folder=str(Path.cwd()),
        python=sys.executable,
    )


def _run(submission: Submission) -> str:
    """Write the file, run the command, and return its output."""
    path = Path(submission.file)
    command = shlex.join(submission.command)
    with output_errors(
        f"{path} cannot be written",
        "a writable folder",
        "another --name, or another current folder",
    ):
        if path.exists() and path.read_bytes() != submission.text.encode():
            expected = "a new file: no file is overwritten"
            fix = "another --name, or remove the file"
            raise InputError(f"{path} exists with other content", expected, fix, code="E_OUTPUT")
        path.write_text(submission.text, encoding="utf-8")
    try:
        done = subprocess.run(submission.command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        problem = f"{submission.command[0]} is not installed; {path} is complete"
        fix = f"run on a machine of the system: {command}"
        raise InputError(
            problem, "the command of the system", fix, code="E_NOT_INSTALLED"
        ) from error
    if done.returncode:
        problem = f"{command} failed with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        raise RunError(
            problem, "a submitted job", "correct the cause, and repeat the command", code="E_JOB"
        )
    return done.stdout
