"""Jobs in containers: paths, image and volume, and the torchrun command of each node (torch.distributed.run)."""

from __future__ import annotations

from pathlib import PurePath

from samestep.errors import InputError
from samestep.tools.submit.job import PORT, RESTARTS, Job

# Folders in the container.
SUBJECT_FOLDER = "/samestep"
RUNS = "/runs"


def file_name(job: Job) -> str:
    """Return the name of the recipe or script without its folder."""
    return PurePath(job.subject).name


def torchrun(job: Job, host: str | None = None) -> list[str]:
    """Return the command of each node.

    The agents have no common store: an agent of torch 2.13 that was in an earlier round does not publish its store for
    an agent that joins or replaces another one, and both wait.

    Args:
        job: the job.
        host: host name of the first node; None if the variable PET_RDZV_ENDPOINT has host and port.
    """
    subject = job.subject if job.text is None else f"{SUBJECT_FOLDER}/{file_name(job)}"
    nodes = str(job.nodes) if job.minimum == job.maximum else f"{job.minimum_nodes}:{job.nodes}"
    return [
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"),
        f"--nnodes={nodes}",
        f"--nproc-per-node={job.per_node}",
        "--rdzv-backend=c10d",
        *([f"--rdzv-endpoint={host}:{PORT}"] if host else []),
        f"--rdzv-id={job.name}",
        f"--max-restarts={RESTARTS}",
        *job.arguments_of(subject, RUNS),
    ]


def require_image(job: Job, system: str) -> str:
    """Return the container image of the job."""
    if job.image is None:
        raise InputError(
            f"{system} without --image",
            expected="a container image with Samestep and its packages",
            fix="--image registry.example.com/team/samestep:1",
            code="E_OPTION_CONFLICT",
        )
    return job.image


def require_volume(job: Job, system: str) -> str:
    """Return the volume with the folder of runs."""
    if job.volume is None:
        raise InputError(
            f"{system} without --volume",
            expected=f"a volume that all nodes can write to, for the folder of runs {RUNS}",
            fix="--volume NAME",
            code="E_OPTION_CONFLICT",
        )
    return job.volume
