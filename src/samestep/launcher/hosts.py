"""Launchers of several hosts, and the messages between them.

Each host runs the same command. The launchers of the other hosts have a connection to that of the first host. Messages
are lines of JSON; an empty line every second shows that a host is alive.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from samestep.distributed.status import ranks_text
from samestep.errors import EXIT_FAILED, InputError
from samestep.launcher.failure import Failure, RankError, StoppedError
from samestep.launcher.watchdog import ProgressTimer

BEAT_SECONDS = 1.0
_LOST_SECONDS = 60.0  # longest silence of a host: its launcher, its machine or its link is lost
RECEIVE_BYTES = 1 << 16
_SEND_SECONDS = 5.0  # limit of the time to send one message
_CLOSE_SECONDS = 1.0  # limit of the time until another host has received the last messages


@dataclass(frozen=True)
class HostsConfig:
    """Hosts of a launch as this host was given them."""

    addresses: tuple[str, ...]  # of all hosts; the launcher of the first one listens
    rank: int  # of this host, from 0
    port: int  # at which the first host listens

    def __post_init__(self) -> None:
        if "" in self.addresses or len(set(self.addresses)) < len(self.addresses):
            value = f"--hosts {','.join(self.addresses)}"
            raise InputError(value, expected="different hosts", fix="--hosts node-0,node-1", code="E_HOSTS")
        if not 0 <= self.rank < len(self.addresses):
            raise InputError(
                f"--host-rank {self.rank} with {len(self.addresses)} hosts",
                expected=f"a number from 0 to {len(self.addresses) - 1}: the place of this host in --hosts",
                fix="--host-rank 0 on the first host, 1 on the second",
                code="E_HOSTS",
            )
        if not 0 < self.port < 1 << 16:
            raise InputError(f"--port {self.port}", expected="1 to 65535", fix="--port 29500", code="E_HOSTS")

    @property
    def name(self) -> str:
        """Entry of this host in the list."""
        return self.addresses[self.rank]


class Message(NamedTuple):
    """One message of another host."""

    kind: str
    value: Any


class Link:
    """Connection to the launcher of another host."""

    def __init__(self, connection: socket.socket, host: int) -> None:
        self.connection, self.host = connection, host
        self._lock = threading.Lock()
        self._buffer = b""
        self._messages: deque[Message] = deque()
        self.received = 0  # number of bytes
        self.is_closed = False
        self._is_broken = False
        connection.settimeout(_SEND_SECONDS)

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message; a lost connection is closed."""
        self._send(json.dumps([kind, value]).encode() + b"\n")

    def beat(self) -> None:
        """Show that this launcher is alive."""
        self._send(b"\n")

    def _send(self, data: bytes) -> None:
        with self._lock:
            try:
                if not self.is_closed and not self._is_broken:
                    self.connection.sendall(data)
            except OSError:  # the reader of the connection reports it, after the last messages
                self._is_broken = True

    def messages(self, seconds: float = 0.0) -> Iterator[Message]:
        """Yield the messages that have arrived, or that arrive within some seconds. A later call yields the rest."""
        if not self._messages and not self.is_closed and wait([self.connection], seconds):
            try:
                data = self.connection.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            self.is_closed = not data
            self.received += len(data)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            try:
                self._messages.extend(Message(*json.loads(line)) for line in lines if line)
            except (ValueError, TypeError):  # the port belongs to another program
                self.is_closed = True
        while self._messages:
            yield self._messages.popleft()

    def close(self) -> None:
        """Close the connection after the other host has received the messages that were sent."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_CLOSE_SECONDS)
            deadline = time.monotonic() + _CLOSE_SECONDS
            # A close with unread data would discard messages on their way.
            while self.connection.recv(RECEIVE_BYTES) and time.monotonic() < deadline:
                pass
        self.is_closed = True
        self.connection.close()


@dataclass(frozen=True)
class Place:
    """Ranks of one host among those of all hosts, and the store of the ranks."""

    counts: tuple[int, ...]  # number of ranks on each host
    host: int  # of these ranks
    address: str  # of the store
    port: int
    interface: str | None = None  # network interface to the other hosts, if known

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return sum(self.counts)

    @property
    def is_on_one_host(self) -> bool:
        """Whether this host has all ranks."""
        return len(self.counts) == 1

    @property
    def first_rank(self) -> int:
        """First rank of this host."""
        return sum(self.counts[: self.host])

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host."""
        first = sum(self.counts[:host])
        return range(first, first + self.counts[host])

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return next(host for host in range(len(self.counts)) if rank in self.ranks_of(host))


