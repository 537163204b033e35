"""Detection of the launcher that started this process, from environment variables.

Supported are torchrun, Slurm's srun and Open MPI's mpirun; see docs/guides/launching.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from zlib import crc32

from samestep.errors import InputError

Variables = Mapping[str, str]
Launcher = Literal["torchrun", "Slurm", "Open MPI"]

# Set by torchrun, and by users that start ranks by hand.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Set by torchrun alone.
_AGENT = "TORCHELASTIC_RUN_ID"
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
# All variables that this module reads, in the order of precedence.
LAUNCH_VARIABLES = (
    *(*_TORCHRUN, "LOCAL_WORLD_SIZE", _AGENT, "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"),
    *(*_OPEN_MPI, "PMIX_NAMESPACE"),
)

# Default ports of Slurm steps and MPI jobs: below the ephemeral port range.
FIRST_PORT = 15000
PORTS = 10000

# One entry of Slurm's compressed list of hosts: text and bracketed lists of numbers and ranges.
_HOST = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]\s]+\])+")
_RANGES = re.compile(r"\[([^\[\]]+)\]")
_NUMBERS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_variables_error = partial(InputError, code="E_LAUNCH")


@dataclass(frozen=True)
class Rendezvous:
    """One rank of a job that another launcher started, and the address of the job's store."""

    launcher: Launcher  # name of the launcher
    rank: int  # rank of this process, from 0
    world_size: int  # number of ranks
    local_rank: int  # rank on this machine, from 0
    local_size: int | None  # ranks on this machine; None if unknown
    address: str = ""  # host of the store
    port: int = 0  # port of the store
    has_store: bool = False  # the launcher hosts the store; otherwise rank 0 does
    restarts: int = 0  # number of restarts according to the launcher
    # Variable of each rank that the launcher's process lacks; None for ranks started by hand.
    rank_variable: str | None = None

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        if self.local_size is None:
            return is_loopback(self.address)
        return self.local_size == self.world_size


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def find_rendezvous(variables: Variables) -> Rendezvous | None:
    """Return the rendezvous of the first launcher with variables in the environment, or None.

    Raises:
        InputError: a launcher's variables are incomplete or invalid.
    """
    matches = [
        match for read in (_torchrun, _slurm, _open_mpi) if (match := read(variables)) is not None
    ]
    if not matches:
        return None
    first, *others = matches
    if first.launcher == "Slurm" and others:
        other = others[0]
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            # mpirun inside a Slurm job starts its daemons by srun, and its ranks inherit the
            # variables of the daemons.
            first = other
    return _with_address(first, variables)


def _torchrun(variables: Variables) -> Rendezvous | None:
    present = [name for name in _TORCHRUN if name in variables]
    if not set(present) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return None  # MASTER_ADDR and MASTER_PORT belong to every launcher
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        raise _variables_error(
            f"{_listed(present)} {_are(present)} set but {_listed(missing)} {_are(missing)} not",
            expected=f"all of {_listed(_TORCHRUN)}, which torchrun sets for each rank",
            fix=f"set {_listed(missing)} (LOCAL_RANK is 0 with one rank per machine), or unset "
            f"{_listed(present)} if this process is not a rank",
        )
    agent = _AGENT if _AGENT in variables else None
    rendezvous = _rendezvous(variables, "torchrun", (*_TORCHRUN[:3], "LOCAL_WORLD_SIZE"))
    return replace(
        rendezvous,
        address=variables["MASTER_ADDR"],
        port=_port(variables),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        rank_variable=agent,
    )


def _slurm(variables: Variables) -> Rendezvous | None:
    # A batch script has SLURM_PROCID=0 and the number of tasks too, but it is not a task of a step.
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    names = (size_name, "SLURM_LOCALID", "SLURM_JOB_ID")
    _require(variables, names, "srun sets them for each task")
    rendezvous = _rendezvous(variables, "Slurm", ("SLURM_PROCID", size_name, "SLURM_LOCALID", ""))
    size = rendezvous.world_size
    if size == 1:
        return None  # for example an interactive shell, in which users start ranks themselves
    if _number(variables, "SLURM_STEP_NUM_NODES", 1, default=0) == 1:
        rendezvous = replace(rendezvous, local_size=size)
    restarts = _number(variables, "SLURM_RESTART_COUNT", 0, default=0)
    return replace(rendezvous, restarts=restarts, rank_variable="SLURM_PROCID")


