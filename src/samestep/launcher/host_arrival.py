"""Arrival of the launchers of several hosts at the first host.

The launcher of the first host listens at its port; those of the other hosts connect and send their token and number of
ranks. After the arrival of all hosts, the first one numbers the ranks host by host and sends each host its place.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, NoReturn

from samestep.distributed.addresses import interface_of, listen, resolve
from samestep.distributed.env import read_environment
from samestep.distributed.logging import logger
from samestep.distributed.signals import STOP_SIGNALS, handled_signals, open_terminals, redirect_to_null
from samestep.errors import InputError, RunError
from samestep.launcher.failure import StoppedError
from samestep.launcher.hosts import (
    BEAT_SECONDS,
    RECEIVE_BYTES,
    HostGroup,
    HostsConfig,
    Link,
    Place,
    raise_end,
    silence_limit,
)
from samestep.launcher.watchdog import ProgressTimer

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 5.0  # limit of the time until a new connection has sent its first message
_PROTOCOL = "samestep-hosts-1"
_HELLO_TYPES = {"protocol": str, "token": str, "hosts": list, "host": int, "processes": int}


@contextmanager
def join_hosts(config: HostsConfig, processes: int, limit: float) -> Iterator[HostGroup]:
    """Wait for all hosts and yield their group; an error inside the block ends the launch on all hosts.

    Args:
        config: list of hosts.
        processes: number of ranks on this host.
        limit: seconds within which all hosts arrive, and of which the longest silence of a host is a part.

    Raises:
        InputError: the first host has refused this one, cannot be resolved, or cannot listen at the port.
        RunError: a host did not arrive.
        StoppedError: a stop signal arrived while no ranks were running, or another host was stopped.
    """
    lost_after = silence_limit(limit)
    links: dict[int, Link] = {}
    closed = threading.Event()

    def beat() -> None:
        while not closed.wait(BEAT_SECONDS):
            for link in list(links.values()):
                link.beat()

    thread = threading.Thread(target=beat, name="samestep-hosts", daemon=True)
    thread.start()
    group = HostGroup(config, Place((processes,), 0, "", 0), links, lost_after)
    try:
        arrive = _admit_hosts if config.rank == 0 else _arrive
        with _stop_by_signal("no ranks were running"):
            with _stop_by_signal("the hosts waited for one another"):
                group.place, group.listener = arrive(config, processes, limit, lost_after, links)
            yield group
    except BaseException as error:  # boundary: every end of this host is the end of all
        group.conclude(error)
        raise
    finally:
        closed.set()
        thread.join()
        for link in links.values():
            link.close()
        if group.listener is not None:
            group.listener.close()


def _stop_by_signal(activity: str) -> AbstractContextManager[None]:
    """Raise a `StoppedError` at the first stop signal in the block; worker groups install handlers of their own."""
    terminals, is_stopped = open_terminals(), False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        if number == signal.SIGHUP:
            redirect_to_null(terminals)
        if not is_stopped:
            is_stopped = True
            raise StoppedError(
                f"stopped by {signal.Signals(number).name} while {activity}",
                fix="start the command on all hosts again",
            )

    return handled_signals(STOP_SIGNALS, stop)


def _admit_hosts(
    config: HostsConfig, processes: int, limit: float, lost_after: float, links: dict[int, Link]
) -> tuple[Place, socket.socket | None]:
    """On the first host: wait for the others, number the ranks, and send each host its place."""
    deadline, refused = time.monotonic() + limit, dict[str, None]()
    counts, interface = {0: processes}, None
    with listen(config.name, config.port) as listener:
        while missing := [name for host, name in enumerate(config.addresses) if host not in counts]:
            if time.monotonic() > deadline:
                _raise_missing(config, missing, limit, list(refused))
            for host in _ended(links):  # the host may arrive again
                links.pop(host).close()
                del counts[host]
            if not wait([listener, *(link.connection for link in links.values())], _RETRY_SECONDS) or not wait(
                [listener], 0
            ):
                continue
            connection, (address, *_) = listener.accept()
            if (hello := _hello(connection)) is None:
                connection.close()
                continue
            link = Link(connection, int(hello["host"]))
            if problem := _problem(config, hello, counts):
                text = f"host {hello['host']}, at {address}, was not admitted: {problem}"
                if text not in refused:
                    logger.warning(text)
                refused[text] = None
                link.send("refused", problem)
                link.close()
                continue
            links[link.host], counts[link.host] = link, int(hello["processes"])
            interface = interface_of(connection.getsockname()[0])
    store = listen(config.name, 0)
    numbers, port = tuple(counts[host] for host in range(len(config.addresses))), store.getsockname()[1]
    for link in links.values():
        link.send("place", [numbers, port])
    return Place(numbers, 0, config.name, port, interface), store


def _ended(links: dict[int, Link]) -> list[int]:
    """Return the hosts that have ended before the start; raise the error of a stop request."""
    for link in links.values():
        for message in link.messages():
            raise_end(message)
    return [host for host, link in links.items() if link.is_closed]


def _hello(connection: socket.socket) -> dict[str, Any] | None:
    """Return the first message of a launcher; None for a connection of another kind."""
    connection.settimeout(_HELLO_SECONDS)
    data = b""
    with suppress(OSError):
        while not data.endswith(b"\n") and len(data) < RECEIVE_BYTES:
            part = connection.recv(RECEIVE_BYTES)
            if not part:
                return None
            data += part
    try:
        kind, hello = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return None
    if kind != "hello" or not isinstance(hello, dict):
        return None
    return hello if all(isinstance(hello.get(name), kind) for name, kind in _HELLO_TYPES.items()) else None


def _problem(config: HostsConfig, hello: dict[str, Any], counts: dict[int, int]) -> str | None:
    """Return why a host cannot be admitted, if so."""
    if hello["protocol"] != _PROTOCOL:
        return "it runs another version of Samestep"
    if hello["token"] != read_environment().job_prefix:
        return "it has another SAMESTEP_TOKEN"
    if tuple(hello["hosts"]) != config.addresses:
        return f"it has --hosts {','.join(map(str, hello['hosts']))}, the first host {','.join(config.addresses)}"
    if hello["host"] in counts:
        return f"--host-rank {hello['host']} has arrived already"
    return None


def _raise_missing(config: HostsConfig, missing: list[str], limit: float, refused: list[str]) -> NoReturn:
    hosts = f"host{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    raise RunError(
        "\n    ".join([f"{hosts} did not arrive at {config.name}:{config.port} within {limit:g} s", *refused]),
        expected="the same command on every host, with its own --host-rank and the same SAMESTEP_TOKEN",
        fix="read the output of the missing hosts, and check for a firewall between machines",
        code="E_RENDEZVOUS",
    )


def _arrive(
    config: HostsConfig, processes: int, limit: float, lost_after: float, links: dict[int, Link]
) -> tuple[Place, socket.socket | None]:
    """On another host: connect to the first one until it admits this host, and wait for the place of this host."""
    deadline, address = time.monotonic() + limit, config.addresses[0]
    resolve(address, config.port)
    hello = {
        "protocol": _PROTOCOL,
        "token": read_environment().job_prefix,
        "hosts": config.addresses,
        "host": config.rank,
        "processes": processes,
    }
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, config.port), timeout=_CONNECT_SECONDS)
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        link = links[0] = Link(connection, 0)
        link.send("hello", hello)
        timer = ProgressTimer(lost_after)
        while not link.is_closed and timer.seconds_without_change(link.received) < lost_after:
            for message in link.messages(BEAT_SECONDS):
                if message.kind == "place":
                    numbers, port = message.value
                    interface = interface_of(connection.getsockname()[0])
                    return Place(tuple(numbers), config.rank, address, port, interface), None
                if message.kind == "refused":
                    raise InputError(
                        f"the first host, {address}, has refused this one: {message.value}",
                        expected="the same command on every host, with its own --host-rank and the same SAMESTEP_TOKEN",
                        fix="compare the commands and SAMESTEP_TOKEN of both hosts",
                        code="E_HOSTS",
                    )
                raise_end(message)
        links.pop(0).close()
        time.sleep(_RETRY_SECONDS)
    raise RunError(
        f"the first host, {address}:{config.port}, has admitted no host within {limit:g} s",
        expected="the same command on every host; the first one listens at this address",
        fix="start the command on the first host, with --host-rank 0, and check for a firewall between machines",
        code="E_RENDEZVOUS",
    )
