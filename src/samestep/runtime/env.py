"""The environment, read (and, where torch reads it, written) here and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import InputError
from samestep.runtime.rendezvous import READ, Rendezvous, find_rendezvous

_TOKEN = "SAMESTEP_TOKEN"
_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# How variables begin that change what torch, its libraries and launchers do.
_BEGINNINGS = """
    ATEN_ CUBLAS_ CUDA_ CUDNN_ DNNL_ GLOO_ GOMP_ KMP_ LD_ MASTER_ MKL_ NCCL_ NUMEXPR_ NVIDIA_ OMPI_COMM_ OMP_ ONEDNN_
    OPENBLAS_ PMI_ PYTHONDEVMODE PYTHONHASHSEED PYTHONMALLOC PYTORCH_ SLURM_ TORCH
"""
_WATCHED = tuple(_BEGINNINGS.split())


@dataclass(frozen=True)
class Environment:
    """One reading of the environment.

    Attributes:
        token: what the ranks of one job have in common and others do not know, if somebody gave one.
        visible_devices: the devices that CUDA is told to use, as numbers or names with commas between; None for all.
        device_order: how CUDA numbers devices, if somebody said so.
        gloo_interface: the network interface that gloo is told to use, if it is told.
    """

    token: str | None = None
    visible_devices: str | None = None
    device_order: str | None = None
    gloo_interface: str | None = None


def read_environment() -> Environment:
    """Read what Samestep takes from the environment besides who started this process.

    Raises:
        InputError: SAMESTEP_TOKEN is set and empty.
    """
    env = os.environ
    if env.get(_TOKEN) == "":
        raise InputError(f"{_TOKEN} is empty", rule="a secret that all ranks share", do=f"set it, or unset {_TOKEN}")
    return Environment(
        token=env.get(_TOKEN),
        visible_devices=env.get(_VISIBLE),
        device_order=env.get(_ORDER),
        gloo_interface=env.get(_GLOO_INTERFACE),
    )


def read_rendezvous() -> Rendezvous | None:
    """Who started this process as one rank of several; None where nobody did.

    Raises:
        InputError: variables that belong together are there in part, or a value cannot be.
    """
    return find_rendezvous(os.environ)


@dataclass(frozen=True)
class SlurmJob:
    """The job of Slurm's that this process belongs to, in a step of it or in its batch script.

    Attributes:
        restarts: how often it was requeued.
    """

    id: str
    restarts: int


def read_slurm_job() -> SlurmJob | None:
    """The job of Slurm's that this process belongs to, if there is one."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "")
    return SlurmJob(job, int(restarts) if restarts.isdecimal() else 0) if job else None


def launch_variables() -> dict[str, str]:
    """The variables of launchers that are set, in the order in which they are looked at."""
    return {name: os.environ[name] for name in READ if name in os.environ}


def watched_variables() -> dict[str, str]:
    """The variables that are set which change what torch, its libraries and launchers do."""
    watched = (name for name in os.environ if name.startswith(_WATCHED) or name in READ)
    return {name: os.environ[name] for name in sorted(watched)}


def all_values() -> dict[str, str]:
    """The whole environment, for those who must know what not to tell."""
    return dict(os.environ)


def prepare_torch_environment(*, loopback: bool) -> None:
    """Set what torch reads from the environment; call it before torch touches a device or a group.

    Args:
        loopback: all ranks are on this machine, so gloo's connections stay on the loopback interface.
    """
    # cuBLAS is deterministic only with a fixed workspace (NVIDIA cuBLAS documentation, "Reproducibility").
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Counting GPUs through NVML leaves CUDA untouched, so that the process may still be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # So that the number of a device is the one that nvidia-smi shows.
    os.environ.setdefault(_ORDER, "PCI_BUS_ID")
    if loopback:
        os.environ.setdefault(_GLOO_INTERFACE, "lo0" if sys.platform == "darwin" else "lo")


def quiet_torch() -> None:
    """Have torch's C++ code keep its warnings to itself; call it before torch is imported.

    A rank that asks whether a lost one has told why may find the store gone, which torch warns of with pages of frames.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def set_environment(variables: Mapping[str, str]) -> None:
    """Set what a launcher wants this process to have."""
    os.environ.update(variables)
