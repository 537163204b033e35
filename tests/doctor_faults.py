"""Faults for the doctor to find, each really there in a process of its own."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from samestep.runtime.env import watched_variables
from samestep.runtime.rendezvous import READ
from system import COMMAND

# A rank of two, as torchrun sets it.
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: of the finding that must tell of it.
        says: what that must say, and...
        do: ...what it must say to do.
        variables: set in the process.
        shell: what is done in the shell that becomes the process; `$RUNS` is the folder of runs, which is there.
        options: of the command besides.
        namespace: a namespace of its own that the process needs, as an option of unshare(1).
        plant: what is done with the folder of the test before.
        verdict: of the finding.
    """

    name: str
    says: str
    do: str
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
    """A command that answers as the driver's own does: there is no such card here."""
    command = folder / "planted" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*query-gpu*) echo "GPU-1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 40960, 5, 16";;\n'
        '*query-compute*) echo "4242, GPU-1, 40950";;\n'
        "esac\n"
    )
    command.chmod(0o755)


FAULTS = {
    "few open files": Fault("open files", "32 a process", "ulimit -n 65536", shell="ulimit -n 32"),
    "few processes": Fault(
        "processes and threads", "are needed for 2 ranks", "ulimit -u 65536", shell="ulimit -u 20"
    ),
    "little address space": Fault(
        "address space", "977 MiB a process", "ulimit -v unlimited", shell="ulimit -v 1000000"
    ),
    "small files": Fault("size of a file", "512 KiB", "ulimit -f unlimited", shell="ulimit -f 512"),
    "files too small for a trial": Fault("runs folder", "File too large", "--runs DIR", shell="ulimit -f 512"),
    "small stack": Fault("stack", "256 KiB", "ulimit -s 8192", shell="ulimit -s 256", verdict="warn"),
    "many threads": Fault(
        "OMP_NUM_THREADS", "is 1000 where", "export OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1000"}, verdict="warn"
    ),
    "no number of threads": Fault(
        "OMP_NUM_THREADS", "no number of threads", "=1", {"OMP_NUM_THREADS": "all"}, verdict="warn"
    ),
    "launches wait": Fault(
        "CUDA_LAUNCH_BLOCKING", "is 1", "unset CUDA_LAUNCH_BLOCKING", {"CUDA_LAUNCH_BLOCKING": "1"}, verdict="warn"
    ),
    "no device visible": Fault(
        "CUDA_VISIBLE_DEVICES", "set and empty", "unset CUDA_VISIBLE", {"CUDA_VISIBLE_DEVICES": ""}, verdict="warn"
    ),
    "a device twice": Fault(
        "CUDA_VISIBLE_DEVICES", "0 is there twice", "CUDA_VISIBLE_DEVICES=0", {"CUDA_VISIBLE_DEVICES": "0,0"}
    ),
    "a rank of nothing": Fault("launcher", "RANK is set but WORLD_SIZE", "or unset RANK", {"RANK": "0"}),
    "another number of tasks": Fault(
        "SLURM_NTASKS",
        "is 4, but SLURM_TASKS_PER_NODE is 2(x3): 6 tasks",
        "srun -n N",
        {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x3)"},
        verdict="warn",
    ),
    "another number of tasks of a step": Fault(
        "SLURM_STEP_NUM_TASKS",
        "is 4, but SLURM_STEP_TASKS_PER_NODE is 2: 2 tasks",
        "srun -n N",
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2"},
    ),
    "another number of nodes": Fault(
        "SLURM_JOB_NUM_NODES",
        "is 2, but SLURM_JOB_NODELIST is n[1-3]: 3 nodes",
        "unset those that another job",
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-3]"},
    ),
    "no such address": Fault(
        "address where ranks meet",
        "does not resolve",
        "getent hosts",
        {**RANK, "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"},
    ),
    "no such interface": Fault(
        "GLOO_SOCKET_IFNAME",
        "no network interface nosuch0",
        "export GLOO_SOCKET_IFNAME=",
        {"GLOO_SOCKET_IFNAME": "nosuch0"},
    ),
    "more threads than processors": Fault(
        "processes x threads",
        "4 x 2 = 8 on 1 processor",
        "--processes 1",
        shell="taskset -p -c 0 $$ >&2",
        options=("--processes", "4", "--threads", "2"),
        verdict="warn",
    ),
    "workers that do not fit": Fault(
        "memory", "for 2 ranks", "fewer --processes or --workers", options=("--workers", "3", "--worker-memory", "9TiB")
    ),
    "torchvision of another torch": Fault(
        "torchvision and torch",
        "torchvision 0.20.0 wants torch==2.5.0",
        "pip install --upgrade torch torchvision",
        plant=_plant_torchvision,
    ),
    "a file in the folder's place": Fault("runs folder", "Not a directory", "--runs DIR", plant=_plant_file),
    "a folder that is read only": Fault(
        "runs folder",
        "Read-only file system",
        "--runs DIR",
        shell='mount --bind "$RUNS" "$RUNS" && mount -o remount,ro,bind "$RUNS"',
        namespace="--mount",
    ),
    "a full disk": Fault(
        "runs folder",
        "No space left on device",
        "on a disk with room",
        shell='mount -t tmpfs -o size=64k none "$RUNS"',
        namespace="--mount",
    ),
    "little room": Fault(
        "free space for runs",
        "16 MiB",
        "make room",
        shell='mount -t tmpfs -o size=16m none "$RUNS"',
        namespace="--mount",
        verdict="warn",
    ),
    "little shared memory": Fault(
        "shared memory",
        "16 MiB free of 16 MiB",
        "--shm-size",
        shell="mount -t tmpfs -o size=16m none /dev/shm",
        options=("--workers", "2"),
        namespace="--mount",
    ),
    "a name nobody knows": Fault(
        "host name",
        "does not resolve",
        "/etc/hosts",
        shell="hostname no-such-machine.invalid",
        namespace="--uts",
        verdict="warn",
    ),
    "no loopback interface": Fault(
        "loopback interface", "cannot be reached", "ip link set lo up", namespace="--net"
    ),
    "memory of a GPU taken": Fault(
        "memory of GPU 0", "40 GiB of 79.6 GiB are held by process 4242", "kill", plant=_plant_nvidia, verdict="warn"
    ),
}  # fmt: skip


