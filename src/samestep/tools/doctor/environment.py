"""Checks of environment variables, launcher and network."""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from samestep.distributed.env import read_rendezvous
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.resources import Processors
from samestep.errors import InputError
from samestep.tools.doctor.findings import Finding, Verdict, judged
from samestep.units import plural

_ON = r"(?i)1|true|yes|on"
_SLOW = "much slower; for debugging"
_NO_COMPILE = "step.compile has no effect"
_BITS = "selects other kernels, whose last bits differ; results are equal only if all ranks and runs share the setting"
_PINNED = "pins threads to processors; ranks of one machine may share the same ones"
_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Effect:
    """Effect of an environment variable with a value that matches a regular expression."""

    pattern: str
    effect: str
    verdict: Verdict = "warn"


EFFECTS = {
    "CUDA_LAUNCH_BLOCKING": Effect(_ON, _SLOW),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Effect(_ON, _SLOW),
    "TORCH_DISTRIBUTED_DEBUG": Effect("(?i)detail", _SLOW),
    "NCCL_P2P_DISABLE": Effect(_ON, "slower transfers between GPUs; for debugging"),
    "NCCL_SHM_DISABLE": Effect(_ON, "slower transfers between GPUs; for debugging"),
    "NCCL_IB_DISABLE": Effect(_ON, "sockets instead of InfiniBand between machines"),
    "NCCL_DEBUG": Effect("(?i)info|trace|abort", "verbose output of NCCL; WARN is sufficient", "info"),
    "NVIDIA_TF32_OVERRIDE": Effect(r".+", "overrides step.tf32 of the recipe: results change"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Effect(_ON, "TF32 products regardless of the recipe: results change"),
    "CUBLAS_WORKSPACE_CONFIG": Effect(
        r"(?!:4096:8$|:16:8$).*", "cuBLAS is not deterministic; Samestep sets :4096:8 if the variable is unset"
    ),
    "OMP_PROC_BIND": Effect(r"(?i)true|close|master|primary|spread", _PINNED),
    "GOMP_CPU_AFFINITY": Effect(r".+", _PINNED),
    "KMP_AFFINITY": Effect(r".+", _PINNED, "info"),
    "TORCH_COMPILE_DISABLE": Effect(_ON, _NO_COMPILE, "info"),
    "TORCHDYNAMO_DISABLE": Effect(_ON, _NO_COMPILE, "info"),
    "ATEN_CPU_CAPABILITY": Effect(r".+", _BITS, "info"),
    "ONEDNN_MAX_CPU_ISA": Effect(r".+", _BITS, "info"),
    "DNNL_MAX_CPU_ISA": Effect(r".+", _BITS, "info"),
    "MKL_CBWR": Effect(r".+", _BITS, "info"),
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def check_variables(variables: Mapping[str, str], processors: Processors) -> Iterator[Finding]:
    """Check for variables that change results or speed, and for too many threads of numerical libraries."""
    matches = [
        name for name in EFFECTS if name in variables and re.fullmatch(EFFECTS[name].pattern, variables[name].strip())
    ]
    for name in matches:
        effect, value = EFFECTS[name], variables[name]
        value += f": {effect.effect}" if effect.verdict == "info" else ""
        yield judged(name, effect.verdict, value, effect.effect, f"unset {name}, unless intended")
    if not any(EFFECTS[name].verdict == "warn" for name in matches):
        yield Finding("environment variables", "pass", "none changes results or speed")
    usable = processors.usable
    for name in _THREAD_VARIABLES:
        if name not in variables:
            continue
        number = variables[name].split(",")[0].strip()  # OpenMP: one number per nesting level
        is_valid = number.isdecimal() and 1 <= int(number) <= usable
        yield judged(
            name,
            "pass" if is_valid else "warn",
            number if is_valid else f"{variables[name]}, with {plural(usable, 'usable processor')}",
            f"a number between 1 and {usable}, since every rank starts as many; torch uses step.threads",
            f"export {name}=1, or unset {name}",
        )


def read_launcher() -> Rendezvous | InputError | None:
    """Return this process' rank, the error of commands that refuse the launcher's variables, or None."""
    try:
        return read_rendezvous()
    except InputError as error:
        return error


def check_launcher(
    launcher: Rendezvous | InputError | None, variables: Mapping[str, str], processors: Processors
) -> Iterator[Finding]:
    """Check that the launcher's variables are complete, and that a Slurm task may use its requested processors."""
    if isinstance(launcher, InputError):
        expected, fix = launcher.expected or "complete launcher variables", launcher.fix or "unset these variables"
        yield Finding("launcher", "fail", launcher.value, expected, fix)
    elif launcher is None:
        yield Finding("launcher", "pass", "none; samestep starts the ranks")
    else:
        yield Finding("launcher", "pass", f"{launcher.launcher}: {launcher.why}")
        yield from (Finding("ignored launcher", "info", other) for other in launcher.also)
    name = "SLURM_CPUS_PER_TASK"
    requested = variables.get(name, "")
    if requested.isdecimal() and int(requested) > processors.usable:
        yield Finding(
            name,
            "warn",
            f"{requested}, but this process may use {processors.usable} processors",
            "a task may use its requested processors; since Slurm 22.05 srun ignores the number of sbatch",
            f"srun --cpus-per-task={requested}, or export SRUN_CPUS_PER_TASK={requested}",
        )


# --- network ---


def loopback_error() -> str | None:
    """Return the reason why a listener on loopback is unreachable; None if reachable."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), _TIMEOUT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses of a host name; empty if it does not resolve within some seconds."""
    addresses: set[str] = set()

    def look_up() -> None:
        with suppress(OSError, UnicodeError):  # unknown or invalid name
            addresses.update(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))

    # A name server that does not respond blocks for minutes, and the call cannot be interrupted.
    thread = threading.Thread(target=look_up, name="doctor-resolve", daemon=True)
    try:
        thread.start()
        thread.join(_TIMEOUT_SECONDS)
    except RuntimeError:  # the user's limit of threads
        look_up()
    return tuple(sorted(addresses))


def check_network(loopback: str | None) -> Iterator[Finding]:
    """Check that the host name resolves and that loopback works; `loopback` is the result of `loopback_error`."""
    host = socket.gethostname()
    addresses = resolve(host)
    yield judged(
        "host name",
        "pass" if addresses else "warn",
        f"{host} is {', '.join(addresses)}" if addresses else f"{host} does not resolve",
        "gloo and NCCL resolve the host name in jobs of several machines",
        "add the name to /etc/hosts (127.0.1.1 NAME), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )
    yield judged(
        "loopback interface",
        "pass" if loopback is None else "fail",
        f"a listener on {_LOOPBACK} is {'reachable' if loopback is None else f'unreachable: {loopback}'}",
        "ranks on one machine connect over loopback",
        "ip link set lo up; check for a firewall or a sandbox without network",
    )


def check_interfaces(variables: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    """Check that the interfaces in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME exist."""
    default = next((interface for interface in interfaces if not interface.startswith("lo")), "lo")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = variables.get(name, "")
        if value.startswith("^"):
            yield Finding(name, "info", f"all interfaces except {value[1:]}")
        elif value:
            is_prefix = name.startswith("NCCL") and not value.startswith("=")
            missing = [
                entry
                for entry in value.removeprefix("=").split(",")
                if not any(i.startswith(entry) if is_prefix else i == entry for i in interfaces)
            ]
            available = ", ".join(interfaces)
            yield judged(
                name,
                "fail" if missing else "pass",
                f"no network interface {', '.join(missing)}; available: {available}" if missing else value,
                "an interface of this machine, as listed by `ip link`",
                f"export {name}={default}, or unset {name}",
            )


def check_rendezvous_address(launcher: Rendezvous | InputError | None) -> Iterator[Finding]:
    """Check that the rendezvous address resolves, and that its port is free if this process would listen there."""
    name = "rendezvous address"
    if not isinstance(launcher, Rendezvous) or launcher.address is None:
        yield Finding(name, "info", "a free port of the loopback interface")
        return
    host, port, addresses = launcher.address, launcher.port, resolve(launcher.address)
    yield judged(
        name,
        "pass" if addresses else "fail",
        f"{host} is {', '.join(addresses)}" if addresses else f"MASTER_ADDR {host} does not resolve",
        "every rank connects to rank 0 at this address, and waits for minutes if it does not exist",
        "set MASTER_ADDR to a name or address that resolves: getent hosts NAME",
    )
    local = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    is_local = any(address in local or address.startswith("127.") for address in addresses)
    if port is None or launcher.rank > 0 or launcher.has_store or not is_local:
        return
    error = _try_port(addresses[0], port)
    pid = _port_owner(port) if error is not None else None
    owner = f", by process {pid}" if pid else ""
    end = f"end process {pid} if it is left over from another run" if pid else "see ss -ltnp"
    yield judged(
        "rendezvous port",
        "pass" if error is None else "fail",
        f"{port} is free" if error is None else f"MASTER_PORT {port}: {error}{owner}",
        "a free port, at which rank 0 listens",
        f"{end}; or set MASTER_PORT to a free port, or unset it if all ranks are on this machine",
    )


def _try_port(address: str, port: int) -> str | None:
    """Return the reason why this process cannot listen at a port, or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # With SO_REUSEADDR, as torch's store: connections of an ended job in TIME_WAIT do not block the port.
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        return "in use" if error.errno == errno.EADDRINUSE else str(error)
    return None


def _port_owner(port: int) -> int | None:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None  # macOS requires root
    listeners = (c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr)
    return next((c.pid for c in listeners if c.laddr.port == port), None)
