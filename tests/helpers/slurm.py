"""A Slurm cluster of virtual nodes on this machine, of Debian's slurm-wlm and munge."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers.started import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


def missing() -> str:
    """Return the reason why no cluster can start here, or an empty text."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs the rights of root"


def _configuration(folder: Path, socket_path: Path, names: Sequence[str]) -> str:
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 State=UNKNOWN"
        for name in names
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path}
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes={",".join(names)} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(folder: Path, count: int = 2) -> Iterator[Mapping[str, str]]:
    """Start the daemons of nodes `n1`, `n2`, ... in an empty folder; yield the variables of Slurm's commands."""
    nodes = [f"n{number + 1}" for number in range(count)]
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    key, socket_path = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder, socket_path, nodes))
    variables = {"SLURM_CONF": str(configuration)}
    paths = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "seed", "log")]
    with ExitStack() as stack:
        munged = ["munged", "--force", "--foreground", f"--socket={socket_path}", f"--key-file={key}", *paths]
        daemons = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
        for command in daemons:
            stack.enter_context(_daemon(command, variables, folder))
            if command is munged:
                wait_until(socket_path.exists, 10)
        wait_until(lambda: slurm(variables, "sinfo", "-h", "-o", "%T %D") == f"idle {count}\n", 30)
        # The names of the virtual nodes belong to no host.
        yield {**variables, "MASTER_ADDR": "127.0.0.1"}
        slurm(variables, "scancel", "--full", "--user=root", "--signal=KILL")


@contextmanager
def _daemon(command: list[str], variables: Mapping[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}-{command[-1]}.out".replace("/", "-")).open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log, cwd=folder)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def slurm(variables: Mapping[str, str], *command: str) -> str:
    """Run a command of Slurm and return its output."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.stdout


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition is true; fail after a time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no success within {seconds:g} s"
        time.sleep(0.1)
