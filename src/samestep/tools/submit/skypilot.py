"""SkyPilot: a task (docs.skypilot.co, YAML specification)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from samestep.tools.submit.job import PORT, RUNS, SUBJECT_FOLDER, Job, Submission, required, to_yaml


def submission(job: Job) -> Submission:
    """Return a task, and the command that submits it as a managed job, which SkyPilot recovers after preemptions.

    Raises:
        InputError: image, volume or kind of GPU are missing, or the number of ranks is not fixed.
    """
    job.require_fixed_size("skypilot")
    resources: dict[str, Any] = {"image_id": f"docker:{job.require_image('skypilot')}"}
    if job.gpus:
        expected = "the kind of GPU, as in sky gpus list"
        resources["accelerators"] = {required(job.gpu_name, "--gpu-name", "skypilot", expected, "H100"): job.gpus}
    task: dict[str, Any] = {"name": job.resource_name, "num_nodes": job.nodes, "resources": resources}
    if job.text is not None:
        task["file_mounts"] = {f"{SUBJECT_FOLDER}/{job.file_name}": str(Path(job.folder, job.subject))}
    task["volumes"] = {RUNS: job.require_volume("skypilot")}
    task["run"] = (
        f'export PET_RDZV_ENDPOINT="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"\n{shlex.join(job.torchrun())}\n'
    )
    name = f"{job.name}.sky.yaml"
    return Submission({name: to_yaml(task)}, ("sky", "jobs", "launch", "--yes", name))
