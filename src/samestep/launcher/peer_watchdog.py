"""Peer watchdog: ranks that another launcher started watch one another through the store of their job.

A thread of each rank writes the rank's status to the store every few seconds and reads the status
of the others. When
no rank makes progress, one rank reports the hang with the stacks of all, and every rank ends its
    own process: these
threads run even if the main threads are stuck. A rank without a new status counts as silent.

The end of a rank's process on this machine is noticed within seconds, also in a wait for a GPU:
gloo breaks a connection at once, but NCCL's kernels wait for a killed rank forever
(https://github.com/NVIDIA/nccl/issues/585).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from samestep.distributed.addresses import accepts_connections
from samestep.distributed.rendezvous import wait_for_keys
from samestep.distributed.status import RankStatus, StatusSnapshot
from samestep.distributed.streams import report_line
from samestep.errors import EXIT_FAILED, bounded
from samestep.launcher.failure import Failure
from samestep.launcher.job import Job, report_failure
from samestep.launcher.orphans import launcher_has_ended
from samestep.launcher.watchdog import (
    Hang,
    ProgressTimer,
    RankState,
    SlowRanks,
    Watchdog,
    hang_failure,
    is_running,
    start_time,
)
from samestep.launcher.worker import exit_process

_MIN_INTERVAL = 0.25
_MAX_INTERVAL = 5.0
_SILENT_INTERVALS = 4
_TIMEOUT_SECONDS = 1.0
_STORE_GONE_SECONDS = 3.0
# Time for the main thread to fail by itself, and for the ended rank's own report.
_GONE_SECONDS = 5.0
_HANG = "hang"


@dataclass
class _Peer:
    """Last status of one rank, with times by the clock of this rank, because clocks of machines differ."""

    beat: str = ""
    beat_time: float = 0.0
    status: str = ""
    status_time: float = 0.0

    def update(self, message: str) -> None:
        now = time.monotonic()
        beat, _, status = message.partition("\n")
        if beat != self.beat:
            self.beat = beat
            self.beat_time = now
        if status != self.status:
            self.status = status
            self.status_time = now

    def state(self, silent_after: float) -> RankState:
        snapshot = replace(StatusSnapshot(**json.loads(self.status)), last_change=self.status_time)
        return RankState(snapshot, is_silent=time.monotonic() - self.beat_time > silent_after)


class PeerWatchdog:
    """Watchdog threads of one rank; they end with the process. The `store` belongs to this world alone."""

    def __init__(
        self, job: Job, store: dist.Store, rank_status: RankStatus, hang_after: float
    ) -> None:
        # Own connections: the main thread may be stuck in a request, and its connection with it.
        self._job = replace(job, store=job.store.clone())  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self._rank_status = rank_status
        self._hang_after = hang_after
        self._interval = min(max(hang_after / 8, _MIN_INTERVAL), _MAX_INTERVAL)
        self._watchdog = Watchdog(hang_after)
        self._slow_ranks = SlowRanks()
        self._peers: dict[int, _Peer] = {}
        self._processes: dict[int, list[Any]] = {}
        self._gone_since: dict[int, float] = {}
        self._beats = 0
        self._answers = 0
        self._main_thread = threading.get_ident()
        self._closed = threading.Event()
        self._is_ending = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="samestep-watch", daemon=True)
            for target in (self._watch_peers, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(
            self.close
        )  # the end of the interpreter aborts the process in a thread that uses a store

    def close(self) -> None:
        """Stop the threads."""
        atexit.unregister(self.close)
        self._closed.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_SECONDS)

    def join_if_ending(self) -> None:
        """In the main thread after an exception: wait for the end of the process if this watchdog is ending it.

        After a hang ranks end one by one. The end of one makes collectives of others fail, which
        must not be reported.
        """
        if self._is_ending.is_set():
            self._threads[0].join()

    def _watch_peers(self) -> None:
        try:
            self._store.set(f"process/{self._job.rank}", json.dumps(_process_identity()))
            self._send_status()
            while not self._closed.wait(self._interval):
                self._send_status()
                self._check_progress()
        except dist.DistError:
            if self._is_ending.is_set() or self._is_abandoned():
                exit_process(EXIT_FAILED)

    def _is_abandoned(self) -> bool:
        """After the loss of the store: return whether the main thread, which fails with its own report, is stuck."""
        if self._closed.wait(_STORE_GONE_SECONDS) or accepts_connections(*self._job.address):
            return False
        if self._job.rank == self._reporter and not launcher_has_ended():
            address, port = self._job.address
            text = (
                f"error: {self._store_host} has ended, and with it the store of the job at {address}:{port}; this rank "
                f"ends {self._rank_status.activity} [E_LAUNCHER_GONE]\n"
                f"  expected: {self._store_host} runs until all ranks have ended\n"
                f"  fix:      read the output of {self._store_host}, and start the same command again"
            )
            report_line(bounded(text))
        return True

    @property
    def _store_host(self) -> str:
        if self._job.launcher_has_store:
            return "the launcher"
        return "rank 0"

    @property
    def _reporter(self) -> int:
        """Rank that reports the loss of the store, without which ranks cannot agree on one."""
        if self._job.launcher_has_store:
            return 0
        return 1

    def _send_status(self) -> None:
        self._beats += 1
        self._store.set(
            str(self._job.rank), f"{self._beats}\n{json.dumps(asdict(self._rank_status.snapshot))}"
        )

    def _check_progress(self) -> None:
        states = self._read_states()
        self._answers += 1
        seconds = self._watchdog.hang_seconds(states)
        if seconds or self._store.check([_HANG]):
            self._end(states, seconds or self._hang_after)
        elif (gone := self._gone_rank(states)) is not None:
            self._is_ending.set()
            self._report_and_exit(Failure.of_ended_process(gone, states[gone].status.activity))
        elif self._job.rank == 0 and (message := self._slow_ranks.message(states)):
            report_line(message)

    def _read_states(self) -> dict[int, RankState]:
        ranks = range(self._job.size)
        present = [rank for rank in ranks if rank in self._peers or self._store.check([str(rank)])]
        messages = self._store.multi_get([str(rank) for rank in present])
        for rank, message in zip(present, messages, strict=True):
            self._peers.setdefault(rank, _Peer()).update(message.decode())
        silent_after = _SILENT_INTERVALS * self._interval
        absent = RankState(StatusSnapshot(), is_silent=True)
        return {
            rank: self._peers[rank].state(silent_after) if rank in self._peers else absent
            for rank in ranks
        }

    def _end(self, states: dict[int, RankState], seconds: float) -> NoReturn:
        """Report the hang, unless another rank does, and end this process."""
        self._is_ending.set()
        states = self._with_hosts(states)
        self._store.set(_HANG, "")
        self._store.set(f"stack/{self._job.rank}", json.dumps(_stack(self._main_thread)))
        stacks = self._read_stacks([rank for rank, state in states.items() if not state.is_silent])
        self._report_and_exit(hang_failure(Hang(seconds, self._hang_after, states, stacks)))

    def _with_hosts(self, states: dict[int, RankState]) -> dict[int, RankState]:
        """Add the hosts of the ranks, if there are several."""
        hosts = {rank: str(identity[3]) for rank, identity in self._processes.items()}
        if len(set(hosts.values())) < 2:
            return states
        return {rank: replace(state, host=hosts.get(rank, "")) for rank, state in states.items()}

    def _report_and_exit(self, failure: Failure) -> NoReturn:
        is_first, code = report_failure(self._job, failure)
        if is_first:
            report_line(failure.reported(None).text)
        exit_process(code)

    def _gone_rank(self, states: dict[int, RankState]) -> int | None:
        """Return a rank with a process of this machine that has ended some seconds ago, without leaving the world."""
        machine, *_ = _process_identity()
        for rank in self._peers:
            if rank not in self._processes and self._store.check([f"process/{rank}"]):
                self._processes[rank] = json.loads(self._store.get(f"process/{rank}"))
            is_local = machine and self._processes.get(rank, [""])[0] == machine
            if (
                not is_local
                or states[rank].status.is_finished
                or is_running(*self._processes[rank][1:3])
            ):
                self._gone_since.pop(rank, None)
            elif (
                time.monotonic() - self._gone_since.setdefault(rank, time.monotonic())
                >= _GONE_SECONDS
            ):
                return rank
        return None

    def _read_stacks(self, ranks: Sequence[int]) -> dict[int, list[str]]:
        """Return the stacks of all ranks, waiting for those of `ranks`; empty for a rank without an answer."""
        wait_for_keys(
            self._store, [f"stack/{rank}" for rank in ranks], self._interval + _TIMEOUT_SECONDS
        )
        known = [rank for rank in ranks if self._store.check([f"stack/{rank}"])]
        stacks = {rank: json.loads(self._store.get(f"stack/{rank}")) for rank in known}
        return {rank: stacks.get(rank, []) for rank in range(self._job.size)}

    def _watch_store(self) -> None:
        """End this process if this rank makes no progress and the store does not answer."""
        timer = ProgressTimer(self._hang_after)
        while not self._closed.wait(self._interval):
            status = self._rank_status.snapshot
            seconds = timer.seconds_without_change((self._answers, status.last_change))
            if seconds >= self._hang_after:
                if self._job.rank == self._reporter:
                    report_line(bounded(self._store_report(seconds, status)))
                exit_process(EXIT_FAILED)

    def _store_report(self, seconds: float, status: StatusSnapshot) -> str:
        address, port = self._job.address
        host = self._store_host
        frames = "".join(f"    {frame}\n" for frame in _stack(self._main_thread)[-10:])
        return (
            f"error: {host} hangs: the store of the job, at {address}:{port}, has not answered for {seconds:.1f} s "
            "[E_HANG]\n"
            f"    rank {self._job.rank}: {status.activity}\n"
            f"  stack of rank {self._job.rank}, innermost last:\n{frames}"
            f"  expected: every rank completes a step within {self._hang_after:g} s (--hang-after)\n"
            f"  fix:      check whether the process of {host} is stopped, or its machine lost"
        )


def _process_identity() -> list[Any]:
    """Return machine and namespace of processes, number and start time of this process, and its host.

    The machine is empty if unknown. The start time does not depend on the clock, which may be set
    during a run.
    """
    machine = ""
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {namespace}"
    return [machine, os.getpid(), start_time(os.getpid()), socket.gethostname()]


def _stack(thread: int) -> list[str]:
    """Return `file:line function` for each frame of a thread of this process, outermost first."""
    frame = sys._current_frames().get(thread)
    if frame:
        return [
            f"{line.filename}:{line.lineno} {line.name}" for line in traceback.extract_stack(frame)
        ]
    return []
