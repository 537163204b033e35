"""Environment variables. No other module reads or writes `os.environ`."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from samestep.distributed.launcher_variables import RankPlace, find_rank_place
from samestep.errors import InputError

_TOKEN = "SAMESTEP_TOKEN"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SHARE_GPU = "SAMESTEP_SHARE_GPU"
Sharing = Literal["gloo", "nccl"]  # backend of ranks that may use one GPU
_SHARING: dict[str, Sharing | None] = {"0": None, "1": "gloo", "nccl": "nccl"}
# With these and a host of its own for each rank, NCCL takes two ranks on one GPU for ranks of two
# machines, which it connects by sockets. Few blocks and the simple protocol shorten the turns in
# which such ranks compute.
_SHARED_NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_PROTO": "Simple",
}
# Of the fork server and its descendants: process id with which the server must end, or 0, and a
# random text.
FORK_SERVER = "SAMESTEP_FORK_SERVER"
HASH_SEED = "PYTHONHASHSEED"  # of the hashes of text, which decide the order of sets
_SAFE_PATH = "PYTHONSAFEPATH"
# Any text sets the option; this one shows that the user has not set it.
_OWN_SAFE_PATH = "samestep"
# By which libraries and scripts take their process for one of several ranks.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
)
# Folders of caches of libraries.
_CACHE_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR"),
    *("NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"),
)
# Prefixes of variables that change the behaviour of torch, its libraries or launchers.
_PREFIXES = (
    *("ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLOO_", "GOMP_", "KMP_", "LD_", "MASTER_"),
    *("MKL_", "NCCL_", "NUMEXPR_", "NVIDIA_", "OMPI_COMM_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHONDEVMODE", HASH_SEED, "PYTHONMALLOC", "PYTORCH_", SHARE_GPU, "SLURM_", "TORCH"),
)


@dataclass(frozen=True)
class Environment:
    """Settings read from the environment."""

    token: str | None = None  # secret shared by the ranks of one job
    visible_devices: str | None = None  # `CUDA_VISIBLE_DEVICES`; None for all
    sharing: Sharing | None = None  # None: each rank needs a GPU of its own

    @property
    def job_prefix(self) -> str:
        """Prefix of all keys of the job in a store; the token cannot be read from the prefix."""
        if self.token is None:
            return "samestep/no-token"
        return f"samestep/{hashlib.sha256(self.token.encode()).hexdigest()}"


def read_environment() -> Environment:
    """Read all settings except those of a launcher.

    Raises:
        InputError: SAMESTEP_TOKEN is set and empty, or SAMESTEP_SHARE_GPU is not 0, 1 or nccl.
    """
    share_gpu = os.environ.get(SHARE_GPU, "0")
    if share_gpu not in _SHARING:
        raise InputError(
            f"{SHARE_GPU} is {share_gpu!r}",
            expected="0, 1 (ranks that share a GPU communicate by gloo) or nccl (by NCCL, to test "
            "it on one GPU)",
            fix=f"export {SHARE_GPU}=1, or unset {SHARE_GPU}",
            code="E_VALUE",
        )
    token = os.environ.get(_TOKEN)
    if token == "":
        raise InputError(
            f"{_TOKEN} is empty",
            expected="a secret that all ranks share",
            fix=f"set {_TOKEN} to a secret, or unset it",
        )
    return Environment(token, os.environ.get(VISIBLE_DEVICES), _SHARING[share_gpu])


def sharing_variables(*, is_requested: bool) -> dict[str, str]:
    """Return the variable with which ranks may share GPUs, if it is needed.

    Raises:
        InputError: as `read_environment`.
    """
    if read_environment().sharing is None and is_requested:
        return {SHARE_GPU: "1"}
    return {}


def read_wandb_mode() -> str | None:
    """Return the mode of Weights & Biases, or None if WANDB_MODE is not set."""
    return os.environ.get("WANDB_MODE") or None


def read_rank_place() -> RankPlace | None:
    """Return the place of this rank by the variables of its launcher, or None without one.

    Raises:
        InputError: a launcher's variables are incomplete or invalid.
    """
    return find_rank_place(os.environ)


@dataclass(frozen=True)
class SlurmJob:
    """Slurm job of this process."""

    id: str  # job id
    restarts: int  # number of times the job was requeued


def read_slurm_job() -> SlurmJob | None:
    """Return the Slurm job of this process, in a job step or in the batch script."""
    job = os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    if not job:
        return None
    if not restarts.isdecimal():
        restarts = "0"
    return SlurmJob(job, int(restarts))


def state_folder() -> Path:
    """Return the folder for data of this account that belong to no run.

    See the XDG Base Directory Specification.

    Raises:
        InputError: the account has no home folder, and XDG_STATE_HOME is not set.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "samestep"
    if (home := _home()) is None:
        raise InputError(
            "this account has no home folder: no HOME and no entry in passwd",
            expected="HOME, or XDG_STATE_HOME: an absolute path",
            fix="export HOME=/a/folder/of/this/account",
            code="E_MACHINE",
        )
    return home / ".local/state/samestep"


