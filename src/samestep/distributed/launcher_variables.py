"""Place of this rank, as the environment variables of its launcher describe it.

Supported are torchrun and Slurm's srun; see docs/guides/launching.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from samestep.errors import InputError

Variables = Mapping[str, str]
Launcher = Literal["torchrun", "Slurm"]

# Set by torchrun, and by users that start ranks by hand.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Set by torchrun alone.
_AGENT = "TORCHELASTIC_RUN_ID"
_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
# Default ports of Slurm steps: below the ephemeral port range.
FIRST_PORT = 15000
PORTS = 10000

_variables_error = partial(InputError, code="E_LAUNCH")


@dataclass(frozen=True)
class RankPlace:
    """Place of this rank in a job, by the variables of its launcher, and the job's store."""

    launcher: Launcher  # name of the launcher
    rank: int  # rank of this process, from 0
    world_size: int  # number of ranks
    local_rank: int  # rank on this machine, from 0
    local_size: int | None  # ranks on this machine; None if unknown
    address: str = ""  # host of the store
    port: int = 0  # port of the store
    has_store: bool = False  # the launcher hosts the store; otherwise rank 0 does
    restarts: int = 0  # number of restarts according to the launcher
    ends_with_parent: bool = False  # not if it was started by hand

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


def find_rank_place(variables: Variables) -> RankPlace | None:
    """Return the place by the variables of the first launcher that has any, or None.

    Raises:
        InputError: a launcher's variables are incomplete or invalid.
    """
    rank_place = _torchrun(variables)
    if rank_place is None and _MPI_SIZE in variables and _number(variables, _MPI_SIZE, 1) > 1:
        raise _variables_error(
            f"{_MPI_SIZE} is set, and torchrun's variables are not",
            expected=f"{', '.join(_TORCHRUN)} in each rank of mpirun",
            fix="set them from those of Open MPI: docs/guides/launching.md",
        )
    return rank_place or _slurm(variables)


def _torchrun(variables: Variables) -> RankPlace | None:
    present = [name for name in _TORCHRUN if name in variables]
    if not set(present) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return None  # MASTER_ADDR and MASTER_PORT belong to every launcher
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        raise _variables_error(
            f"{', '.join(present)} set, but not {', '.join(missing)}",
            expected=f"all of {', '.join(_TORCHRUN)}, which torchrun sets for each rank",
            fix="set the missing ones (LOCAL_RANK is 0 with one rank per machine), or unset "
            f"{', '.join(present)} if this process is not a rank",
        )
    rank_place = _rank_place(variables, "torchrun", (*_TORCHRUN[:3], "LOCAL_WORLD_SIZE"))
    return replace(
        rank_place,
        address=variables["MASTER_ADDR"],
        port=_port(variables),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        ends_with_parent=_AGENT in variables,
    )


def _slurm(variables: Variables) -> RankPlace | None:
    # A batch script has SLURM_PROCID=0 and the number of tasks too, but it is not a task of a step.
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    rank_place = _rank_place(variables, "Slurm", ("SLURM_PROCID", size_name, "SLURM_LOCALID", ""))
    size = rank_place.world_size
    if size == 1:
        return None  # for example an interactive shell, in which users start ranks themselves
    if _number(variables, "SLURM_STEP_NUM_NODES", 1, default=0) == 1:
        rank_place = replace(rank_place, local_size=size)
    return replace(
        rank_place,
        address=_slurm_address(variables, is_on_one_machine=rank_place.local_size == size),
        port=_slurm_port(variables),
        restarts=_number(variables, "SLURM_RESTART_COUNT", 0, default=0),
        ends_with_parent=True,
    )


def _slurm_address(variables: Variables, *, is_on_one_machine: bool) -> str:
    if address := variables.get("MASTER_ADDR"):
        return address
    if is_on_one_machine:
        return "127.0.0.1"
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise _variables_error(
            "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set",
            expected="a list of hosts, the first of which runs rank 0",
            fix="set MASTER_ADDR to the host of rank 0",
        )
    return first_host(hosts)


def _slurm_port(variables: Variables) -> int:
    """Return a port that differs from those of steps with close job numbers."""
    if "MASTER_PORT" in variables:
        return _port(variables)
    job = _number(variables, "SLURM_JOB_ID", 0)
    step = _number(variables, "SLURM_STEP_ID", 0)
    # Steps of a job are 101 ports apart; jobs that start soon after have the ports between.
    return FIRST_PORT + (job + 101 * step) % PORTS


def _rank_place(variables: Variables, launcher: Launcher, names: Sequence[str]) -> RankPlace:
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
    return RankPlace(launcher, rank, size, local_rank, local_size)


def first_host(hosts: str) -> str:
    """Return the first host of a list: `gpu003` for `gpu[003-006,9],login1`."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]  # commas in brackets belong to one entry
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


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
    text = variables.get(name, "")
    if text.isascii() and text.isdigit() and low <= int(text):
        number = int(text)
        if high is None or number <= high:
            return number
    expected = f"a whole number, at least {low}"
    if high is not None:
        expected = f"a whole number from {low} to {high}"
    fix = "let the launcher set its variables, or unset all of them"
    raise _variables_error(f"{name} is {text!r}", expected, fix)
