"""Real faults for `samestep doctor`, each in a separate process."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.system import COMMAND
from samestep.distributed.env import relevant_variables

# Rank 0 of 2, as torchrun sets it.


@dataclass(frozen=True)
class Fault:
    """A fault of the machine or the environment, and the expected finding.

    Attributes:
        name: beginning of the finding's name.
        value: part of the finding's value.
        fix: part of the finding's fix.
        variables: environment variables of the process.
        shell: commands of the shell that becomes the process; `$RUNS` is the runs folder.
        options: further options of the command.
        namespace: option of unshare(1) for a separate namespace.
        plant: prepares the folder of the test.
    """

    name: str
    value: str
    fix: str
    variables: Mapping[str, str] = field(default_factory=dict)
    shell: str = ":"
    options: Sequence[str] = ()
    namespace: str | None = None
    plant: Callable[[Path], None] | None = None
    verdict: str = "fail"


def _plant_torchvision(folder: Path) -> None:
    info = folder / "planted" / "torchvision-0.20.0.dist-info"
    info.mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.0\nRequires-Dist: torch (==2.5.0)\n"
    (info / "METADATA").write_text(text)


def _plant_file(folder: Path) -> None:
    (folder / "runs").rmdir()
    (folder / "runs").write_text("")


def _plant_nvidia(folder: Path) -> None:
    """Create an nvidia-smi command with fixed output."""
    command = folder / "planted" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 40960"\n')
    command.chmod(0o755)


FAULTS = {
    "few open files": Fault("open files", "32 per process", "ulimit -n 65536", shell="ulimit -n 32"),
    "many threads": Fault(
        "OMP_NUM_THREADS", "1000", "export OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1000"}, verdict="warn"
    ),
    "incomplete launcher variables": Fault("launcher", "RANK is set but WORLD_SIZE", "unset RANK", {"RANK": "0"}),
    "more ranks than processors": Fault(
        "processors",
        "for 4 ranks",
        "--processes 1",
        shell="taskset -p -c 0 $$ >&2",
        options=("--processes", "4"),
        verdict="warn",
    ),
    "workers larger than memory": Fault(
        "memory", "for 2 ranks", "fewer --processes or --workers", options=("--workers", "99999")
    ),
    "torchvision of another torch": Fault(
        "requirements of torchvision",
        "torchvision 0.20.0 requires torch==2.5.0",
        "pip install --upgrade torchvision",
        plant=_plant_torchvision,
    ),
    "file instead of folder": Fault("runs folder", "Not a directory", "--runs DIR", plant=_plant_file),
    "read-only folder": Fault(
        "runs folder",
        "Read-only file system",
        "--runs DIR",
        shell='mount --bind "$RUNS" "$RUNS" && mount -o remount,ro,bind "$RUNS"',
        namespace="--mount",
    ),
    "small disk": Fault(
        "free space for runs",
        "16 MiB",
        "free space",
        shell='mount -t tmpfs -o size=16m none "$RUNS"',
        namespace="--mount",
        verdict="warn",
    ),
    "small shared memory": Fault(
        "shared memory",
        "16 MiB free",
        "--shm-size",
        shell="mount -t tmpfs -o size=16m none /dev/shm",
        options=("--workers", "2"),
        namespace="--mount",
    ),
    "GPU memory in use": Fault(
        "memory of GPU 0", "40 GiB of 79.6 GiB in use", "nvidia-smi", plant=_plant_nvidia, verdict="warn"
    ),
}


def doctor(folder: Path, *, fault: Fault = Fault("", "", ""), quick: bool = True) -> tuple[int, dict[str, Any]]:
    """Run doctor with a fault, without other variables that it checks; return exit code and findings by name."""
    (folder / "runs").mkdir(exist_ok=True)
    if fault.plant is not None:
        fault.plant(folder)
    planted = str(folder / "planted")
    variables = {name: value for name, value in os.environ.items() if name not in relevant_variables()}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [planted, variables.get("PYTHONPATH")]))
    variables["PATH"] = f"{planted}:{variables['PATH']}"
    namespace = ("unshare", "--map-root-user", fault.namespace) if fault.namespace else ()
    options = ["--processes", "2", "--workers", "0", *fault.options, "--runs", str(folder / "runs")]
    options += ["--quick"] if quick else []
    done = subprocess.run(
        [*namespace, "bash", "-ec", f'{fault.shell}\nexec "$@"', "bash", *COMMAND, "doctor", "--json", *options],
        env={**variables, "RUNS": str(folder / "runs"), **fault.variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def require(namespace: str | None) -> None:
    """Skip the test if this user cannot create the namespace."""
    if namespace is None:
        return
    command = ["unshare", "--map-root-user", namespace, "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"namespaces are not available: {' '.join(command)}")
