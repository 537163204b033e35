"""The ranks of a job that another launcher started, before there is a process group: their store, and roll-in."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.errors import InputError, RunError
from samestep.runtime.env import prepare_torch_environment, read_environment
from samestep.runtime.port_file import free_loopback_socket, published, wait_for_port
from samestep.runtime.rendezvous import Rendezvous, is_loopback
from samestep.runtime.roll_in import job_prefix, roll_in
from samestep.runtime.watchdog import HANG_AFTER

TIMEOUT = timedelta(seconds=HANG_AFTER)
_LOOPBACK = "127.0.0.1"
_NAP_SECONDS, _CONNECT_SECONDS = 0.1, 5.0


@dataclass(frozen=True)
class Job:
    """What the ranks of one attempt share.

    Attributes:
        store: seen by the ranks of this attempt alone.
        restarts: how often this job was started anew; the same on every rank.
        host: address and port of whoever hosts the store.
        is_guest: the launcher hosts it, not rank 0.
        hang_after: for how long ranks may make no progress, in seconds.
    """

    rank: int
    size: int
    store: dist.Store
    restarts: int
    host: tuple[str, int]
    is_guest: bool
    hang_after: float

    def is_store_there(self) -> bool:
        """Whether somebody still listens where the store is: torch prints pages when it finds out by itself."""
        return _answers(*self.host)


_joined: list[Job] = []


def join_job(found: Rendezvous, timeout: timedelta = TIMEOUT, hang_after: float = HANG_AFTER) -> Job:
    """Meet the other ranks; a process does so once, whatever asks for it first.

    Raises:
        InputError: this rank cannot listen, or nobody can be reached, where it was told to.
        RunError: the store is not there in time, or ranks are not.
    """
    if not _joined:
        prepare_torch_environment(loopback=found.is_on_one_machine)
        with _store(found, timeout) as (store, host):
            part = dist.PrefixStore(job_prefix(read_environment().token), store)
            # The agent's store outlives an attempt. Its count of restarts does not tell: on several machines each
            # agent counts its own.
            earlier = part.add("starts", 1) - 1 if found.has_store and found.rank == 0 else 0
            here, restarts = roll_in(
                part,
                rank=found.rank,
                size=found.world_size,
                restarts=max(found.restarts, earlier),
                timeout=timeout,
                hint=_hint(found),
            )
        _joined.append(Job(found.rank, found.world_size, here, restarts, host, found.has_store, hang_after))
    return _joined[0]


@contextmanager
def _store(found: Rendezvous, timeout: timedelta) -> Iterator[tuple[dist.Store, tuple[str, int]]]:
    """The store of the job, and where it is; where its port is published, it is for as long as the block runs."""
    if found.port is None:
        job = found.job or f"mpi-{_parent()}"
        if found.rank == 0:
            listener = free_loopback_socket()
            port = listener.getsockname()[1]
            with published(job, port):
                yield hosted(listener, _LOOPBACK, port, found.world_size, timeout), (_LOOPBACK, port)
        else:
            port = wait_for_port(job, timeout.total_seconds())
            yield _connected(replace(found, address=_LOOPBACK, port=port), timeout), (_LOOPBACK, port)
        return
    assert found.address is not None
    if found.rank == 0 and not found.has_store:
        listener = _listener(found.address, found.port)
        store = hosted(listener, found.address, found.port, found.world_size, timeout)
    else:
        store = _connected(found, timeout)
    yield store, (found.address, found.port)


def hosted(listener: socket.socket, address: str, port: int, size: int, timeout: timedelta) -> dist.Store:
    """A store behind a socket that listens: one that opens a port of its own listens on every interface."""
    return dist.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _connected(found: Rendezvous, timeout: timedelta) -> dist.Store:
    assert found.address is not None and found.port is not None
    _resolved(found.address, found.port)
    # Tried here first: torch's own attempts end with pages of C++ frames.
    deadline = time.monotonic() + timeout.total_seconds()
    while not _answers(found.address, found.port):
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {found.rank} of {found.world_size} reached nobody at {found.address}:{found.port} within "
                f"{timeout.total_seconds():g} s",
                rule="rank 0, or the launcher, listens there",
                do=_hint(found),
            )
        time.sleep(_NAP_SECONDS)
    return dist.TCPStore(found.address, found.port, found.world_size, False, timeout, wait_for_workers=False)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _resolved(address: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and addresses of a host.

    Raises:
        InputError: nobody knows it.
    """
    try:
        known = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(
            f"the host {address!r} cannot be found: {error.strerror}",
            rule="MASTER_ADDR, or the first host of the Slurm step, is the host of rank 0",
            do="set MASTER_ADDR to an address that all ranks can reach",
        ) from error
    return [(family, place) for family, _, _, _, place in known]


def _listener(address: str, port: int) -> socket.socket:
    """A socket on that address alone if it is one of this machine's, else (behind a proxy, say) on all of them.

    Raises:
        InputError: the address has no meaning here, or somebody has the port.
    """
    known = _resolved(address, port)
    # The file of hosts may give a machine's own name a loopback address: then nobody can tell which one others reach.
    named_loopback = any(is_loopback(str(place[0])) for _, place in known) and not is_loopback(address)
    for family, place in [] if named_loopback else known:
        try:
            return _bound(family, place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(address, port) from error
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    try:
        return _bound(known[0][0], ("", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(address, port) from error


def _bound(family: int, place: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _taken(address: str, port: int) -> InputError:
    return InputError(
        f"port {port} at {address} is taken by another process",
        rule="rank 0 listens on MASTER_PORT, or in Slurm on a port made of the numbers of job and step",
        do="set MASTER_PORT to a free port, the same for all ranks",
    )


def _parent() -> str:
    """The process that started all ranks of this machine, and when it began (proc(5))."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "0"
    return f"{parent}-{began}"


def _hint(found: Rendezvous) -> str:
    if found.address is not None and is_loopback(found.address) and not found.is_on_one_machine:
        return f"MASTER_ADDR is {found.address}, which no other machine reaches: set it to the address of rank 0's"
    return "look at the output of the ranks that are missing, and whether a firewall is between machines"
