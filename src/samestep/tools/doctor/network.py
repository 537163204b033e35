"""Host name, loopback interface, free ports, and the interfaces that gloo and NCCL are told to use."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from samestep.tools.doctor.finding import Finding, fails, informs, passes, warns

_LOOPBACK = "127.0.0.1"
_PATIENCE_SECONDS = 5.0
_NAME = "host name"


@dataclass(frozen=True)
class Network:
    """What this process finds.

    Attributes:
        host: the machine's own name.
        resolved: its addresses; empty where the name stands for none.
        loopback: why a listener on the loopback interface cannot be reached; None where it can.
        ports: free ports that could be had at the same time.
        interfaces: the names of the network interfaces.
    """

    host: str
    resolved: tuple[str, ...]
    loopback: str | None
    ports: int
    interfaces: tuple[str, ...]


def read_network(ports: int) -> Network:
    """What this process finds.

    Args:
        ports: how many free ones to ask for.
    """
    host = socket.gethostname()
    return Network(
        host=host,
        resolved=resolve(host),
        loopback=_try_loopback(),
        ports=_free_ports(ports),
        interfaces=tuple(psutil.net_if_addrs()),
    )


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name, asked for no longer than some seconds; none where nobody knows it."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
        except (OSError, UnicodeError):
            return  # nobody knows it, or it is no name

    # A name server that is silent can take minutes, which nothing interrupts.
    asking = threading.Thread(target=ask, name="doctor-resolve", daemon=True)
    try:
        asking.start()
        asking.join(_PATIENCE_SECONDS)
    except RuntimeError:  # this user may start no more threads
        ask()
    return tuple(sorted(found))


def _try_loopback() -> str | None:
    try:
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen(1)
            listener.settimeout(_PATIENCE_SECONDS)
            with socket.create_connection(listener.getsockname(), _PATIENCE_SECONDS) as caller:
                answering, _ = listener.accept()
                with answering:
                    caller.sendall(b"?")
                    answering.settimeout(_PATIENCE_SECONDS)
                    return None if answering.recv(1) == b"?" else "the connection ended"
    except OSError as error:
        return str(error)


def _free_ports(wanted: int) -> int:
    with ExitStack() as stack:
        for count in range(wanted):
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind((_LOOPBACK, 0))
                listener.listen(1)
            except OSError:
                return count
    return wanted


def check_host_name(network: Network) -> Finding:
    """Whether the machine knows its own name."""
    if network.resolved:
        return passes(_NAME, f"{network.host} is {', '.join(network.resolved)}")
    return warns(
        _NAME,
        f"{network.host} does not resolve",
        rule="gloo and NCCL look up the machine's own name between machines; on one machine Samestep does without",
        do="add it to /etc/hosts (127.0.1.1 NAME), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def check_loopback(network: Network) -> Iterator[Finding]:
    """Whether ranks on this machine can meet at all."""
    if network.loopback is not None:
        yield fails(
            "loopback interface",
            f"a listener on {_LOOPBACK} cannot be reached: {network.loopback}",
            rule="ranks on one machine talk over the loopback interface",
            do="ip link set lo up; look for a firewall, or a sandbox without network, that keeps it closed",
        )
        return
    yield passes("loopback interface", f"a listener on {_LOOPBACK} can be reached")
    if network.ports:
        yield passes("free ports", f"{network.ports} at the same time")
    else:
        yield fails(
            "free ports",
            "none",
            rule="rank 0 listens on a free port of the loopback interface",
            do="look at net.ipv4.ip_local_port_range, and for a program that holds them all: ss -lt",
        )


def check_interfaces(network: Network, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the interfaces exist that gloo and NCCL are told to use."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        told = variables.get(name)
        if not told:
            continue
        if told.startswith("^"):
            yield informs(name, f"all interfaces but {told[1:]}")
            continue
        missing = [entry for entry in told.removeprefix("=").split(",") if not _exists(name, told, entry, network)]
        if missing:
            other = next((each for each in network.interfaces if not each.startswith("lo")), "lo")
            yield fails(
                name,
                f"there is no network interface {', '.join(missing)}; there are {', '.join(network.interfaces)}",
                rule="an interface of this machine, by the name that `ip link` shows",
                do=f"export {name}={other}, or unset it",
            )
        else:
            yield passes(name, told)


def _exists(name: str, told: str, entry: str, network: Network) -> bool:
    if name.startswith("NCCL") and not told.startswith("="):
        return any(interface.startswith(entry) for interface in network.interfaces)  # NCCL takes a prefix
    return entry in network.interfaces