def bare(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """An environment without anything that the doctor looks at, and `more`."""
    watched = {*watched_variables(), *READ}
    kept = {name: value for name, value in os.environ.items() if name not in watched}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "planted"), kept.get("PYTHONPATH")]))
    kept["PATH"] = f"{folder / 'planted'}:{kept['PATH']}"
    return {**kept, "RUNS": str(folder / "runs"), **more}


def doctor(
    folder: Path, *options: str, fault: Fault = Fault("", "", ""), quick: bool = True
) -> tuple[int, dict[str, Any]]:
    """The exit code and the findings by name of a doctor that looks at a machine with a fault."""
    (folder / "runs").mkdir(exist_ok=True)
    if fault.plant is not None:
        fault.plant(folder)
    alone = ("unshare", "--map-root-user", fault.namespace) if fault.namespace else ()
    told = [*options, *fault.options, "--runs", str(folder / "runs")]
    told += ["--quick"] if quick else []
    told += [] if "--processes" in told else ["--processes", "2"]
    told += [] if "--workers" in told else ["--workers", "0"]
    done = subprocess.run(
        [*alone, "bash", "-ec", f'{fault.shell}\nexec "$@"', "bash", *COMMAND, "doctor", "--json", *told],
        env=bare(folder, fault.variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def require(namespace: str | None) -> None:
    if namespace is None:
        return
    asked = ["unshare", "--map-root-user", namespace, "true"]
    if shutil.which("unshare") is None or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip(f"no namespaces of one's own here: {' '.join(asked)}")
