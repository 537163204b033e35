"""The address and port where ranks are told to meet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from samestep.runtime.rendezvous import Rendezvous
from samestep.tools.doctor.finding import Finding, fails, informs, passes
from samestep.tools.doctor.network import resolve

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where ranks are told to meet, and what is there.

    Attributes:
        address: MASTER_ADDR, or what a launcher says in its place.
        resolved: the addresses that it stands for; empty where it stands for none.
        port: MASTER_PORT, if it is given.
        is_ours: this process would listen there.
        refusal: why nobody can listen at the port, where that was tried.
        holder: the process that listens there, as far as it can be seen.
    """

    address: str
    resolved: tuple[str, ...] = ()
    port: int | None = None
    is_ours: bool = False
    refusal: str | None = None
    holder: int | None = None


def read_meeting(found: Rendezvous | None, variables: Mapping[str, str]) -> Meeting | None:
    """Where ranks are told to meet; None where they are not told. The port is tried where this process would listen."""
    address = found.address if found is not None else variables.get("MASTER_ADDR")
    port = found.port if found is not None else _port(variables.get("MASTER_PORT", ""))
    if address is None and port is None:
        return None
    address = address or _LOOPBACK
    resolved = resolve(address)
    is_ours = (found is None or (found.rank == 0 and not found.has_store)) and _is_here(resolved)
    refusal = _try_port(resolved[0], port) if is_ours and port is not None else None
    holder = _holder(port) if refusal is not None and port is not None else None
    return Meeting(address, resolved, port, is_ours, refusal, holder)


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else None


def _is_here(addresses: tuple[str, ...]) -> bool:
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return any(address in own or address.startswith("127.") for address in addresses)


def _try_port(address: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        # As torch's store does: what a job that ended left behind in the kernel is no hindrance.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(1)
        except OSError as error:
            return "it is taken" if error.errno == errno.EADDRINUSE else str(error)
    return None


def _holder(port: int) -> int | None:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None  # macOS shows them to root alone
    return next(
        (c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port), None
    )


def check_meeting(meeting: Meeting | None) -> Iterator[Finding]:
    """Whether the address exists where ranks are told to meet, and whether its port is free."""
    if meeting is None:
        yield informs("where ranks meet", "a free port of the loopback interface")
        return
    if not meeting.resolved:
        yield fails(
            "address where ranks meet",
            f"MASTER_ADDR, {meeting.address}, does not resolve",
            rule="every rank connects to rank 0 at this address; it waits for minutes where there is none",
            do="set MASTER_ADDR to a name or number that this machine can look up: getent hosts NAME",
        )
        return
    yield passes("address where ranks meet", f"{meeting.address} is {', '.join(meeting.resolved)}")
    if meeting.port is None or not meeting.is_ours:
        return
    if meeting.refusal is None:
        yield passes("port where ranks meet", f"{meeting.port} is free")
        return
    by = f", by process {meeting.holder}" if meeting.holder else ""
    end = f"end process {meeting.holder} if it is left over from another run" if meeting.holder else "see ss -ltnp"
    yield fails(
        "port where ranks meet",
        f"nobody can listen at MASTER_PORT {meeting.port}: {meeting.refusal}{by}",
        rule="rank 0 listens there",
        do=f"{end}; or set MASTER_PORT to a free port, or unset it where all ranks are on this machine",
    )