def silence_limit(limit: float) -> float:
    """Return the seconds of silence after which a host is lost: 60, or half of the limit of hangs; at least 3 beats."""
    return min(_LOST_SECONDS, max(limit / 2, 3 * BEAT_SECONDS))


@dataclass
class HostGroup:
    """This launcher among those of all hosts. The first host has a link to each other one; another only to the first.

    Attributes:
        config: list of hosts.
        place: ranks of this host.
        links: open connections by host.
        lost_after: seconds of silence after which a host is lost.
        listener: socket of the store of rank 0, on the first host.
        is_concluded: all hosts have agreed on the end.
    """

    config: HostsConfig
    place: Place
    links: dict[int, Link]
    lost_after: float
    listener: socket.socket | None = None
    is_concluded: bool = False
    _timers: dict[int, ProgressTimer] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether this is the first host."""
        return self.config.rank == 0

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message to all linked hosts."""
        for link in self.links.values():
            link.send(kind, value)

    def lost_hosts(self) -> dict[int, str]:
        """Return the linked hosts that have ended or are silent, and what is known of each."""
        lost = {}
        for host, link in self.links.items():
            timer = self._timers.setdefault(host, ProgressTimer(self.lost_after))
            if link.is_closed:
                lost[host] = "its command has ended"
            elif (seconds := timer.seconds_without_change(link.received)) >= self.lost_after:
                lost[host] = f"it has not answered for {seconds:.1f} s"
        return lost

    def lost_failure(self, host: int, reason: str) -> Failure:
        """Return the failure for a host that was lost."""
        ranks = self.place.ranks_of(host)
        text = (
            f"error: host {self.config.addresses[host]} is lost: {reason} [E_HOST_LOST]\n"
            f"    {ranks_text(ranks)}: on this host\n"
            f"  expected: every host answers within {self.lost_after:g} s\n"
            "  fix:      check the machine and its network, and read the output of its command; then start the command "
            "on all hosts again"
        )
        return Failure(ranks[0], time.monotonic(), text, EXIT_FAILED, kind="hang", code="E_HOST_LOST")

    def share(self, value: Any = None) -> Any:
        """Return the JSON value of the first host on every host.

        Raises:
            RankError: the first host has failed, or was lost, before it had a value.
            StoppedError: the first host was stopped.
        """
        if self.is_first:
            self.send("shared", value)
            return value
        return self._wait_for("shared")

    def agree_on_exit(self, code: int) -> int:
        """Return the exit code of the first host on every host."""
        if self.is_first:
            self.send("exit", code)
            return code
        return int(self._wait_for("exit"))

    def _wait_for(self, kind: str) -> Any:
        link = self.links[0]
        while not (lost := self.lost_hosts()):
            for message in link.messages(BEAT_SECONDS):
                if message.kind == kind:
                    return message.value
                raise_end(message)
        self.is_concluded = True
        raise RankError(self.lost_failure(0, lost[0]))

    def conclude(self, error: BaseException) -> None:
        """Send the other hosts the end of this one, unless the hosts have agreed on the end."""
        if self.is_concluded:
            return
        self.is_concluded = True
        failure = error.failure if isinstance(error, RankError) else Failure.of_exception(self.place.first_rank, error)
        if isinstance(error, KeyboardInterrupt | StoppedError):
            # Hosts without ranks end at the stop. Others also need a cause, or they would report this host as lost.
            self.send("stop", int(signal.SIGTERM))
            failure = replace(failure, by_signal=signal.SIGTERM)
        if self.is_first:
            self.send("cause", failure_values(failure))
        else:
            self.send("failed", [failure_values(failure)])


def raise_end(message: Message) -> None:
    """Raise the error of a message that ends the launch; return for any other message."""
    if message.kind == "cause":
        raise RankError(failure_from(message.value))
    if message.kind == "stop":
        raise StoppedError(
            "stopped on another host", fix="resume the run if it has a checkpoint, or start the command again"
        )


def failure_values(failure: Failure) -> dict[str, Any]:
    """Return a failure as a JSON value; the clocks of hosts differ, so its time is an age."""
    return {**asdict(failure), "when": time.monotonic() - failure.when}


def failure_from(values: dict[str, Any]) -> Failure:
    """Return the failure of another host."""
    return Failure(**{**values, "when": time.monotonic() - values["when"]})
