"""Network addresses: resolution, sockets that listen, and the loopback interface."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from typing import Any

from samestep.errors import InputError

_CONNECT_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def free_loopback_socket() -> socket.socket:
    """Return a listening socket on a free port of the loopback interface.

    Raises:
        InputError: the interface is missing or down.
    """
    try:
        listener = socket.create_server((_LOOPBACK, 0), backlog=128)
        socket.create_connection(listener.getsockname(), timeout=_CONNECT_SECONDS).close()
        listener.accept()[0].close()
    except OSError as error:
        raise InputError(
            f"the loopback interface does not work: {error}",
            expected=f"ranks on one machine communicate by {_LOOPBACK}",
            fix="ip link set lo up (a container without a network, such as unshare -n, starts with lo down)",
            code="E_MACHINE",
        ) from error
    return listener


def accepts_connections(address: str, port: int) -> bool:
    """Whether a process listens at an address."""
    with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_SECONDS):
        return True
    return False


def resolve(address: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return address families and socket addresses of a host."""
    try:
        results = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(
            f"the host {address!r} cannot be resolved: {error.strerror}",
            expected="the host of rank 0, from MASTER_ADDR or the list of hosts of the Slurm step",
            fix="set MASTER_ADDR to an address that all ranks can reach",
            code="E_RENDEZVOUS",
        ) from error
    return [(family, socket_address) for family, _, _, _, socket_address in results]


def listen(address: str, port: int) -> socket.socket:
    """Listen on an address of this machine alone; on all interfaces for another address, as behind a proxy."""
    results = resolve(address, port)
    # /etc/hosts may map the machine's own name to a loopback address; the address that others use
    # is unknown then.
    is_local_name = any(is_loopback(str(target[0])) for _, target in results) and not is_loopback(
        address
    )
    attempts = [] if is_local_name else results
    for family, target in [*attempts, (results[0][0], ("", port))]:
        try:
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            return socket.create_server(target, family=family, backlog=1024, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"port {port} at {address} is used by another process",
                    expected="a free port for rank 0: MASTER_PORT, or in Slurm one derived from job and step",
                    fix="set MASTER_PORT to a free port, the same for all ranks",
                    code="E_RENDEZVOUS",
                ) from error
            if error.errno != errno.EADDRNOTAVAIL or not target[0]:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")
