"""Work and resources of a job, the result of a submission, and the parts of jobs in containers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from samestep.errors import InputError

# A part of file names and of shell commands.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Kubernetes appends the index of a pod and random text, to at most 63 characters (RFC 1123).
_RESOURCE_LENGTH = 40
# Port of the rendezvous of torchrun: its default.
PORT = 29400
# Attempts after failures of ranks or machines.
RESTARTS = 3
# Folders in the container.
SUBJECT_FOLDER = "/samestep"
RUNS = "/runs"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training on several machines.

    Args:
        subject: shipped recipe, path of a recipe, or path of a script.
        text: content of the recipe or script; None for a shipped recipe.
        arguments: overrides `key=value` of a recipe, or arguments of a script.
        name: name of the run and of the job.
        nodes: largest number of machines.
        gpus: GPUs of each machine; 0 for ranks on CPUs.
        minimum: smallest number of ranks.
        maximum: largest number of ranks.
        runs: folder of runs, which all machines share.
        folder: current folder on this machine.
        out: folder of the files of the job.
        python: Python of this machine, for systems whose machines share its file system.
        image: container image, or None.
        time: limit of the time in the form of Slurm, or None.
        volume: volume with the folder of runs in containers, or None.
        gpu_name: kind of GPU for SkyPilot, or None.
    """

    subject: str
    text: str | None
    arguments: tuple[str, ...]
    name: str
    nodes: int
    gpus: int
    minimum: int
    maximum: int
    runs: str
    folder: str
    out: str
    python: str
    image: str | None = None
    time: str | None = None
    volume: str | None = None
    gpu_name: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            expected = "letters, digits, periods, hyphens and underscores, with a letter or digit first"
            raise InputError(f"--name {self.name}", expected, "--name first", code="E_VALUE")
        if self.maximum < self.nodes or self.maximum % self.nodes:
            raise InputError(
                f"{self.maximum} ranks on {self.nodes} nodes",
                expected="the same number of ranks on each node",
                fix=f"--processes {max(1, self.maximum // self.nodes) * self.nodes}",
                code="E_PROCESSES",
            )
        if self.gpus and self.per_node > self.gpus:
            raise InputError(
                f"{self.per_node} ranks on each node with --gpus {self.gpus}",
                expected="one GPU per rank",
                fix=f"--processes {self.gpus * self.nodes}, or more --gpus",
                code="E_PROCESSES",
            )
        if self.minimum > self.maximum:
            raise InputError(
                f"--processes {self.minimum}:{self.maximum}",
                expected="MIN:MAX with MIN <= MAX",
                fix=f"--processes {self.maximum}:{self.minimum}",
                code="E_PROCESSES",
            )

    @property
    def is_script(self) -> bool:
        """Whether the subject is a script, which calls `samestep.start()`."""
        return self.subject.endswith(".py")

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return self.maximum // self.nodes

    @property
    def minimum_nodes(self) -> int:
        """Smallest number of nodes.

        Raises:
            InputError: the smallest number of ranks does not fill nodes.
        """
        nodes, rest = divmod(self.minimum, self.per_node)
        if rest:
            raise InputError(
                f"--processes {self.minimum}:{self.maximum} with {self.per_node} ranks on each node",
                expected="whole nodes: MIN is a multiple of the ranks of a node",
                fix=f"--processes {(nodes + 1) * self.per_node}:{self.maximum}",
                code="E_PROCESSES",
            )
        return nodes

    @property
    def resource_name(self) -> str:
        """Name in the form of Kubernetes and dstack: lower case, digits and hyphens.

        Raises:
            InputError: the name is too long.
        """
        name = re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if len(name) > _RESOURCE_LENGTH or not name[0].isalpha():
            expected = f"a letter first, and at most {_RESOURCE_LENGTH} characters"
            raise InputError(f"--name {self.name}", expected, "--name with a shorter name", code="E_VALUE")
        return name

    def arguments_of(self, subject: str, runs: str) -> list[str]:
        """Return the arguments of Python or torchrun for one rank, with paths of the machine of the rank."""
        if self.is_script:
            return [subject, *self.arguments]
        overrides = ["--set", *self.arguments] if self.arguments else []
        options = ["--name", self.name, "--runs", runs, "--or-resume"]
        return ["-m", "samestep", "train", subject, *overrides, *options]

    @property
    def file_name(self) -> str:
        """Name of the recipe or script without its folder."""
        return PurePath(self.subject).name

    def torchrun(self, host: str | None = None) -> list[str]:
        """Return the command of each node of containers, with torchrun (torch.distributed.run).

        The agents have no common store: an agent of torch 2.13 that was in an earlier round does not publish its store
        for an agent that joins or replaces another one, and both wait.

        Args:
            host: host name of the first node; None if the variable PET_RDZV_ENDPOINT has host and port.
        """
        subject = self.subject if self.text is None else f"{SUBJECT_FOLDER}/{self.file_name}"
        nodes = str(self.nodes) if self.minimum == self.maximum else f"{self.minimum_nodes}:{self.nodes}"
        return [
            *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"),
            f"--nnodes={nodes}",
            f"--nproc-per-node={self.per_node}",
            "--rdzv-backend=c10d",
            *([f"--rdzv-endpoint={host}:{PORT}"] if host else []),
            f"--rdzv-id={self.name}",
            f"--max-restarts={RESTARTS}",
            *self.arguments_of(subject, RUNS),
        ]

    def require_image(self, system: str) -> str:
        """Return the container image of the job."""
        expected, fix = "a container image with Samestep and its packages", "registry.example.com/team/samestep:1"
        return required(self.image, "--image", system, expected, fix)

    def require_volume(self, system: str) -> str:
        """Return the volume with the folder of runs."""
        expected = f"a volume that all nodes can write to, for the folder of runs {RUNS}"
        return required(self.volume, "--volume", system, expected, "NAME")

    def require_fixed_size(self, system: str) -> None:
        """Require one number of ranks, for a system that cannot change it."""
        if self.minimum != self.maximum:
            raise InputError(
                f"--processes {self.minimum}:{self.maximum} with {system}",
                expected=f"one number of ranks: {system} starts all nodes of a job, or none",
                fix=f"--processes {self.maximum}",
                code="E_PROCESSES",
            )


def required(value: str | None, option: str, system: str, expected: str, example: str) -> str:
    """Return the value of an option, or raise an `InputError` if a system needs it and it is not set."""
    if value is None:
        raise InputError(f"{system} without {option}", expected, f"{option} {example}", code="E_OPTION_CONFLICT")
    return value


@dataclass(frozen=True)
class Submission:
    """Files of a job by name, the command that submits them, and remarks for the user."""

    files: Mapping[str, str]
    command: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the files; equal files may exist.

        Raises:
            InputError: a file exists with other content, or cannot be written.
        """
        for name, text in self.files.items():
            path = folder / name
            try:
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise InputError(
                        f"{path} exists with other content",
                        expected="a new file: no file is overwritten",
                        fix="--out with another folder, another --name, or remove the file",
                        code="E_OUTPUT",
                    )
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise InputError(
                    f"{path} cannot be written: {error.strerror}", "a writable folder", "--out DIR", code="E_OUTPUT"
                ) from error


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as blocks, and repeats equal parts in place of aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML file, with keys in their order and long lines."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)
