"""Zip of facts and findings for a bug report, without private data."""

from __future__ import annotations

import getpass
import ipaddress
import json
import platform
import re
import socket
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.distributed.env import environment_copy
from samestep.distributed.launcher_detection import Rendezvous
from samestep.errors import InputError
from samestep.tools.doctor.doctor import Facts
from samestep.tools.doctor.environment import EFFECTS
from samestep.tools.doctor.findings import Finding

_README = """\
Written by `samestep doctor --bundle` for a bug report.

findings.json  all lines of the report
facts.json     the underlying facts: versions, processors, memory, limits, GPUs, variables

Removed or replaced: names of users and machines, paths, addresses, text that looks like a token, and the values of
all but a short list of variables. Review both files before sending them.
"""
_REPORTED = ("plan", "versions", "nvidia", "processors", "resources", "folder")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
# Variables whose values are public if they match `_PUBLIC_VALUE`.
_PUBLIC = """
    ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES
    DNNL_MAX_CPU_ISA KMP_AFFINITY LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT MKL_CBWR MKL_NUM_THREADS NCCL_DEBUG
    NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NUMEXPR_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS
    OMP_PROC_BIND OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE
    ONEDNN_MAX_CPU_ISA OPENBLAS_NUM_THREADS PMI_RANK PMI_SIZE PYTHONHASHSEED PYTORCH_NO_CUDA_MEMORY_CACHING RANK
    SLURM_CPUS_PER_TASK SLURM_JOB_NUM_NODES SLURM_LOCALID SLURM_NTASKS SLURM_PROCID SLURM_RESTART_COUNT
    SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE TORCH_COMPILE_DISABLE
    TORCH_DISTRIBUTED_DEBUG TORCHDYNAMO_DISABLE TORCHELASTIC_RESTART_COUNT WORLD_SIZE
"""
PUBLIC = frozenset(_PUBLIC.split())
# Names of variables match `_TOKEN` but are not tokens.
_VARIABLE_NAMES = PUBLIC | set(EFFECTS)
_PUBLIC_VALUE = re.compile(
    r"[0-9,:.()x-]{0,24}|(?i:true|false|on|off|yes|no|info|warn|trace|detail|version|pci_bus_id)"
)
_PATH = re.compile(r"(?<![\w.~])~?(?:/[\w.@%+=,-]+)+/?")
# Paths that exist on every machine.
_PUBLIC_PATH = re.compile(r"/(?:dev/shm|dev/null|etc/hosts|proc|sys)(?=/|$)")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)|[0-9A-Fa-f]*:[0-9A-Fa-f:.%]+")
_TOKEN = re.compile(r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[A-Za-z])[\w+/=-]{20,}")
# Accounts that exist on every machine.
_PUBLIC_USERS = ("root",)
_MIN_SECRET_LENGTH = 4
_WORD = re.compile(r"[a-z]+|[0-9]{1,5}")


def write_bundle(path: Path, facts: Facts, findings: Sequence[Finding]) -> None:
    """Write README.txt, findings.json and facts.json to a zip.

    Raises:
        InputError: the file cannot be written.
    """
    redaction = read_redaction(_private_facts(facts))
    files = {
        "README.txt": _README,
        "findings.json": redaction.apply([asdict(finding) for finding in findings]),
        "facts.json": {**redaction.apply(_reported_facts(facts)), "variables": public_variables(facts.variables)},
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}",
            expected="--bundle FILE in an existing, writable folder",
            fix="--bundle report.zip",
            code="E_OUTPUT",
        ) from error


def _private_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield private text in the facts, with its replacement."""
    runs = facts.plan.runs
    yield from ((text, "<runs>") for text in (str(runs.absolute()), str(runs), runs.name) if text not in ("runs", "."))
    if isinstance(facts.launcher, Rendezvous) and facts.launcher.address is not None:
        yield facts.launcher.address, "<host>"
    yield from ((gpu.uuid, "<gpu>") for gpu in facts.nvidia.gpus)


def _reported_facts(facts: Facts) -> dict[str, Any]:
    kernel = re.match(r"[\d.]+", platform.release())
    system = {"name": platform.system(), "kernel": kernel[0] if kernel else "", "machine": platform.machine()}
    reported: dict[str, Any] = {name: asdict(getattr(facts, name)) for name in _REPORTED}
    reported["self_test"] = asdict(facts.self_test) if facts.self_test is not None else None
    del reported["plan"]["runs"], reported["folder"]["path"]
    return {"system": system, **reported}


@dataclass(frozen=True)
class Redaction:
    """Private words and their replacements, longest first.

    Text that is not known to be public is removed: a needless removal is better than a leak.
    """

    words: tuple[tuple[str, str], ...]

    def apply(self, value: Any) -> Any:
        """Return plain data (text, lists and mappings of text) without private text."""
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, Mapping):
            return {key: self.apply(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.apply(inner) for inner in value]
        return value

    def _redact(self, text: str) -> str:
        for word, replacement in self.words:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", replacement, text, flags=re.IGNORECASE)
        text = _PATH.sub(lambda match: match[0] if _PUBLIC_PATH.match(match[0]) else "<path>", text)
        text = _ADDRESS.sub(lambda match: "<address>" if _is_address(match[0]) else match[0], text)
        return _TOKEN.sub(lambda match: match[0] if match[0] in _VARIABLE_NAMES else "<token>", text)


def read_redaction(extra: Iterable[tuple[str, str]] = ()) -> Redaction:
    """Collect the private words of this machine, user and environment, and `extra` words, with their replacements."""
    words = {word: text for word, text in (*_names(), *extra) if word and word not in _PUBLIC_USERS}
    for name, value in environment_copy().items():
        if len(value) >= _MIN_SECRET_LENGTH and not is_public(name, value) and not _WORD.fullmatch(value):
            words.setdefault(value, f"<{name}>" if name in PUBLIC else "<variable>")
    return Redaction(tuple(sorted(words.items(), key=lambda entry: -len(entry[0]))))


def is_public(name: str, value: str) -> bool:
    """Return whether the value of a variable may be shown."""
    return name in PUBLIC and _PUBLIC_VALUE.fullmatch(value) is not None


def public_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with public values; `<is set>` replaces other values."""
    return {name: value if is_public(name, value) else "<is set>" for name, value in variables.items()}


def _names() -> Iterator[tuple[str, str]]:
    home, host, variables = Path.home(), socket.gethostname(), environment_copy()
    yield str(home), "<home>"
    yield from ((name, "<host>") for name in (host, host.partition(".")[0]))
    users = (variables.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER"))
    yield from ((name, "<user>") for name in (home.name, *users))
    with suppress(KeyError, OSError):  # an account without a name, as in containers
        yield getpass.getuser(), "<user>"


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
