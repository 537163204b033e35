"""`samestep submit`: files of jobs for Slurm and Kubernetes, and the commands that submit them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from samestep.errors import InputError
from samestep.tools.templates import render


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training on several machines."""

    subject: str  # shipped recipe, path of a recipe, or path of a script
    text: str  # its content
    parameters: tuple[str, ...]  # overrides `key=value` of a recipe, or arguments of a script
    name: str  # name of the run and of the job
    nodes: int  # largest number of machines
    gpus: int  # GPUs of each machine; 0 for ranks on CPUs
    minimum: int  # smallest number of ranks
    maximum: int  # largest number of ranks
    runs: str  # folder of runs, which all machines share
    folder: str  # current folder on this machine
    python: str  # Python of this machine, for Slurm
    time: str | None = None  # limit of the time in the form of Slurm
    image: str | None = None  # container image
    volume: str | None = None  # persistent volume claim with the folder of runs

    def __post_init__(self) -> None:
        # The name is a part of file names and of shell commands.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise InputError(
                f"--name {self.name}",
                "letters, digits, periods, hyphens and underscores, with a letter or digit first",
                "--name first",
                code="E_VALUE",
            )
        # With no ranks on a node, the last remainder would divide by zero.
        has_equal_nodes = (
            self.per_node > 0
            and self.maximum % self.nodes == 0
            and self.minimum % self.per_node == 0
        )
        if not has_equal_nodes or self.minimum > self.maximum or 0 < self.gpus < self.per_node:
            resources = f"--nodes {self.nodes} --gpus {self.gpus}"
            raise InputError(
                f"--processes {self.minimum}:{self.maximum} with {resources}",
                "the same number of ranks on each node, at most one per GPU; MIN <= MAX",
                f"--processes {self.nodes * max(1, self.gpus)}",
                code="E_PROCESSES",
            )

    @property
    def is_script(self) -> bool:
        """Whether the subject is a script, which calls `samestep.init()`."""
        return self.subject.endswith(".py")

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return self.maximum // self.nodes

    def arguments_of(self, subject: str, runs: str) -> list[str]:
        """Return the arguments of Python or torchrun for a rank, with paths of its machine."""
        if self.is_script:
            return [subject, *self.parameters]
        options = ["--name", self.name, "--runs", runs, "--or-resume"]
        return ["-m", "samestep", "train", subject, *self.parameters, *options]


@dataclass(frozen=True)
class Submission:
    """File of a job, and the command that submits it."""

    file: str
    text: str
    command: tuple[str, ...]


def slurm_submission(job: Job) -> Submission:
    """Return a batch script (sbatch(1), srun(1))."""
    rank = [job.python, *job.arguments_of(job.subject, job.runs)]
    if not job.is_script:
        rank.append("--requeue")
    file = f"{job.name}.sbatch"
    return Submission(file, render("slurm.sbatch", job=job, command=rank), ("sbatch", file))


def kubernetes_submission(job: Job) -> Submission:
    """Return a JobSet (jobset.sigs.k8s.io), with a ConfigMap of the recipe or script.

    Raises:
        InputError: image or volume are missing, or the name does not fit.
    """
    if job.image is None or job.volume is None:
        raise InputError(
            "kubernetes without --image or --volume",
            "an image with Samestep, and a persistent volume claim that all nodes can write to",
            "--image registry.example.com/team/samestep:1 --volume NAME",
            code="E_OPTION_CONFLICT",
        )
    name = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")
    # Kubernetes appends the index of a pod and random text, to at most 63 characters (RFC 1123).
    if len(name) > 40 or not name[0].isalpha():
        expected = "a letter first, and at most 40 characters"
        fix = "--name with a shorter name"
        raise InputError(f"--name {job.name}", expected, fix, code="E_VALUE")
    subject = "train.py" if job.is_script else "recipe.yaml"
    # The agents have no common store: an agent of torch 2.13 that was in an earlier round does not
    # publish its store for an agent that joins or replaces another one, and both wait.
    command = [
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"),
        f"--nnodes={job.minimum // job.per_node}:{job.nodes}",
        f"--nproc-per-node={job.per_node}",
        "--rdzv-backend=c10d",
        # JobSet gives each pod this name: JOBSET-REPLICATEDJOB-REPLICA-INDEX.SUBDOMAIN
        f"--rdzv-endpoint={name}-node-0-0.{name}:29400",
        f"--rdzv-id={job.name}",
        "--max-restarts=3",
        *job.arguments_of(f"/samestep/{subject}", "/runs"),
    ]
    file = f"{job.name}.jobset.yaml"
    text = render("jobset.yaml", job=job, name=name, file=subject, command=command)
    return Submission(file, text, ("kubectl", "apply", "-f", file))
