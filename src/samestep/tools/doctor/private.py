"""What a report for strangers must not hold, and a text without it.

What is not known to be harmless is taken out: rather a word too many.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.runtime.env import all_values
from samestep.tools.doctor.variables import EFFECTS

# Variables that may be told as they are, where the value is as plain as `_PLAIN` has it.
_HARMLESS = """
    ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES
    DNNL_MAX_CPU_ISA KMP_AFFINITY LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT MKL_CBWR MKL_NUM_THREADS NCCL_DEBUG
    NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NUMEXPR_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS
    OMP_PROC_BIND OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE
    ONEDNN_MAX_CPU_ISA OPENBLAS_NUM_THREADS PMI_RANK PMI_SIZE PYTHONHASHSEED PYTORCH_NO_CUDA_MEMORY_CACHING RANK
    SLURM_CPUS_PER_TASK SLURM_JOB_NUM_NODES SLURM_LOCALID SLURM_NTASKS SLURM_PROCID SLURM_RESTART_COUNT
    SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE TORCH_COMPILE_DISABLE
    TORCH_DISTRIBUTED_DEBUG TORCHDYNAMO_DISABLE TORCHELASTIC_RESTART_COUNT WORLD_SIZE
"""
HARMLESS = frozenset(_HARMLESS.split())
# Names of variables, which are no tokens.
_KNOWN = HARMLESS | {effect.name for effect in EFFECTS}
_PLAIN = re.compile(r"[0-9,:.()x-]{0,24}|(?i:true|false|on|off|yes|no|info|warn|trace|detail|version|pci_bus_id)")
_PATH = re.compile(r"(?<![\w.~])~?(?:/[\w.@%+=,-]+)+/?")
# Paths that are the same on every machine.
_SAME_PATH = re.compile(r"/(?:dev/shm|dev/null|etc/hosts|proc|sys)(?=/|$)")
_NUMBERS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)|[0-9A-Fa-f]*:[0-9A-Fa-f:.%]+")
_TOKEN = re.compile(r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[A-Za-z])[\w+/=-]{20,}")
# An account that is on every machine tells nothing of a person.
_OPEN_USERS = ("root",)
_SHORTEST = 4
_WORD = re.compile(r"[a-z]+|[0-9]{1,5}")


@dataclass(frozen=True)
class Private:
    """Texts that must not be told, with what stands in their place; longer ones first."""

    words: tuple[tuple[str, str], ...]

    def without(self, value: Any) -> Any:
        """Plain data (texts, lists, mappings of them) without what is private."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self.without(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.without(inner) for inner in value]
        return value

    def _text(self, text: str) -> str:
        for word, stand_in in self.words:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", stand_in, text, flags=re.IGNORECASE)
        text = _PATH.sub(lambda found: found[0] if _SAME_PATH.match(found[0]) else "<path>", text)
        text = _NUMBERS.sub(lambda found: "<address>" if _is_address(found[0]) else found[0], text)
        return _TOKEN.sub(lambda found: found[0] if found[0] in _KNOWN else "<token>", text)


def read_private(more: Iterable[tuple[str, str]] = ()) -> Private:
    """What is private here.

    Args:
        more: further texts, with what stands in their place.
    """
    words = {word: stand_in for word, stand_in in (*_names(), *more) if word and word not in _OPEN_USERS}
    for name, value in all_values().items():
        if len(value) >= _SHORTEST and not is_harmless(name, value) and not _WORD.fullmatch(value):
            words.setdefault(value, f"<{name}>" if name in HARMLESS else "<variable>")
    return Private(tuple(sorted(words.items(), key=lambda entry: -len(entry[0]))))


def is_harmless(name: str, value: str) -> bool:
    """Whether a variable may be told with its value."""
    return name in HARMLESS and _PLAIN.fullmatch(value) is not None


def harmless_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables by name, with those values that may be told."""
    return {name: value if is_harmless(name, value) else "<is set>" for name, value in variables.items()}


def _names() -> Iterator[tuple[str, str]]:
    home, host = Path.home(), socket.gethostname()
    yield str(home), "<home>"
    yield from ((name, "<user>") for name in (_user(), home.name))
    yield from ((name, "<host>") for name in (host, host.partition(".")[0]))
    values = all_values()
    yield from ((values.get(name, ""), "<user>") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # an account without a name, as containers have


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
