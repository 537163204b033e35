"""Which launcher started this process, and where its ranks meet: a pure function of the environment's variables."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samestep.errors import InputError
from samestep.runtime.host_list import first_host

Variables = Mapping[str, str]
Launcher = Literal["torchrun", "Slurm", "Open MPI", "MPI"]

# torchrun's, and those of everybody who sets the same by hand.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
# What MPICH's and Intel MPI's own launcher sets. Slurm's PMI sets the first two only, and says the same as Slurm.
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Every variable that decides anything here, in the order in which they are looked at.
READ = (
    *_TORCHRUN,
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
    *_OPEN_MPI,
    "PMIX_NAMESPACE",
    *_PMI,
    "PMI_JOBID",
)

# Ports of ranks on several machines, where nobody gave one: below those that systems hand out to clients.
FIRST_PORT, PORTS = 15000, 10000


@dataclass(frozen=True)
class Rendezvous:
    """Where one rank of a job that somebody else started finds the others.

    Attributes:
        local_rank: number of this rank on its machine, from 0.
        local_size: ranks on this machine; None where nobody says.
        address: where rank 0's store is; None where rank 0 publishes a port on the only machine.
        has_store: the launcher itself hosts the store at that address; else rank 0 does.
        job: tells this attempt of this job from others on the same machine; empty where no variable does.
        restarts: how often the launcher says that it started this job anew.
        why: what was found, for people.
        also: launchers whose variables are there too and were passed over, and why.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    address: str | None
    port: int | None
    has_store: bool = False
    job: str = ""
    restarts: int = 0
    why: str = ""
    also: tuple[str, ...] = ()

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        if self.local_size is None:
            return self.address is not None and is_loopback(self.address)
        return self.local_size == self.world_size


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def find_rendezvous(variables: Variables) -> Rendezvous | None:
    """What the first launcher says that started this process; None where none did.

    Raises:
        InputError: variables that belong together are there in part, or a value cannot be.
    """
    readers: tuple[Callable[[Variables], Rendezvous | None], ...] = (_torchrun, _slurm, _open_mpi, _pmi)
    found = [rendezvous for read in readers if (rendezvous := read(variables)) is not None]
    if not found:
        return None
    first, *others = found
    if first.launcher == "Slurm" and others and not _is_same_rank(first, others[0]):
        # An mpirun in a Slurm job starts its own daemons by srun, and its ranks inherit what Slurm told those.
        first, others = others[0], [first, *others[1:]]
    also = tuple(f"{other.launcher}: {other.why}" for other in others)
    return _met(replace(first, also=also), variables)


def _is_same_rank(one: Rendezvous, other: Rendezvous) -> bool:
    return (one.rank, one.world_size) == (other.rank, other.world_size)


def _torchrun(variables: Variables) -> Rendezvous | None:
    given = [name for name in _TORCHRUN if name in variables]
    if not set(given) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return None  # the other two belong to every launcher
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        raise InputError(
            f"{_listed(given)} {_are(given)} set but {_listed(missing)} {_are(missing)} not",
            rule=f"{_listed(_TORCHRUN)} go together: they are what torchrun sets for each rank",
            do=f"set {_listed(missing)} too (LOCAL_RANK is 0 where a machine has one rank), "
            f"or unset {_listed(given)} where this process is no rank",
        )
    rank, size, local_rank, local_size = _ranks(
        variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in variables else None
    )
    return Rendezvous(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        address=variables["MASTER_ADDR"],
        port=_port(variables),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        why=f"RANK {rank} of WORLD_SIZE {size} are set, as torchrun does",
    )


def _slurm(variables: Variables) -> Rendezvous | None:
    # A batch script has SLURM_PROCID=0 and the number of tasks too, but it is no task of a step.
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    _require(variables, (size_name, "SLURM_LOCALID", "SLURM_JOB_ID"), "what srun sets for each task")
    rank, size, local_rank, _ = _ranks(variables, "SLURM_PROCID", size_name, "SLURM_LOCALID", None)
    if size == 1:
        return None  # such as an interactive shell: who works there starts ranks of their own
    nodes = _number(variables, "SLURM_STEP_NUM_NODES", 1, default=0)
    step, restarts = variables["SLURM_STEP_ID"], _number(variables, "SLURM_RESTART_COUNT", 0, default=0)
    job = variables["SLURM_JOB_ID"]
    return Rendezvous(
        "Slurm",
        rank,
        size,
        local_rank,
        local_size=size if nodes == 1 else None,
        address=None,
        port=None,
        job=f"slurm-{job}.{step}-{restarts}",
        restarts=restarts,
        why=f"task {rank} of {size} in step {job}.{step}, which srun started",
    )


