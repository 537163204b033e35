"""Worker processes of one host among several: status, stop requests and failures of all hosts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from socket import socket
from types import FrameType
from typing import Any

from samestep.distributed.status import StatusBoard, StatusSnapshot
from samestep.launcher.failure import Failure, first_cause
from samestep.launcher.hosts import HostGroup, Message, failure_from, failure_values
from samestep.launcher.watchdog import RankState
from samestep.launcher.worker_group import KILL_SECONDS, LaunchConfig, Stacks, WorkerGroup

_POLL_SECONDS = 0.1
# Time in which a host requests the stacks of its ranks, each of which may take a second.
_STACK_SECONDS = 5.0
# Time in which a host ends its ranks after a failure on another host, and sends its own failure.
_END_SECONDS = 3 * KILL_SECONDS


class HostWorkerGroup(WorkerGroup):
    """Worker processes of one host.

    The first host watches the ranks of all hosts and selects the first cause of failures; every host raises this cause.
    """

    def __init__(self, status_board: StatusBoard, config: LaunchConfig, hosts: HostGroup) -> None:
        super().__init__(status_board, config)
        self._hosts, self._place = hosts, hosts.place
        self._unsent_stops: list[int] = []
        self._is_settling = False  # a rank of any host has failed, or a host was lost
        self._has_ended = False  # all ranks of this host have returned; on the first host: all ranks
        self._lost: dict[int, Failure] = {}
        self._ended: set[int] = set()  # linked hosts that have ended in this sense
        self._failures: dict[int, list[Failure]] = {}  # first causes of other hosts that have ended their ranks
        self._shared_cause: Failure | None = None  # selected by the first host
        self._stacks_elsewhere: dict[int, tuple[Stacks, Stacks]] = {}
        self._states_elsewhere = {
            rank: RankState(StatusSnapshot(), host=self._name(rank))
            for rank in range(self._place.size)
            if rank not in self._place.ranks_of(self._place.host)
        }

    def _name(self, rank: int) -> str:
        return self._hosts.config.addresses[self._place.host_of(rank)]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        # Only the terminal of this host is closed.
        self._unsent_stops.append(int(signal.SIGTERM if number == signal.SIGHUP else number))

    def _is_waiting(self) -> bool:
        if super()._is_waiting():
            return True
        is_complete = self._ended >= self._hosts.links.keys()
        if not self._has_ended and not self._is_settling and (is_complete or not self._hosts.is_first):
            self._has_ended = True
            self._hosts.send("ended")
        return not self._is_settling and not is_complete

    def _connections(self) -> list[socket]:
        return [link.connection for link in self._hosts.links.values() if not link.is_closed]

    def _collect_results(self) -> bool:
        has_failed = super()._collect_results()
        while self._unsent_stops:
            self._hosts.send("stop", self._unsent_stops.pop(0))
        self._receive()
        if has_failed:
            self._settle()
        return self._is_settling

    def _settle(self) -> None:
        """Begin the end of all ranks."""
        if not self._is_settling:
            self._is_settling = True
            self._hosts.send("settle")

    def _receive(self, seconds: float = 0.0) -> None:
        """Handle the messages of other hosts, and note lost hosts."""
        wait(self._connections(), seconds)
        for host, link in self._hosts.links.items():
            for message in link.messages():
                self._handle_message(host, message)
                if message.kind == "ended" and not self._hosts.is_first:
                    break  # the exit code of the first host follows, which the caller receives
        for host, reason in self._hosts.lost_hosts().items():
            if host not in self._failures and host not in self._lost and self._shared_cause is None:
                self._lost[host] = self._hosts.lost_failure(host, reason)
                self._settle()

    def _handle_message(self, host: int, message: Message) -> None:
        kind, value = message
        if kind == "states":
            self._states_elsewhere |= {int(rank): _state(values, self._name(int(rank))) for rank, values in value}
        elif kind == "stacks wanted":
            self._hosts.send(
                "stacks", [[[rank, frames] for rank, frames in part.items()] for part in super()._stacks()]
            )
        elif kind == "stacks":
            self._stacks_elsewhere[host] = (dict(value[0]), dict(value[1]))
        elif kind == "stop":
            super()._handle(int(value), None)
            for other, link in self._hosts.links.items():
                if other != host:
                    link.send("stop", value)
        elif kind == "ended":
            self._ended.add(host)
        elif kind == "settle":
            self._settle()
        elif kind == "failed":
            self._failures[host] = [failure_from(values) for values in value]
            self._settle()
        elif kind == "cause":
            self._shared_cause = failure_from(value)
            self._settle()

    def _watch(self, states: Mapping[int, RankState]) -> None:
        if self._hosts.is_first:
            named = {rank: replace(state, host=self._name(rank)) for rank, state in states.items()}
            everywhere = {**named, **self._states_elsewhere}
            if all(state.status.operations for state in everywhere.values()):  # hosts start at different times
                super()._watch(everywhere)
        else:
            self._hosts.send("states", [[rank, _values(state)] for rank, state in states.items()])

    def _stacks(self) -> tuple[Stacks, Stacks]:
        self._stacks_elsewhere.clear()
        self._hosts.send("stacks wanted")
        stacks, loader_stacks = super()._stacks()
        self._wait(
            lambda: self._stacks_elsewhere.keys() >= self._hosts.links.keys() - self._lost.keys(), _STACK_SECONDS
        )
        for more, more_of_loaders in self._stacks_elsewhere.values():
            stacks |= more
            loader_stacks |= more_of_loaders
        return stacks, loader_stacks

    def _end_hang(self, failure: Failure) -> None:
        self._failures[self._place.host] = [failure]
        self._settle()
        self._deadline = time.monotonic()

    def _cause(self, failures: list[Failure]) -> Failure | None:
        """Return the first cause among the failures of all hosts, on every host."""
        own = super()._cause(failures)
        if own is None and not self._is_settling:
            return None
        self._settle()
        cause = self._select_cause(own) if self._hosts.is_first else self._receive_cause(own)
        self._hosts.is_concluded = True
        return cause

    def _select_cause(self, own: Failure | None) -> Failure:
        self._wait(lambda: self._failures.keys() | self._lost.keys() >= self._hosts.links.keys(), _END_SECONDS)
        everywhere = [failure for host in self._failures.values() for failure in host]
        cause = first_cause([*self._lost.values(), *everywhere, *([own] if own is not None else [])])
        if cause not in self._lost.values() and cause.kind != "hang":
            cause = replace(cause, text=f"{cause.text}\n  host:     {self._name(cause.rank)}")
        self._hosts.send("cause", failure_values(cause))
        return cause

    def _receive_cause(self, own: Failure | None) -> Failure:
        self._hosts.send("failed", [failure_values(own)] if own is not None else [])
        self._wait(lambda: self._shared_cause is not None or bool(self._lost), _END_SECONDS + self._hosts.lost_after)
        if self._shared_cause is not None:
            return self._shared_cause
        return next(iter(self._lost.values())) if self._lost else self._hosts.lost_failure(0, "it sent no cause")

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Handle messages until a condition holds, at most for some seconds."""
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            self._receive(_POLL_SECONDS)


def _values(state: RankState) -> dict[str, Any]:
    """Return a state as a JSON value; the clocks of hosts differ, so the time of the last change is an age."""
    status = {**asdict(state.status), "last_change": time.monotonic() - state.status.last_change}
    return {"status": status, "has_ended": state.has_ended, "process_state": state.process_state}


def _state(values: dict[str, Any], host: str) -> RankState:
    status = {**values["status"], "last_change": time.monotonic() - values["status"]["last_change"]}
    return RankState(StatusSnapshot(**status), values["has_ended"], values["process_state"], host=host)
