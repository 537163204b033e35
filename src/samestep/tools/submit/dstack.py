"""dstack: a task (dstack.ai, reference of .dstack.yml)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from samestep.tools.submit.job import PORT, RUNS, SUBJECT_FOLDER, Job, Submission, to_yaml


def submission(job: Job) -> Submission:
    """Return a task, and the command that submits it.

    Raises:
        InputError: image or volume are missing, or the number of ranks is not fixed.
    """
    job.require_fixed_size("dstack")
    task: dict[str, Any] = {
        "type": "task",
        "name": job.resource_name,
        "nodes": job.nodes,
        "image": job.require_image("dstack"),
        "commands": [f'export PET_RDZV_ENDPOINT="$DSTACK_MASTER_NODE_IP:{PORT}"', shlex.join(job.torchrun())],
        "volumes": [f"{job.require_volume('dstack')}:{RUNS}"],
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
    }
    if job.text is not None:
        task["files"] = [f"{Path(job.folder, job.subject)}:{SUBJECT_FOLDER}/{job.file_name}"]
    if job.gpus:
        task["resources"] = {"gpu": {"count": job.gpus, **({"name": job.gpu_name} if job.gpu_name else {})}}
    name = f"{job.name}.dstack.yml"
    return Submission({name: to_yaml(task)}, ("dstack", "apply", "--yes", "-f", name))
