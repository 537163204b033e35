"""Handing a job back to Slurm, which starts it again when it may go on."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import Any

from samestep.errors import InputError, RunError
from samestep.runtime.env import read_slurm_job


def add_option(parser: Any) -> None:
    """`--requeue`."""
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="under Slurm: when SIGUSR1 asked to end (sbatch --signal), have the job requeued once the checkpoint is "
        "there; it goes on with the run of the same --name",
    )


def restarts(arguments: argparse.Namespace) -> int:
    """How often Slurm has started this job anew; 0 outside of a job.

    Raises:
        InputError: `--requeue` where there is no job.
    """
    job = read_slurm_job()
    if arguments.requeue and job is None:
        raise InputError("--requeue, but SLURM_JOB_ID is not set", rule="a job of Slurm's", do="leave --requeue out")
    return job.restarts if job is not None else 0


def requeue_if_asked(arguments: argparse.Namespace, asked_by: int | None) -> None:
    """Requeue the job if that is wanted and SIGUSR1 is what ended the run.

    Raises:
        RunError: Slurm does not take it back.
    """
    job = read_slurm_job()
    if not arguments.requeue or asked_by != signal.SIGUSR1 or job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", job.id], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise RunError(
            f"job {job.id} was not requeued: {str(said).strip()}",
            rule="scontrol requeue takes back batch jobs that may be requeued (sbatch --requeue)",
            do="submit it again; the checkpoint is there, and the same command with `samestep resume` goes on",
        ) from error
    print(f"job {job.id} is requeued", file=sys.stderr)
