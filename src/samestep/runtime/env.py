"""The environment, read (and, where torch reads it, written) here and nowhere else."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

# What torchrun and its peers set; Slurm's and MPI's own names are not read yet.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rendezvous:
    """Where one rank of a job that somebody else started finds the others.

    Attributes:
        has_store: the launcher itself hosts the store at that address; else rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    has_store: bool


@dataclass(frozen=True)
class Environment:
    """One reading of the environment.

    Attributes:
        rendezvous: set when another launcher (torchrun) started this process.
        cores: processors this process may run on.
    """

    rendezvous: Rendezvous | None
    cores: int


def read_environment() -> Environment:
    """Read everything Samestep takes from the environment, once."""
    env = os.environ
    rendezvous = None
    if all(name in env for name in _TORCHRUN):
        rendezvous = Rendezvous(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return Environment(rendezvous, cores=len(os.sched_getaffinity(0)))


def prepare_torch_environment(*, loopback: bool) -> None:
    """Set what torch reads from the environment; call it before torch touches a device or a group.

    Args:
        loopback: all ranks are on this machine, so gloo's connections stay on the loopback interface.
    """
    # cuBLAS is deterministic only with a fixed workspace (NVIDIA cuBLAS documentation, "Reproducibility").
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Counting GPUs through NVML leaves CUDA untouched, so that the process may still be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
