"""SkyPilot: a task (docs.skypilot.co, YAML specification)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.tools.submit.job import (
    PORT,
    RUNS,
    SUBJECT_FOLDER,
    Job,
    Submission,
    file_name,
    require_image,
    require_volume,
    to_yaml,
    torchrun,
)


def submission(job: Job) -> Submission:
    """Return a task, and the command that submits it as a managed job, which SkyPilot recovers after preemptions.

    Raises:
        InputError: image, volume or kind of GPU are missing, or the number of ranks is not fixed.
    """
    job.require_fixed_size("skypilot")
    resources: dict[str, Any] = {"image_id": f"docker:{require_image(job, 'skypilot')}"}
    if job.gpus:
        resources["accelerators"] = {_gpu_name(job): job.gpus}
    task: dict[str, Any] = {"name": job.resource_name, "num_nodes": job.nodes, "resources": resources}
    if job.text is not None:
        task["file_mounts"] = {f"{SUBJECT_FOLDER}/{file_name(job)}": str(Path(job.folder, job.subject))}
    task["volumes"] = {RUNS: require_volume(job, "skypilot")}
    task["run"] = (
        f'export PET_RDZV_ENDPOINT="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"\n{shlex.join(torchrun(job))}\n'
    )
    name = f"{job.name}.sky.yaml"
    return Submission({name: to_yaml(task)}, ("sky", "jobs", "launch", "--yes", name))


def _gpu_name(job: Job) -> str:
    if job.gpu_name is None:
        expected = "the kind of GPU, as in sky gpus list"
        raise InputError("skypilot without --gpu-name", expected, "--gpu-name H100", code="E_OPTION_CONFLICT")
    return job.gpu_name
