"""Peer watchdog: ranks of another launcher watch one another through the store of their job.

A thread of each rank writes the rank's status to the store every few seconds and reads the status
of the others. When no rank makes progress, one rank reports the hang with the stacks of all, and
every rank ends its own process: these threads run even if the main threads are stuck. A rank
without a new status counts as silent.

With NCCL, whose kernels wait for a killed rank forever
(https://github.com/NVIDIA/nccl/issues/585), its end is such a hang; gloo breaks a connection at
once.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

import torch.distributed as dist

from samestep.distributed.standard_streams import report_line
from samestep.distributed.status import RankStatus, StatusSnapshot
from samestep.errors import EXIT_FAILED
from samestep.launcher.failure import Failure
from samestep.launcher.process_state import Job
from samestep.launcher.rendezvous import (
    report_failure,
    wait_for_keys,
)
from samestep.launcher.watchdog import (
    Hang,
    ProgressTimer,
    RankState,
    Watchdog,
)
from samestep.launcher.worker import exit_process
from samestep.report_text import bounded

_MIN_INTERVAL = 0.25
_MAX_INTERVAL = 5.0
_SILENT_INTERVALS = 4
_TIMEOUT_SECONDS = 1.0
_HANG = "hang"


@dataclass
class _Peer:
    """Last status of one rank, with times by the clock of this rank: clocks of machines differ."""

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
    """Watchdog threads of one rank, which end with the process. `store` is of this world alone."""

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
        self._peers: dict[int, _Peer] = {}
        self._beats = 0
        self._answers = 0
        self._main_thread = threading.get_ident()
        self._closed = threading.Event()
        self._is_ending = threading.Event()
        # Without the store, ranks cannot agree on the one that reports its loss.
        self._store_host = "rank 0"
        reporter = 1
        if job.launcher_has_store:
            self._store_host = "the launcher"
            reporter = 0
        self._reports_loss = job.rank == reporter
        self._threads = [
            threading.Thread(target=target, name="samestep-watch", daemon=True)
            for target in (self._watch_peers, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()
        # The end of the interpreter aborts the process in a thread that uses a store.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the threads."""
        atexit.unregister(self.close)
        self._closed.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_SECONDS)

    def join_if_ending(self) -> None:
        """In the main thread after an exception: wait for the end if this watchdog causes it.

        After a hang ranks end one by one. The end of one makes collectives of others fail, which
        must not be reported.
        """
        if self._is_ending.is_set():
            self._threads[0].join()

    def _watch_peers(self) -> None:
        try:
            self._store.set(f"host/{self._job.rank}", socket.gethostname())
            self._send_status()
            while not self._closed.wait(self._interval):
                self._send_status()
                self._check_progress()
        except dist.DistError:
            # During the report of a hang: the host of the store has ended first.
            if self._is_ending.is_set():
                exit_process(EXIT_FAILED)

    def _send_status(self) -> None:
        # The number of the beat tells an unchanged status from that of a stopped process.
        self._beats += 1
        status = json.dumps(asdict(self._rank_status.snapshot))
        self._store.set(str(self._job.rank), f"{self._beats}\n{status}")

    def _check_progress(self) -> None:
        states = self._read_states()
        self._answers += 1
        seconds = self._watchdog.hang_seconds(states)
        if seconds or self._store.check([_HANG]):
            self._end_hang(states, seconds or self._hang_after)

    def _read_states(self) -> dict[int, RankState]:
        ranks = range(self._job.size)
        # Checked first: a read waits for a key that is not set yet.
        present = [rank for rank in ranks if rank in self._peers or self._store.check([str(rank)])]
        messages = self._store.multi_get([str(rank) for rank in present])
        for rank, message in zip(present, messages, strict=True):
            self._peers.setdefault(rank, _Peer()).update(message.decode())
        states = dict.fromkeys(ranks, RankState(StatusSnapshot(), is_silent=True))
        silent_after = _SILENT_INTERVALS * self._interval
        return states | {rank: self._peers[rank].state(silent_after) for rank in present}

    def _end_hang(self, states: dict[int, RankState], seconds: float) -> NoReturn:
        """Report the hang, unless another rank does, and end this process."""
        self._is_ending.set()
        present = [rank for rank in states if self._store.check([f"host/{rank}"])]
        hosts = {rank: self._store.get(f"host/{rank}").decode() for rank in present}
        if len(set(hosts.values())) > 1:
            states = {r: replace(state, host=hosts.get(r, "")) for r, state in states.items()}
        store = self._store
        store.set(_HANG, "")
        store.set(f"stack/{self._job.rank}", json.dumps(_stack(self._main_thread)))
        answering = [f"stack/{rank}" for rank, state in states.items() if not state.is_silent]
        wait_for_keys(store, answering, self._interval + _TIMEOUT_SECONDS)
        known = [key for key in answering if store.check([key])]
        answers = {key: json.loads(store.get(key)) for key in known}
        stacks = {rank: answers.get(f"stack/{rank}", []) for rank in states}
        self._report_and_exit(Hang(seconds, self._hang_after, states, stacks).failure())

    def _report_and_exit(self, failure: Failure) -> NoReturn:
        is_first, code = report_failure(self._job, failure)
        if is_first:
            report_line(failure.reported(None).text)
        exit_process(code)

    def _watch_store(self) -> None:
        """End this process if this rank makes no progress and the store does not answer."""
        timer = ProgressTimer(self._hang_after)
        while not self._closed.wait(self._interval):
            status = self._rank_status.snapshot
            seconds = timer.seconds_without_change((self._answers, status.last_change))
            if seconds >= self._hang_after:
                if self._reports_loss:
                    self._report_store(seconds, status)
                exit_process(EXIT_FAILED)

    def _report_store(self, seconds: float, status: StatusSnapshot) -> None:
        address, port = self._job.address
        host = self._store_host
        rank = self._job.rank
        frames = "".join(f"    {frame}\n" for frame in _stack(self._main_thread)[-10:])
        text = (
            f"error: {host} hangs: the store of the job, at {address}:{port}, has not answered for "
            f"{seconds:.1f} s [E_HANG]\n"
            f"    rank {rank}: {status.activity}\n"
            f"  stack of rank {rank}, innermost last:\n{frames}"
            f"  expected: every rank completes a step within {self._hang_after:g} s "
            "(--hang-after)\n"
            f"  fix:      check whether the process of {host} is stopped, or its machine lost"
        )
        report_line(bounded(text))


def _stack(thread: int) -> list[str]:
    """Return `file:line function` for each frame of a thread of this process, outermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    return [f"{line.filename}:{line.lineno} {line.name}" for line in traceback.extract_stack(frame)]
