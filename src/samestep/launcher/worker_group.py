"""Worker processes of one launch: signals, watchdog, results, and the first cause of failures."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from samestep.distributed.signals import (
    STOP_SIGNALS,
    handled_signals,
    open_terminals,
    redirect_to_null,
)
from samestep.distributed.status import StatusBoard
from samestep.distributed.streams import report_line
from samestep.errors import RunMovedError
from samestep.launcher.failure import E_DISK_HANG, Failure, RankError, StoppedError, first_cause
from samestep.launcher.watchdog import (
    Hang,
    RankState,
    SlowRanks,
    StackFile,
    Watchdog,
    hang_failure,
    is_running,
    process_stat,
)
from samestep.launcher.worker import RankResult, run_rank
from samestep.launcher.worker_spec import WorkerSpec

RANK_NAME = "samestep-rank-"
# Time for the other ranks to report their failures after the first one, before they are killed.
_SETTLE_SECONDS = 1.0
_CHECK_SECONDS = 0.5
# Time for killed processes to end; a process that waits for a disk may never end.
KILL_SECONDS = 4.0
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
    grace: float | None = (
        None  # seconds that ranks have to end after a request; None without a limit
    )
    stop_at_checkpoint: bool = False  # request the end of the run after the next checkpoint
    log_dir: Path | None = (
        None  # folder for output of ranks other than 0, and for failures that are consequences
    )
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
    has_closed_channel: bool = (
        False  # as every process that has ended, also before the fork server reports the end
    )

    @property
    def is_running(self) -> bool:
        return not self.is_abandoned and self.process.exitcode is None

    def receive(self) -> RankResult | Failure | None:
        """Return the result that the worker has sent, if any."""
        try:
            result = self.channel.recv() if self.channel.poll() else None
        except EOFError:
            self.has_closed_channel = True
            return None
        assert result is None or isinstance(result, RankResult | Failure)
        if result is not None:
            self.result_time = time.monotonic()
        return result


class WorkerGroup:
    """All worker processes of one launch."""

    def __init__(self, status_board: StatusBoard, config: LaunchConfig) -> None:
        self._board = status_board
        self._config = config
        self._workers: list[_Worker] = []
        self._server = 0  # process id of the fork server
        self._watchdog = Watchdog(config.hang_after)
        self._slow_ranks = SlowRanks()
        self._is_stopping = False  # the ranks have been requested to end
        self._stop_requests = 0  # number of signals that request the end of the run
        self.stop_signal: int | None = None  # the first of them
        self._deadline = float("inf")  # time at which running workers are killed
        self._exceeds_grace = False
        self._exit_began: float | None = (
            None  # since then all running ranks have returned, and cannot exit
        )
        self._terminals = open_terminals()

    def start(self, context: ForkServerContext | SpawnContext, worker_spec: WorkerSpec) -> None:
        """Start one worker. If the fork server is gone, the error is a `RankError`."""
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank, args=(worker_spec, send), name=f"{RANK_NAME}{worker_spec.rank}"
        )
        try:
            process.start()
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise RankError(Failure.of_fork_server("while they were started")) from error
        finally:
            send.close()
        self._workers.append(_Worker(worker_spec.rank, process, receive, worker_spec.stacks))
        self._server = worker_spec.server
        if self._is_stopping:
            self._forward_stop()

    def signals(self) -> AbstractContextManager[None]:
        """Forward stop signals to the workers for the duration of the block. Does nothing outside the main thread."""
        return handled_signals((signal.SIGINT, *STOP_SIGNALS), self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1
        self.stop_signal = self.stop_signal or number
        if number == signal.SIGHUP:
            redirect_to_null(self._terminals)
        if self._stop_requests > 1 and number == signal.SIGINT:
            self.kill()
            return
        self._forward_stop()
        if self._config.grace is not None and self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._config.grace
            self._exceeds_grace = True
        if number == signal.SIGINT:
            report_line("\nstopping; press Ctrl-C again to stop at once")

    def _forward_stop(self) -> None:
        self._is_stopping = True
        for worker in self._workers:
            if worker.is_running and isinstance(worker.result, RankResult):
                worker.process.kill()  # the function has returned: threads of the user keep the process alive
            elif worker.is_running:
                worker.process.terminate()

    def kill(self) -> None:
        """Kill all running workers."""
        self._deadline = min(self._deadline, time.monotonic() + KILL_SECONDS)
        for worker in self._workers:
            if worker.is_running:
                worker.process.kill()

    def wait_for_all(self) -> RankResult:
        """Wait until every worker has ended, and return rank 0's result; raise `RankError` or `StoppedError`."""
        next_check = time.monotonic()
        while running := [worker for worker in self._workers if worker.is_running]:
            now = time.monotonic()
            if now >= self._deadline:
                break
            sentinels = [worker.process.sentinel for worker in running]
            channels = [w.channel for w in running if w.result is None and not w.has_closed_channel]
            wait(
                [*sentinels, *channels],
                timeout=max(0.0, min(self._deadline - now, next_check - now)),
            )
            if self._collect_results():
                self._deadline = min(self._deadline, time.monotonic() + self._settle_seconds())
                self._exceeds_grace = False
            elif time.monotonic() >= next_check:
                self._check_progress()
                next_check = time.monotonic() + _CHECK_SECONDS
        self.end()
        failures = [worker.result for worker in self._workers if isinstance(worker.result, Failure)]
        if (cause := self._cause(failures)) is not None:
            self._raise(cause, failures)
        main = self._workers[0].result
        assert isinstance(main, RankResult)
        return main

    def _settle_seconds(self) -> float:
        """Return the time for further failures: longer while none so far can be the cause of the others."""
        failures = [worker.result for worker in self._workers if isinstance(worker.result, Failure)]
        if all(failure.is_consequence for failure in failures):
            return KILL_SECONDS
        return _SETTLE_SECONDS

    def _cause(self, failures: list[Failure]) -> Failure | None:
        """Return the first cause of the failures; None without failures."""
        is_lost = failures and all(
            worker.process.exitcode == _SERVER_GONE for worker in self._workers
        )
        if is_lost and self._server_has_ended():  # otherwise it is the exit code of the ranks
            return Failure.of_fork_server(failures[0].activity)
        if failures:
            return first_cause(failures)
        return None

    def _server_has_ended(self) -> bool:
        """Return whether the fork server has ended; the kernel closes the channels of a killed process before."""
        deadline = time.monotonic() + _SERVER_END_SECONDS
        while (runs := is_running(self._server)) and time.monotonic() < deadline:
            time.sleep(_SERVER_POLL_SECONDS)
        return not runs

    def end(self) -> None:
        """Kill all running workers and collect the last results."""
        for worker in self._workers:
            worker.result = worker.result or worker.receive()
        ended = [worker for worker in self._workers if worker.has_closed_channel]
        self.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for worker in self._workers:
            if worker.is_running:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.result is None:
                worker.result = worker.receive()
            if worker.is_running:
                self._abandon(worker)
            if worker.result is None:
                worker.result = self._exit_result(worker, is_consequence=worker not in ended)

    def _abandon(self, worker: _Worker) -> None:
        """Leave a process that the kernel does not end before its disk or driver answers."""
        worker.is_abandoned = True
        children = getattr(multiprocessing.process, "_children")  # noqa: B009 (typeshed lacks the name)
        children.discard(
            worker.process
        )  # otherwise the exit of this process would wait for the child
        if worker.result is None:
            activity = self._board.read(worker.rank).activity
            worker.result = Failure.of_unkillable(worker.rank, worker.process.pid, activity)

    def _raise(self, cause: Failure, failures: list[Failure]) -> None:
        if (
            self._stop_requests
            and cause.by_signal is not None
            and cause.by_signal in (*STOP_SIGNALS, signal.SIGKILL)
        ):
            late = (
                f" within the grace time of {self._config.grace:g} s" if self._exceeds_grace else ""
            )
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
        checkpoints = statuses[0].checkpoints
        raise RankError(
            cause.reported(log_dir), steps, checkpoints, is_stopping=self._stop_requests > 0
        )

    def _collect_results(self) -> bool:
        """Collect results and exits; return whether a worker has failed."""
        for worker in self._workers:
            if worker.result is None:
                has_ended = (
                    not worker.is_running
                )  # before the read: a result sent last is in the channel by then
                worker.result = worker.receive()
                if worker.result is None and has_ended:
                    worker.result = self._exit_result(worker)
        return any(isinstance(worker.result, Failure) for worker in self._workers)

    def _exit_result(
        self, worker: _Worker, *, is_consequence: bool = False
    ) -> RankResult | Failure:
        """Return the result of a process that has ended without one."""
        status = self._board.read(worker.rank)
        exit_code = worker.process.exitcode or 0
        if status.is_script and exit_code == 0 and (status.is_finished or not status.operations):
            return RankResult(
                b"", ()
            )  # a script may end by os._exit(0), but not inside of samestep.init()
        activity, _, _ = status.activity.partition(", waiting in ")
        failure = Failure.of_exit(
            worker.rank,
            exit_code,
            activity,
            worker.stacks.crash(),
            is_script=status.is_script,
            has_begun=status.last_change > 0,
        )
        return replace(failure, is_consequence=is_consequence)

    def _check_progress(self) -> None:
        states = {worker.rank: self._state(worker) for worker in self._workers}
        if (
            self._config.stop_at_checkpoint
            and states[0].status.checkpoints
            and not self._is_stopping
        ):
            self._forward_stop()
        if seconds := self._watchdog.hang_seconds(states):
            failure = hang_failure(Hang(seconds, self._config.hang_after, states, self._stacks()))
            self._workers[failure.rank].result = failure
            self._deadline = time.monotonic()
        elif message := self._slow_ranks.message(states):
            report_line(message)
        self._end_stuck_exits(states)
        for worker in self._workers:
            self._check_end(worker)

    def _stacks(self) -> dict[int, list[str]]:
        """Return the stacks of running ranks."""
        running = [
            (worker, pid)
            for worker in self._workers
            if worker.is_running and (pid := worker.process.pid)
        ]
        return {worker.rank: worker.stacks.request(pid) for worker, pid in running}

    def _end_stuck_exits(self, states: Mapping[int, RankState]) -> None:
        """End the wait for ranks that have returned, with threads that wait for a disk, such as those of monitors."""
        running = [states[worker.rank] for worker in self._workers if worker.is_running]
        if not running or not all(
            state.has_ended and state.process_state in ("D", "Z") for state in running
        ):
            self._exit_began = None
        elif self._exit_began is None:
            self._exit_began = time.monotonic()
        elif time.monotonic() - self._exit_began > KILL_SECONDS:
            self._deadline = time.monotonic()

    def _check_end(self, worker: _Worker) -> None:
        """Report the threads that a rank waits for after its function; kill the rank after the time limit of hangs."""
        if (
            not isinstance(worker.result, RankResult)
            or not worker.result.running
            or not worker.is_running
        ):
            return
        seconds = time.monotonic() - worker.result_time
        names = ", ".join(map(ascii, worker.result.running))
        if seconds >= self._config.hang_after:
            worker.process.kill()
            report_line(
                f"ended rank {worker.rank}, which waited {seconds:.0f} s for its threads and child processes: {names}"
            )
        elif seconds >= _RUNNING_SECONDS and not worker.has_reported_running:
            report_line(
                f"the function of rank {worker.rank} has returned; the rank waits for its threads and child processes: "
                f"{names}"
            )
            worker.has_reported_running = True

    def _state(self, worker: _Worker) -> RankState:
        fields = (
            process_stat(worker.process.pid) if worker.is_running and worker.process.pid else []
        )
        process_state = fields[0] if fields else ""
        return RankState(
            self._board.read(worker.rank), isinstance(worker.result, RankResult), process_state
        )
