"""`samestep submit`: files and one command for Slurm, Ray, Kubernetes, SkyPilot and dstack."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import (
    add_number,
    add_options,
    add_subject_argument,
    option_conflict,
    print_json,
    script_of,
    timed_name,
)
from samestep.cli.recipe_options import load_with_microbatches
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DONE, InputError, RunError
from samestep.recipes.recipe_files import shipped_recipes
from samestep.tools.submit import dstack, kubernetes, ray, skypilot, slurm
from samestep.tools.submit.job import Job, Submission

_SYSTEMS = ("slurm", "ray", "kubernetes", "skypilot", "dstack")
# Systems of an option; the others refuse it.
_OPTIONS = {
    "image": ("kubernetes", "skypilot", "dstack"),
    "volume": ("kubernetes", "skypilot", "dstack"),
    "time": ("slurm",),
    "manifest": ("kubernetes",),
    "gpu_name": ("skypilot", "dstack"),
}


def add_submit(add_parser: Any) -> None:
    """Add `samestep submit`."""
    parser = add_parser(
        description="Write the files of a job on several machines, and submit them with the command of the system. A "
        "restarted job continues its run.",
        epilog="example: samestep submit slurm digits --nodes 2 --gpus 4 --dry-run",
    )
    parser.add_argument("system", choices=_SYSTEMS, help="system that starts the job")
    add_subject_argument(parser)
    group = parser.add_argument_group("resources (results do not depend on these options)")
    add_number(group, "--nodes", required=True, metavar="N", help="machines, at most")
    add_number(group, "--gpus", zero=True, required=True, metavar="G", help="GPUs of each machine; 0 for ranks on CPUs")
    text = "number of ranks, or MIN:MAX for a job that continues on fewer (default: one per GPU; one per machine "
    group.add_argument("--processes", metavar="N", help=f"{text}without GPUs)")
    group.add_argument("--time", metavar="LIMIT", help="limit of the time, as for sbatch (slurm)")
    group.add_argument("--gpu-name", metavar="NAME", help="kind of GPU, such as H100 (skypilot, dstack)")
    text = "container image with Samestep (kubernetes, skypilot, dstack)"
    group.add_argument("--image", help=text)
    text = (
        "volume of the runs: a persistent volume claim (kubernetes), a volume (skypilot), a volume or folder (dstack)"
    )
    group.add_argument("--volume", metavar="NAME", help=text)
    text = "kind of manifest (kubernetes; default trainjob)"
    group.add_argument("--manifest", choices=get_args(kubernetes.Manifest), help=text)
    group = parser.add_argument_group("output")
    group.add_argument("--name", help="name of the job and of the run (default: recipe, date and time)")
    add_options(group, "--runs")
    group.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the files (default .)")
    group.add_argument("--dry-run", action="store_true", help="print files and command; write and submit nothing")
    add_options(parser, "--json")
    parser.set_defaults(run=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    """Print or submit the job."""
    require_single_process("submit")
    for name, systems in _OPTIONS.items():
        if getattr(arguments, name) is not None and arguments.system not in systems:
            option = f"--{name.replace('_', '-')}"
            expected = f"{option} with {', '.join(systems)}"
            raise option_conflict(f"{option} with {arguments.system}", expected, f"leave {option} out")
    submission = _submission(_job(arguments), arguments)
    output = "" if arguments.dry_run else _run(submission, arguments.out)
    if arguments.json:
        print_json(
            {
                "files": dict(submission.files),
                "command": list(submission.command),
                "notes": list(submission.notes),
                "submitted": not arguments.dry_run,
                "output": output,
            }
        )
        return EXIT_DONE
    if arguments.dry_run:
        for name, text in submission.files.items():
            print(f"# {name}\n{text}")
        print(f"# command\n{shlex.join(submission.command)}")
    else:
        print(output, end="")
    for note in submission.notes:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_DONE


def _submission(job: Job, arguments: argparse.Namespace) -> Submission:
    if arguments.system == "kubernetes":
        return kubernetes.submission(job, arguments.manifest or "trainjob")
    functions = {
        "slurm": slurm.submission,
        "ray": ray.submission,
        "skypilot": skypilot.submission,
        "dstack": dstack.submission,
    }
    return functions[arguments.system](job)


def _job(arguments: argparse.Namespace) -> Job:
    script = script_of(arguments)
    subject, nodes, gpus = arguments.recipe, int(arguments.nodes), int(arguments.gpus)
    minimum, maximum = _process_range(arguments.processes, nodes * max(1, gpus))
    job = Job(
        subject=subject,
        text=None if subject in shipped_recipes() else _read(Path(subject)),
        arguments=tuple(arguments.overrides if script is None else arguments.script_arguments),
        name=arguments.name or timed_name(arguments.runs, Path(subject).stem),
        nodes=nodes,
        gpus=gpus,
        minimum=minimum,
        maximum=maximum,
        runs=str(arguments.runs),
        folder=str(Path.cwd()),
        out=str(arguments.out.absolute()),
        python=sys.executable,
        image=arguments.image,
        time=arguments.time,
        volume=arguments.volume,
        gpu_name=arguments.gpu_name,
    )
    if script is None:
        recipe = load_with_microbatches(arguments, arguments.overrides)
        for count in (maximum, minimum):
            resolve_mesh(recipe.strategy, count, recipe.microbatch_count, recipe.batch_size)
    return job


def _process_range(text: str | None, default: int) -> tuple[int, int]:
    if text is None:
        return default, default
    minimum, colon, maximum = text.partition(":")
    first = parse_process_count(minimum, " or MIN:MAX")
    return first, parse_process_count(maximum, " or MIN:MAX") if colon else first


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        expected = f"{', '.join(shipped_recipes())}, or an existing file"
        raise InputError(f"{path} does not exist", expected, "check the path", code="E_FILE_MISSING") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "a readable text file", "check the file", code="E_UNREADABLE") from error


def _run(submission: Submission, folder: Path) -> str:
    """Write the files, run the command in their folder, and return its output."""
    submission.write(folder)
    command = shlex.join(submission.command)
    try:
        done = subprocess.run(submission.command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError(
            f"{submission.command[0]} is not installed; the files in {folder} are complete",
            expected="the command of the system",
            fix=f"run on a machine of the system: {command}",
            code="E_NOT_INSTALLED",
        ) from error
    if done.returncode:
        raise RunError(
            f"{command} failed with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}",
            expected="a submitted job",
            fix="correct the cause, and repeat the command",
            code="E_SUBMIT",
        )
    return done.stdout