def expand_path(text: str) -> str:
    """Return a path with `~` and `$VAR` expanded; a variable that is not set stays as it is."""
    return os.path.expandvars(os.path.expanduser(text))


def _home() -> Path | None:
    """Return the home folder; None in a container with any user id, or for a relative HOME."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


def library_caches(temporary: str) -> list[str]:
    """Return beginnings of paths of caches that several processes may fill.

    Their entries are named by content, or locked. `temporary` is the folder of temporary files.
    """
    home = str(_home() or temporary)  # in which libraries put their caches without a home
    base = os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    settings = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    folders = [f"{temporary}/torchinductor_", f"{home}/.triton", f"{home}/.nv"]
    folders.append(f"{settings}/matplotlib")
    folders += [f"{base}/{name}" for name in ("huggingface", "matplotlib", "fontconfig", "numba")]
    folders += [f"{base}/{name}" for name in ("torch", "torch_extensions", "triton")]
    return folders + [path for name in _CACHE_VARIABLES if (path := os.environ.get(name))]


def relevant_variables() -> dict[str, str]:
    """Return all set variables that change the behaviour of torch, its libraries or launchers."""
    names = (name for name in os.environ if name.startswith(_PREFIXES) or name in RANK_VARIABLES)
    return {name: os.environ[name] for name in sorted(names)}


def all_variables() -> dict[str, str]:
    """Return a copy of the environment of this process."""
    return dict(os.environ)


def environment_of(process: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    try:
        return dict(psutil.Process(process).environ())
    except (psutil.Error, OSError):  # it has ended, is another user's, or there is no /proc
        return {}


def prepare_torch_environment(*, loopback: bool, deterministic: bool = True) -> None:
    """Set torch's variables that are not set yet; before torch uses a device or a group.

    Args:
        loopback: all ranks are on this machine, so gloo uses the loopback interface.
        deterministic: kernels compute the same bits each time.
    """
    if deterministic:
        # cuBLAS is deterministic only with a fixed workspace (NVIDIA cuBLAS documentation,
        # "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Counting GPUs through NVML leaves CUDA uninitialized, so the process can still be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Device numbers as in nvidia-smi.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Otherwise a thread of torch ends the process after an error of CUDA, before the main thread
    # reports the error.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # After an error of NCCL, the thread waits up to a minute for a file about the last collectives.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
    if loopback:
        interface = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def prepare_shared_nccl(rank: int, *, loopback: bool) -> None:
    """Set NCCL's variables with which ranks can share a GPU, before NCCL is used.

    With `loopback`, all ranks are on this machine.
    """
    # NCCL refuses two ranks with the same host and GPU (ncclInvalidUsage, "Duplicate GPU
    # detected").
    os.environ.setdefault("NCCL_HOSTID", f"samestep-{rank}")
    for name, value in _SHARED_NCCL.items():
        os.environ.setdefault(name, value)
    if loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def silence_torch_warnings() -> None:
    """Suppress warnings of torch's C++ code, such as pages of frames, before torch is imported."""
    # A rank may find the store gone after another rank has reported a failure.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def hide_ranks() -> None:
    """Remove the launcher's variables: libraries and scripts take this process for the only one."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables in this process; those without a value are removed."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def changed_variables(before: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ from those of `before`; None stands for removed ones."""
    return {
        name: os.environ.get(name)
        for name in {*before, *os.environ}
        if os.environ.get(name) != before.get(name)
    }


@contextmanager
def variables_of_subprocess(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for Python processes of the launcher that start inside the block.

    The current folder is kept off their import path: a file random.py there would replace Python's
    module.
    """
    safe_path = {} if os.environ.get(_SAFE_PATH) else {_SAFE_PATH: _OWN_SAFE_PATH}
    variables = {**variables, **safe_path}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        set_environment(before)


@contextmanager
def visible_devices_kept(report: Callable[[str | None], None]) -> Iterator[None]:
    """Ignore changes of CUDA_VISIBLE_DEVICES in the block, after `report(value or None)`."""
    # The class: Python looks up special methods there, not in the object.
    variables: Any = type(os.environ)
    set_before = variables.__setitem__
    delete_before = variables.__delitem__

    def set_item(self: Any, name: str, value: str) -> None:
        if name == VISIBLE_DEVICES:
            report(value)
        else:
            set_before(self, name, value)

    def delete_item(self: Any, name: str) -> None:
        if name == VISIBLE_DEVICES:
            report(None)
        else:
            delete_before(self, name)

    variables.__setitem__ = set_item
    variables.__delitem__ = delete_item
    try:
        yield
    finally:
        variables.__setitem__ = set_before
        variables.__delitem__ = delete_before


def enter_fork_server() -> int:
    """Restore the import path of later subprocesses of a new fork server.

    Returns:
        The process with which the server must end; 0 in any other process.
    """
    if os.environ.get(_SAFE_PATH) == _OWN_SAFE_PATH:
        del os.environ[_SAFE_PATH]
    launcher, _, _ = os.environ.get(FORK_SERVER, "").partition("-")
    return int(launcher or 0)
