"""Worker processes of one launch: watchdog, results, and the first cause of failures."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from samestep.distributed.standard_streams import report_line
from samestep.distributed.status import StatusBoard
from samestep.distributed.stop_request import STOP_SIGNALS
from samestep.errors import RunMovedError
from samestep.launcher.failure import E_DISK_HANG, Failure, RankError, StoppedError, first_cause
from samestep.launcher.process_state import WorkerSpec
from samestep.launcher.stop_signals import StopSignals
from samestep.launcher.watchdog import (
    Hang,
    RankState,
    StackFile,
    Watchdog,
    is_running,
    process_stat,
)
from samestep.launcher.worker import RankResult, run_rank

RANK_NAME = "samestep-rank-"
# Time for the other ranks to report their failures after the first one, before they are killed.
_SETTLE_SECONDS = 1.0
_CHECK_SECONDS = 0.5
# Time for killed processes to end; a process that waits for a disk may never end.
_KILL_SECONDS = 4.0
# Time after which running threads and child processes of a rank whose function has returned are
# reported.
_RUNNING_SECONDS = 3.0
# Exit code that multiprocessing reports for a fork after the end of its server.
_SERVER_GONE = 255
_SERVER_END_SECONDS = 1.0
_SERVER_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class LaunchConfig:
    """Options of a launch."""

    hang_after: float  # seconds without progress of any rank after which the run is ended
    grace: float | None = None  # seconds that ranks have to end after a request; None: no limit
    log_dir: Path | None = None  # for output of ranks other than 0, and consequences of a failure
    has_own_hash_seeds: bool = False  # each rank is a new interpreter with its own order of sets


@dataclass
class _Worker:
    """One worker process, and its result once known."""

    rank: int
    process: BaseProcess
    channel: Connection
    stacks: StackFile
    result: RankResult | Failure | None = None
    result_time: float = float("inf")
    has_reported_running: bool = False
    is_abandoned: bool = False  # the kernel does not end the killed process
    # As every process that has ended, also before the fork server reports the end.
    has_closed_channel: bool = False

    @property
    def is_running(self) -> bool:
        return not self.is_abandoned and self.process.exitcode is None

    def receive(self) -> None:
        """Take the result that the worker has sent, if it is the first one."""
        if self.result is not None:
            return
        try:
            self.result = self.channel.recv() if self.channel.poll() else None
        except EOFError:
            self.has_closed_channel = True
        if self.result is not None:
            self.result_time = time.monotonic()


class WorkerGroup:
    """All worker processes of one launch.

    Attributes:
        stop_signals: signals that end the launch.
    """

    def __init__(self, status_board: StatusBoard, config: LaunchConfig) -> None:
        self._board = status_board
        self._config = config
        self._workers: list[_Worker] = []
        self._server = 0  # process id of the fork server
        self._watchdog = Watchdog(config.hang_after)
        self.stop_signals = StopSignals(config.grace, self._forward_stop, self._kill)
        self._deadline = float("inf")  # time at which running workers are killed
        self._exceeds_grace = False
        # Since then all running ranks have returned, and cannot exit.
        self._exit_began: float | None = None

    def start(self, context: ForkServerContext | SpawnContext, worker_spec: WorkerSpec) -> None:
        """Start one worker. If the fork server is gone, the error is a `RankError`."""
        receive, send = context.Pipe(duplex=False)
        name = f"{RANK_NAME}{worker_spec.rank}"
        process = context.Process(target=run_rank, args=(worker_spec, send), name=name)
        try:
            process.start()
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise RankError(_server_failure("while they were started")) from error
        finally:
            send.close()
        self._workers.append(_Worker(worker_spec.rank, process, receive, worker_spec.stacks))
        self._server = worker_spec.server
        # A signal that came before this worker was in the list.
        if self.stop_signals.count:
            self._forward_stop()

    def _forward_stop(self) -> None:
        for worker in self._workers:
            if worker.is_running and isinstance(worker.result, RankResult):
                # The function has returned: threads of the user keep the process alive.
                worker.process.kill()
            elif worker.is_running:
                worker.process.terminate()

    def _kill(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + _KILL_SECONDS)
        for worker in self._workers:
            if worker.is_running:
                worker.process.kill()

    def wait_for_all(self) -> RankResult:
        """Wait until every worker has ended, and return rank 0's result.

        Raises:
            RankError: a rank failed.
            StoppedError: the run was stopped before the end of a step.
        """
        next_check = time.monotonic()
        while running := [worker for worker in self._workers if worker.is_running]:
            now = time.monotonic()
            if now >= self._deadline:
                break
            if now >= self.stop_signals.deadline:
                self._exceeds_grace = self._deadline == float("inf")
                break
            sentinels = [worker.process.sentinel for worker in running]
            channels = [w.channel for w in running if w.result is None and not w.has_closed_channel]
            until = min(self._deadline, self.stop_signals.deadline, next_check)
            seconds = max(0.0, until - now)
            wait([*sentinels, *channels], timeout=seconds)
            self._collect_results()
            if failures := self._failures():
                # More time while none so far can be the cause of the others.
                settle = _SETTLE_SECONDS
                if all(failure.is_consequence for failure in failures):
                    settle = _KILL_SECONDS
                # Not later than before: each further failure would extend the wait.
                self._deadline = min(self._deadline, time.monotonic() + settle)
            elif time.monotonic() >= next_check:
                self._check_progress()
                next_check = time.monotonic() + _CHECK_SECONDS
        self.end()
        if failures := self._failures():
            self._raise(failures)
        main = self._workers[0].result
        assert isinstance(main, RankResult)
        return main

    def _failures(self) -> list[Failure]:
        return [worker.result for worker in self._workers if isinstance(worker.result, Failure)]

    def _server_has_ended(self) -> bool:
        """Whether the fork server has ended; a killed process closes its channels before."""
        deadline = time.monotonic() + _SERVER_END_SECONDS
        while (runs := is_running(self._server)) and time.monotonic() < deadline:
            time.sleep(_SERVER_POLL_SECONDS)
        return not runs

    def end(self) -> None:
        """Kill all running workers and collect the last results."""
        for worker in self._workers:
            worker.receive()
        ended = [worker for worker in self._workers if worker.has_closed_channel]
        self._kill()
        deadline = time.monotonic() + _KILL_SECONDS
        for worker in self._workers:
            if worker.is_running:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.receive()
            if worker.is_running:
                self._abandon(worker)
            if worker.result is None:
                result = self._exit_result(worker)
                if isinstance(result, Failure):
                    # Processes that had not ended by then were killed here.
                    result = replace(result, is_consequence=worker not in ended)
                worker.result = result

    def _abandon(self, worker: _Worker) -> None:
        """Leave a process that the kernel does not end before its disk or driver answers."""
        worker.is_abandoned = True
        # Otherwise the exit of this process would wait for the child.
        children = getattr(multiprocessing.process, "_children")  # noqa: B009 (typeshed lacks it)
        children.discard(worker.process)
        if worker.result is None:
            worker.result = Failure.of_report(
                worker.rank,
                E_DISK_HANG,
                f"rank {worker.rank}, process {worker.process.pid}, was killed{{}} and does not "
                "end",
                "check the disk, the network file system or the driver for which the kernel waits",
                self._board.read(worker.rank).activity,
                is_consequence=True,
                by_signal=signal.SIGKILL,
            )

    def _raise(self, failures: list[Failure]) -> None:
        cause = first_cause(failures)
        codes = {worker.process.exitcode for worker in self._workers}
        # Otherwise it is the exit code of the ranks.
        if codes == {_SERVER_GONE} and self._server_has_ended():
            cause = _server_failure(failures[0].activity)
        if self.stop_signals.count and cause.by_signal in (*STOP_SIGNALS, signal.SIGKILL):
            late = ""
            if self._exceeds_grace:
                late = f" within the grace time of {self._config.grace:g} s"
            raise StoppedError(
                f"stopped before the end of a step{late}",
                fix="resume the run if it has a checkpoint, or start the command again",
            )
        log_dir = self._config.log_dir
        if any(failure.code in (E_DISK_HANG, RunMovedError.default_code) for failure in failures):
            log_dir = None  # this process must not wait for the disk, or write to another run
        for failure in failures:
            if failure is not cause:
                failure.append_to_log(log_dir)
        statuses = [self._board.read(worker.rank) for worker in self._workers]
        steps = max(status.steps for status in statuses)
        report = cause.reported(log_dir)
        is_stopping = self.stop_signals.count > 0
        raise RankError(report, steps, is_stopping=is_stopping)

    def _collect_results(self) -> None:
        for worker in self._workers:
            # Before the read: a result sent last is in the channel by then.
            has_ended = not worker.is_running
            worker.receive()
            if worker.result is None and has_ended:
                worker.result = self._exit_result(worker)

    def _exit_result(self, worker: _Worker) -> RankResult | Failure:
        """Return the result of a process that has ended without one."""
        status = self._board.read(worker.rank)
        exit_code = worker.process.exitcode or 0
        # A script may end by os._exit(0), but not inside of samestep.init().
        if status.is_script and exit_code == 0 and (status.is_finished or not status.operations):
            return RankResult(b"", ())
        activity, _, _ = status.activity.partition(", waiting in ")
        return Failure.of_exit(
            worker.rank,
            exit_code,
            activity,
            worker.stacks.crash(),
            is_script=status.is_script,
            has_begun=status.last_change > 0,
        )

    def _check_progress(self) -> None:
        states = {worker.rank: self._state(worker) for worker in self._workers}
        if seconds := self._watchdog.hang_seconds(states):
            stacks = {
                worker.rank: worker.stacks.request(pid)
                for worker in self._workers
                if worker.is_running and (pid := worker.process.pid)
            }
            failure = Hang(seconds, self._config.hang_after, states, stacks).failure()
            self._workers[failure.rank].result = failure
            self._deadline = time.monotonic()
        self._end_stuck_exits(states)
        for worker in self._workers:
            self._check_end(worker)

    def _state(self, worker: _Worker) -> RankState:
        letter = ""
        if worker.is_running and worker.process.pid:
            letter = next(iter(process_stat(worker.process.pid)), "")
        has_ended = isinstance(worker.result, RankResult)
        return RankState(self._board.read(worker.rank), has_ended, letter)

    def _end_stuck_exits(self, states: Mapping[int, RankState]) -> None:
        """End the wait for ranks that have returned, with threads that wait for a disk."""
        running = [states[worker.rank] for worker in self._workers if worker.is_running]
        # Z: the main thread has ended, and another one waits in the kernel.
        if not running or not all(
            state.has_ended and state.process_state in ("D", "Z") for state in running
        ):
            self._exit_began = None
        elif self._exit_began is None:
            self._exit_began = time.monotonic()
        elif time.monotonic() - self._exit_began > _KILL_SECONDS:
            self._deadline = time.monotonic()

    def _check_end(self, worker: _Worker) -> None:
        """Report the threads that a rank waits for after its function; kill a rank that hangs."""
        result = worker.result
        if not isinstance(result, RankResult) or not result.running or not worker.is_running:
            return
        seconds = time.monotonic() - worker.result_time
        names = ", ".join(map(ascii, result.running))
        if seconds >= self._config.hang_after:
            worker.process.kill()
            report_line(
                f"ended rank {worker.rank}, which waited {seconds:.0f} s for its threads and child "
                f"processes: {names}"
            )
        elif seconds >= _RUNNING_SECONDS and not worker.has_reported_running:
            worker.has_reported_running = True
            report_line(
                f"the function of rank {worker.rank} has returned; the rank waits for its threads "
                f"and child processes: {names}"
            )


def _server_failure(activity: str) -> Failure:
    """Return the failure of all ranks after their fork server was killed."""
    return Failure.of_report(
        0,
        "E_LAUNCHER_GONE",
        "the fork server of the ranks was killed{}, and they ended with it",
        "look for a memory limit of this machine, or an administrator, that kills processes",
        activity,
        by_signal=signal.SIGKILL,
    )
