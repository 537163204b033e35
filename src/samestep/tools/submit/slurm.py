"""Slurm: a batch script (sbatch(1), srun(1))."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from samestep.errors import InputError
from samestep.tools.submit.job import Job, Submission

# Seconds between SIGUSR1 and the end of the time limit, for the last step and a checkpoint.
_NOTICE_SECONDS = 120
# Forms of sbatch(1): M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
_TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")


def submission(job: Job) -> Submission:
    """Return the batch script of a job, and the command that submits it.

    Raises:
        InputError: the limit of the time has another form than Slurm's.
    """
    if job.time is not None and _TIME.fullmatch(job.time) is None:
        expected = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:"
        raise InputError(f"--time {job.time}", f"{expected}minutes:seconds", "--time 2:00:00", code="E_VALUE")
    name = f"{job.name}.sbatch"
    return Submission({name: _script(job)}, ("sbatch", name), _notes(job))


def _script(job: Job) -> str:
    nodes = f"{job.minimum_nodes}-{job.nodes}" if job.minimum != job.maximum else str(job.nodes)
    options = [
        f"--job-name={job.name}",
        f"--chdir={job.folder}",
        f"--nodes={nodes}",
        # A number of tasks would be fixed by the first start: a requeued job would wait for as many nodes.
        f"--mincpus={job.per_node}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--time={job.time}"] if job.time else []),
        f"--signal=USR1@{_NOTICE_SECONDS}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.out",
    ]
    runs = str(Path(job.folder, job.runs))
    rank = [job.python, *job.arguments_of(job.subject, runs), *([] if job.is_script else ["--requeue"])]
    directives = "\n".join(f"#SBATCH {shlex.quote(option)}" for option in options)
    return f"""#!/bin/bash
{directives}
set -euo pipefail

runs={shlex.quote(runs)}
mkdir -p "$runs"

# All nodes need access to the folder of runs.
probe="$runs/.node-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
touch "$probe"
if ! srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 test -e "$probe"; then
    rm -f "$probe"
    echo "error: a node has no access to $runs: choose a folder on a file system that all nodes share" >&2
    exit 2
fi
rm -f "$probe"

# Processes of other jobs are not admitted.
SAMESTEP_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export SAMESTEP_TOKEN

exec srun --ntasks=$((SLURM_JOB_NUM_NODES * {job.per_node})) --ntasks-per-node={job.per_node} --kill-on-bad-exit=1 \\
    {shlex.join(rank)}
"""


def _notes(job: Job) -> tuple[str, ...]:
    notes = [f"{_NOTICE_SECONDS} seconds before the time limit, SIGUSR1 stops the run after a step, with a checkpoint"]
    if job.is_script:
        notes.append("a script continues after a requeue if it uses samestep.start(run=...)")
    else:
        notes.append("the job is then requeued and continues the run; also after the failure of a node")
    return tuple(notes)
