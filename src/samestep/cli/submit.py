"""`samestep submit`: the file of a job for Slurm or Kubernetes, and the command that submits it."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import (
    add_number,
    add_options,
    add_subject_argument,
    option_conflict,
    options_of,
    print_json,
    script_of,
    timed_name,
)
from samestep.cli.recipe_options import load_with_microbatches
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DONE, InputError, RunError
from samestep.recipes.recipe_files import shipped_recipes
from samestep.tools.submit import Job, Submission, kubernetes_submission, slurm_submission

# Options of one system.
_OPTIONS = {"time": "slurm", "image": "kubernetes", "volume": "kubernetes"}


def add_submit(add_parser: Any) -> None:
    """Add `samestep submit`."""
    parser = add_parser(
        description="Write the file of a job on several machines, and submit it with the command of the system. A "
        "restarted job continues its run.",
        epilog="example: samestep submit slurm digits --nodes 2 --gpus 4 --dry-run",
    )
    parser.add_argument("system", choices=("slurm", "kubernetes"), help="system that starts the job")
    add_subject_argument(parser)
    group = parser.add_argument_group("resources (results do not depend on these options)")
    add_number(group, "--nodes", required=True, metavar="N", help="machines, at most")
    add_number(group, "--gpus", zero=True, required=True, metavar="G", help="GPUs of each machine; 0 for ranks on CPUs")
    text = "number of ranks, or MIN:MAX for a job that continues on fewer (default: one per GPU; one per machine "
    group.add_argument("--processes", metavar="N", help=f"{text}without GPUs)")
    group.add_argument("--time", metavar="LIMIT", help="limit of the time, as for sbatch (slurm)")
    group.add_argument("--image", help="container image with Samestep (kubernetes)")
    group.add_argument("--volume", metavar="NAME", help="persistent volume claim of the runs (kubernetes)")
    group = parser.add_argument_group("output")
    group.add_argument("--name", help="name of the job and of the run (default: recipe, date and time)")
    add_options(group, "--runs")
    group.add_argument("--dry-run", action="store_true", help="print file and command; write and submit nothing")
    add_options(parser, "--json")
    parser.set_defaults(run=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    """Print or submit the job."""
    require_single_process("submit")
    for name, system in _OPTIONS.items():
        if getattr(arguments, name) is not None and arguments.system != system:
            raise option_conflict(f"--{name} with {arguments.system}", f"--{name} with {system}", f"leave --{name} out")
    write = slurm_submission if arguments.system == "slurm" else kubernetes_submission
    submission = write(_job(arguments))
    output = "" if arguments.dry_run else _run(submission)
    if arguments.json:
        files = {submission.file: submission.text}
        print_json(
            {"files": files, "command": submission.command, "submitted": not arguments.dry_run, "output": output}
        )
    elif arguments.dry_run:
        print(f"# {submission.file}\n{submission.text}\n# command\n{shlex.join(submission.command)}")
    else:
        print(output, end="")
    return EXIT_DONE


def _job(arguments: argparse.Namespace) -> Job:
    script, path = script_of(arguments), Path(arguments.recipe)
    minimum, colon, maximum = (arguments.processes or str(arguments.nodes * max(1, arguments.gpus))).partition(":")
    counts = [parse_process_count(text, " or MIN:MAX") for text in (minimum, maximum if colon else minimum)]
    if script is None:
        recipe = load_with_microbatches(arguments, arguments.overrides)
        for count in counts:
            resolve_mesh(recipe.strategy, count, recipe.microbatch_count, recipe.batch_size)
    return options_of(
        Job,
        arguments,
        subject=arguments.recipe,
        text=shipped_recipes().get(arguments.recipe, path).read_text(encoding="utf-8"),
        parameters=tuple(arguments.overrides if script is None else arguments.script_arguments),
        name=arguments.name or timed_name(arguments.runs, path.stem),
        minimum=counts[0],
        maximum=counts[1],
        runs=str(arguments.runs.absolute()),
        folder=str(Path.cwd()),
        python=sys.executable,
    )


def _run(submission: Submission) -> str:
    """Write the file, run the command, and return its output."""
    path, command = Path(submission.file), shlex.join(submission.command)
    if path.exists() and path.read_text(encoding="utf-8") != submission.text:
        expected, fix = "a new file: no file is overwritten", "another --name, or remove the file"
        raise InputError(f"{path} exists with other content", expected, fix, code="E_OUTPUT")
    path.write_text(submission.text, encoding="utf-8")
    try:
        done = subprocess.run(submission.command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        problem = f"{submission.command[0]} is not installed; {path} is complete"
        fix = f"run on a machine of the system: {command}"
        raise InputError(problem, "the command of the system", fix, code="E_NOT_INSTALLED") from error
    if done.returncode:
        raise RunError(
            f"{command} failed with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}",
            expected="a submitted job",
            fix="correct the cause, and repeat the command",
            code="E_SUBMIT",
        )
    return done.stdout