def _open_mpi(variables: Variables) -> Rendezvous | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    _require(variables, _OPEN_MPI, "what Open MPI's mpirun sets for each rank")
    return _mpi("Open MPI", variables, _OPEN_MPI, variables.get("PMIX_NAMESPACE", ""))


def _pmi(variables: Variables) -> Rendezvous | None:
    if "PMI_RANK" not in variables or not {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"} & set(variables):
        return None
    _require(variables, _PMI, "what the mpiexec of MPICH and Intel MPI sets for each rank")
    return _mpi("MPI", variables, _PMI, variables.get("PMI_JOBID", ""))


def _mpi(launcher: Launcher, variables: Variables, names: Sequence[str], job: str) -> Rendezvous | None:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size, local_rank, local_size = _ranks(variables, rank_name, size_name, local_rank_name, local_size_name)
    if size == 1:
        return None
    why = f"{rank_name} {rank} of {size_name} {size} are set, as mpirun does"
    return Rendezvous(
        launcher, rank, size, local_rank, local_size, None, None, job=f"mpi-{job}" if job else "", why=why
    )


def _met(found: Rendezvous, variables: Variables) -> Rendezvous:
    """With address and port, where the launcher's own variables do not say them."""
    if found.port is not None:
        return found
    port = _port(variables) if "MASTER_PORT" in variables else None
    if found.local_size == found.world_size:
        # Without a port rank 0 publishes one that is free: two jobs on one machine cannot meet by mistake.
        return found if port is None else replace(found, address=variables.get("MASTER_ADDR", "127.0.0.1"), port=port)
    if found.launcher != "Slurm":
        _require(
            variables,
            ("MASTER_ADDR", "MASTER_PORT"),
            "where ranks on several machines meet; mpirun -x NAME passes them on",
        )
        return replace(found, address=variables["MASTER_ADDR"], port=port)
    address = variables.get("MASTER_ADDR") or first_host(_node_list(variables))
    return replace(found, address=address, port=port if port is not None else _port_of_step(variables))


def _node_list(variables: Variables) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if name in variables:
            return variables[name]
    raise InputError(
        "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set",
        rule="ranks on several machines meet on the first of them",
        do="set MASTER_ADDR to the host of rank 0",
    )


def _port_of_step(variables: Variables) -> int:
    """A number that no other step near by has: the next jobs' are the next numbers."""
    job, step = _number(variables, "SLURM_JOB_ID", 0), _number(variables, "SLURM_STEP_ID", 0)
    return FIRST_PORT + (job + 101 * step) % PORTS


def _port(variables: Variables) -> int:
    return _number(variables, "MASTER_PORT", 1, 65535)


def _ranks(
    variables: Variables, rank: str, size: str, local_rank: str, local_size: str | None
) -> tuple[int, int, int, int | None]:
    size_found = _number(variables, size, 1)
    rank_found = _number(variables, rank, 0, size_found - 1)
    local_size_found = _number(variables, local_size, 1, size_found) if local_size else None
    return (
        rank_found,
        size_found,
        _number(variables, local_rank, 0, (local_size_found or size_found) - 1),
        local_size_found,
    )


def _number(variables: Variables, name: str, low: int, high: int | None = None, *, default: int | None = None) -> int:
    if name not in variables and default is not None:
        return default
    text = variables[name]
    if text.isascii() and text.isdigit() and int(text) >= low and (high is None or int(text) <= high):
        return int(text)
    rule = f"a whole number from {low} to {high}" if high is not None else f"a whole number from {low} on"
    raise InputError(f"{name} is {text!r}", rule=rule, do="let the launcher set it, or unset it with its kind")


def _require(variables: Variables, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        raise InputError(
            f"{_listed(missing)} {_are(missing)} not set",
            rule=f"{_listed(names)}: {what}",
            do=f"set {_listed(missing)}, or start ranks by samestep train --processes N",
        )


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