def _open_mpi(variables: Variables) -> Rendezvous | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    _require(variables, _OPEN_MPI, "Open MPI's mpirun sets them for each rank")
    rendezvous = _rendezvous(variables, "Open MPI", _OPEN_MPI)
    if rendezvous.world_size == 1:
        return None
    return replace(rendezvous, rank_variable=_OPEN_MPI[0])


def _rendezvous(variables: Variables, launcher: Launcher, names: Sequence[str]) -> Rendezvous:
    """Return the ranks of a launcher, without the address of their store.

    `names` are the variables of rank, size, local rank and, perhaps missing, local size.
    """
    rank_name, size_name, local_rank_name, local_size_name = names
    size = _number(variables, size_name, 1)
    rank = _number(variables, rank_name, 0, size - 1)
    local_size = None
    if local_size_name in variables:
        local_size = _number(variables, local_size_name, 1, size)
    local_rank = _number(variables, local_rank_name, 0, (local_size or size) - 1)
    return Rendezvous(launcher, rank, size, local_rank, local_size)


def _with_address(rendezvous: Rendezvous, variables: Variables) -> Rendezvous:
    """Add address and port if the launcher's own variables have none."""
    if rendezvous.launcher == "torchrun":
        return rendezvous
    if rendezvous.launcher == "Open MPI" and not rendezvous.is_on_one_machine:
        reason = (
            "the address of rank 0 for ranks on several machines; mpirun -x NAME passes them on"
        )
        _require(variables, ("MASTER_ADDR", "MASTER_PORT"), reason)
    if "MASTER_PORT" in variables:
        port = _port(variables)
    else:
        port = _default_port(rendezvous.launcher, variables)
    if rendezvous.is_on_one_machine:
        return replace(rendezvous, address=variables.get("MASTER_ADDR", "127.0.0.1"), port=port)
    hosts = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST"))
    if not variables.get("MASTER_ADDR") and hosts is None:
        raise _variables_error(
            "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set",
            expected="a list of hosts, the first of which runs rank 0",
            fix="set MASTER_ADDR to the host of rank 0",
        )
    address = variables.get("MASTER_ADDR") or first_host(hosts or "")
    return replace(rendezvous, address=address, port=port)


def _default_port(launcher: Launcher, variables: Variables) -> int:
    """Return a port that differs from those of steps of Slurm with close job numbers."""
    if launcher == "Slurm":
        job = _number(variables, "SLURM_JOB_ID", 0)
        step = _number(variables, "SLURM_STEP_ID", 0)
        return FIRST_PORT + (job + 101 * step) % PORTS
    if "PMIX_NAMESPACE" not in variables:
        _require(variables, ("MASTER_PORT",), "a port for rank 0; mpirun -x NAME passes it on")
    return FIRST_PORT + crc32(variables["PMIX_NAMESPACE"].encode()) % PORTS


def first_host(hosts: str) -> str:
    """Return the first host of a list: `gpu003` for `gpu[003-006,9],login1`.

    Raises:
        InputError: the list is invalid.
    """
    entry = _HOST.match(hosts)
    is_complete = entry is not None and hosts[entry.end() : entry.end() + 1] in ("", ",")
    if not entry or not is_complete or not all(map(_NUMBERS.fullmatch, _RANGES.findall(entry[0]))):
        raise _variables_error(
            f"the list of hosts {hosts!r} is invalid",
            expected="comma-separated names, with numbers and ranges in brackets, such as "
            "gpu[003-006,9],login1",
            fix="set MASTER_ADDR to the host of rank 0, and MASTER_PORT",
        )
    return _RANGES.sub(lambda ranges: re.split("[-,]", ranges[1])[0], entry[0])


def _port(variables: Variables) -> int:
    return _number(variables, "MASTER_PORT", 1, 65535)


def _number(
    variables: Variables,
    name: str,
    low: int,
    high: int | None = None,
    *,
    default: int | None = None,
) -> int:
    if name not in variables and default is not None:
        return default
    text = variables[name]
    if text.isascii() and text.isdigit() and low <= int(text):
        number = int(text)
        if high is None or number <= high:
            return number
    expected = f"a whole number, at least {low}"
    if high is not None:
        expected = f"a whole number from {low} to {high}"
    fix = "let the launcher set its variables, or unset all of them"
    raise _variables_error(f"{name} is {text!r}", expected, fix)


def _require(variables: Variables, names: Sequence[str], reason: str) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        raise _variables_error(
            f"{_listed(missing)} {_are(missing)} not set",
            expected=f"{_listed(names)}: {reason}",
            fix=f"set {_listed(missing)}, or start ranks with samestep train --processes N",
        )


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    if first:
        return f"{', '.join(first)} and {last}"
    return last


def _are(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "is"
    return "are"
