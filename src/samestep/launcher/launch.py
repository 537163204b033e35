"""Launch of a function on several processes of this machine.

Importing torch takes seconds, so this happens only once: a fork server (`multiprocessing`) imports torch, and every
rank is a fork of the server. The server uses no device, so the ranks can.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.distributed.env import prepare_torch_environment
from samestep.distributed.launcher_detection import free_loopback_socket
from samestep.distributed.signals import STOP_SIGNALS, open_terminals, redirect_to_null
from samestep.distributed.status import StatusBoard
from samestep.errors import InputError
from samestep.launcher.failure import Failure, RankError, StoppedError, first_cause
from samestep.launcher.fork_server import SETUP, ForkServer, end_orphans, start_server
from samestep.launcher.pickling import portable, unpack
from samestep.launcher.watchdog import (
    COLLECTIVE_MARGIN_SECONDS,
    HANG_AFTER,
    Hang,
    RankState,
    StackFile,
    Watchdog,
    hang_failure,
)
from samestep.launcher.worker import RankResult, WorkerSpec, run_rank

__all__ = ["RankError", "StoppedError", "launch"]

# torch._dynamo: every optimizer imports it on construction, which takes as long as torch itself.
PRELOAD = (
    SETUP,
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "cloudpickle",
    "samestep.engine.engine",
    "samestep.data.loader",
)
_RANK_NAME = "samestep-rank-"
# Time for the other ranks to report their failures after the first one, before they are killed.
_SETTLE_SECONDS = 1.0
_CHECK_SECONDS = 0.5
# Time after which running threads of a rank whose function has returned are reported.
_THREADS_SECONDS = 3.0
# Exit code that multiprocessing reports for a fork whose server is gone.
_SERVER_GONE = 255


@dataclass(frozen=True)
class LaunchConfig:
    """Options of a launch."""

    hang_after: float  # seconds without progress of any rank after which the run is ended
    grace: float | None = None  # seconds that ranks have to end after a request; None without a limit
    stop_at_checkpoint: bool = False  # request the end of the run after the next checkpoint
    log_dir: Path | None = None  # folder for output of ranks other than 0, and for failures that are consequences


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch."""

    value: Any  # of rank 0
    stop_signal: int | None  # signal that requested the end of the run, if any


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hang_after: float = HANG_AFTER,
    grace: float | None = None,
) -> Any:
    """Run `function(*arguments)` in `processes` ranks on this machine.

    Each rank joins the others with `samestep.start()`. SIGINT, SIGTERM, SIGUSR1 and SIGHUP request the end at a step
    boundary; a second SIGINT ends all ranks at once. No rank outlives this process.

    Args:
        function: importable by name, as for `multiprocessing`, or defined in a notebook.
        *arguments: positional arguments of `function`.
        processes: number of ranks, at least 1.
        log_dir: folder for the output of ranks other than 0, one file per rank; None for the terminal.
        preload: further modules to import once for all ranks (effective in the first launch of a process).
        environment: variables to set in each rank before torch initializes devices.
        hang_after: seconds without progress of any rank after which the run is ended, with the stacks of all ranks.
        grace: seconds that ranks have to end after a request; None without a limit.

    Returns:
        The result of rank 0, with tensors on the CPU.

    Raises:
        InputError: `processes` or a number of seconds is not positive, or this process is itself a rank.
        RankError: a rank failed; the others were ended.
        StoppedError: the run was stopped before the end of a step.
    """
    config = LaunchConfig(hang_after, grace, log_dir=log_dir)
    call = portable(partial(function, *arguments))
    return run_workers(call, processes=processes, launch_config=config, preload=preload, environment=environment).value


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    launch_config: LaunchConfig,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run a function as `launch` does, with a `LaunchConfig`; the result includes the stop signal."""
    _require_valid(processes, launch_config)
    prepare_torch_environment(loopback=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    log_dir = launch_config.log_dir
    with ExitStack() as stack:
        listener = stack.enter_context(free_loopback_socket())
        status_board = stack.enter_context(closing(StatusBoard.create(processes)))
        worker_group = WorkerGroup(status_board, launch_config)
        stack.enter_context(worker_group.signals())
        try:
            server = start_server()
            stack.callback(_report_orphans, server)
            for rank in range(processes):
                worker_spec = WorkerSpec(
                    rank=rank,
                    size=processes,
                    port=listener.getsockname()[1],
                    listener=listener if rank == 0 else None,
                    function=partial(function, *arguments),
                    log=log_dir / f"rank-{rank}.log" if log_dir is not None and rank > 0 else None,
                    status_board=status_board,
                    stacks=stack.enter_context(closing(StackFile())),
                    environment=environment or {},
                    timeout=launch_config.hang_after + COLLECTIVE_MARGIN_SECONDS,
                    server=server.pid,
                )
                worker_group.start(context, worker_spec)
            value = unpack(worker_group.wait_for_all())
        finally:
            worker_group.end()
    return LaunchResult(value, worker_group.stop_signal)


def _require_valid(processes: int, config: LaunchConfig) -> None:
    if processes < 1:
        fix = "--processes 1, or --processes auto"
        raise InputError(f"processes is {processes}", expected="processes >= 1", fix=fix, code="E_LAUNCH")
    for name, seconds, fix in (
        ("hang_after", config.hang_after, "--hang-after 600"),
        ("grace", config.grace, "--grace 30"),
    ):
        if seconds is not None and not seconds > 0:
            problem = f"{name} is {seconds:g} s"
            raise InputError(problem, expected="more than 0 seconds", fix=fix, code="E_LAUNCH")
    if multiprocessing.current_process().name.startswith(_RANK_NAME):
        raise InputError(
            "samestep.launch() was called in a rank that samestep has started",
            expected="a process that is not a rank",
            fix="call the function directly in ranks, instead of launch",
            code="E_LAUNCH",
        )


@dataclass
class _Worker:
    """One worker process, and its result once known."""

    rank: int
    process: BaseProcess
    channel: Connection
    stacks: StackFile
    result: RankResult | Failure | None = None
    result_time: float = float("inf")
    has_reported_threads: bool = False

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def receive(self) -> RankResult | Failure | None:
        """Return the result that the worker has sent, if any."""
        try:
            result = self.channel.recv() if self.channel.poll() else None
        except EOFError:
            return None
        assert result is None or isinstance(result, RankResult | Failure)
        if result is not None:
            self.result_time = time.monotonic()
        return result


class WorkerGroup:
    """All worker processes of one launch."""

    def __init__(self, status_board: StatusBoard, config: LaunchConfig) -> None:
        self._board, self._config = status_board, config
        self._workers: list[_Worker] = []
        self._watchdog = Watchdog(config.hang_after)
        self._stop_requests = 0  # number of requests to end the run
        self.stop_signal: int | None = None  # signal of the first request, if a signal made it
        self._deadline = float("inf")  # time at which running workers are killed
        self._exceeds_grace = False
        self._terminals = open_terminals()

    def start(self, context: ForkServerContext, worker_spec: WorkerSpec) -> None:
        """Start one worker. If the fork server is gone, the error is a `RankError`."""
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(worker_spec, send), name=f"{_RANK_NAME}{worker_spec.rank}")
        try:
            process.start()
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise RankError(Failure.of_fork_server("while they were started")) from error
        finally:
            send.close()
        self._workers.append(_Worker(worker_spec.rank, process, receive, worker_spec.stacks))
        if self._stop_requests:
            self._forward_stop()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Forward stop signals to the workers for the duration of the block. Does nothing outside the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        stops = (signal.SIGINT, *STOP_SIGNALS) if is_main else ()
        numbers = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
            self._deadline, self._exceeds_grace = time.monotonic() + self._config.grace, True
        if number == signal.SIGINT:
            _report("\nstopping after this step; press Ctrl-C again to stop at once")

    def _forward_stop(self) -> None:
        for worker in self._workers:
            if worker.is_running:
                worker.process.terminate()

    def kill(self) -> None:
        """Kill all running workers."""
        for worker in self._workers:
            if worker.is_running:
                worker.process.kill()

    def wait_for_all(self) -> bytes:
        """Wait until every worker has ended, and return rank 0's result; raise `RankError` or `StoppedError`."""
        next_check = time.monotonic()
        while running := [worker for worker in self._workers if worker.is_running]:
            now = time.monotonic()
            if now >= self._deadline:
                break
            sentinels = [worker.process.sentinel for worker in running]
            channels = [worker.channel for worker in running if worker.result is None]
            wait([*sentinels, *channels], timeout=max(0.0, min(self._deadline - now, next_check - now)))
            if self._collect_results():
                self._deadline, self._exceeds_grace = min(self._deadline, time.monotonic() + _SETTLE_SECONDS), False
            elif time.monotonic() >= next_check:
                self._check_progress()
                next_check = time.monotonic() + _CHECK_SECONDS
        self.end()
        failures = [worker.result for worker in self._workers if isinstance(worker.result, Failure)]
        if failures and all(worker.process.exitcode == _SERVER_GONE for worker in self._workers):
            self._raise(Failure.of_fork_server(failures[0].activity), failures)
        if failures:
            self._raise(first_cause(failures), failures)
        main = self._workers[0].result
        assert isinstance(main, RankResult)
        return main.value

    def end(self) -> None:
        """Kill all running workers and collect the last results."""
        self.kill()
        for worker in self._workers:
            worker.process.join()
            if worker.result is None:
                worker.result = worker.receive()
            if worker.result is None:
                worker.result = replace(self._exit_failure(worker), is_consequence=True)

    def _raise(self, cause: Failure, failures: list[Failure]) -> None:
        if self._stop_requests and cause.by_signal is not None and cause.by_signal in (*STOP_SIGNALS, signal.SIGKILL):
            late = f" within the grace time of {self._config.grace:g} s" if self._exceeds_grace else ""
            raise StoppedError(
                f"stopped before the end of a step{late}", fix="resume from the newest checkpoint, if any"
            )
        log_dir = self._config.log_dir
        for failure in failures:
            if log_dir is not None and failure is not cause:
                log_dir.mkdir(parents=True, exist_ok=True)
                with (log_dir / f"rank-{failure.rank}.log").open("a", encoding="utf-8") as log:
                    log.write(failure.text + "\n")
        statuses = [self._board.read(worker.rank) for worker in self._workers]
        raise RankError(cause, max(status.steps for status in statuses), statuses[0].checkpoints)

    def _collect_results(self) -> bool:
        """Collect results and exits; return whether a worker has failed."""
        for worker in self._workers:
            if worker.result is None:
                has_ended = not worker.is_running  # before the read: a result sent last is in the channel by then
                worker.result = worker.receive()
                if worker.result is None and has_ended:
                    worker.result = self._exit_failure(worker)
        return any(isinstance(worker.result, Failure) for worker in self._workers)

    def _exit_failure(self, worker: _Worker) -> Failure:
        activity, _, _ = self._board.read(worker.rank).activity.partition(", waiting in ")
        return Failure.of_exit(worker.rank, worker.process.exitcode or 0, activity, worker.stacks.crash())

    def _check_progress(self) -> None:
        states = {worker.rank: self._state(worker) for worker in self._workers}
        if self._config.stop_at_checkpoint and states[0].status.checkpoints and not self._stop_requests:
            self._stop_requests = 1
            self._forward_stop()
        if seconds := self._watchdog.hang_seconds(states):
            stacks = {
                worker.rank: worker.stacks.request(pid)
                for worker in self._workers
                if worker.is_running and (pid := worker.process.pid)
            }
            failure = hang_failure(Hang(seconds, self._config.hang_after, states, stacks))
            self._workers[failure.rank].result = failure
            self._deadline = time.monotonic()
        elif message := self._watchdog.slow_rank(states):
            _report(message)
        for worker in self._workers:
            self._check_threads(worker)

    def _check_threads(self, worker: _Worker) -> None:
        """Report the threads of a rank whose function has returned; kill the rank after the time limit of hangs."""
        if not isinstance(worker.result, RankResult) or not worker.result.threads or not worker.is_running:
            return
        seconds = time.monotonic() - worker.result_time
        names = ", ".join(map(ascii, worker.result.threads))
        if seconds >= self._config.hang_after:
            worker.process.kill()
            _report(f"ended rank {worker.rank}, which waited {seconds:.0f} s for its threads: {names}")
        elif seconds >= _THREADS_SECONDS and not worker.has_reported_threads:
            _report(f"the function of rank {worker.rank} has returned; the rank waits for its threads: {names}")
            worker.has_reported_threads = True

    def _state(self, worker: _Worker) -> RankState:
        process_state = ""
        if worker.is_running:
            with suppress(OSError):  # a system without /proc, or a process that has just ended
                process_state = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return RankState(self._board.read(worker.rank), isinstance(worker.result, RankResult), process_state)


def _report(line: str) -> None:
    with suppress(OSError):  # in a user's process, whose standard error can be a closed pipe
        print(line, file=sys.stderr, flush=True)


def _report_orphans(server: ForkServer) -> None:
    if message := end_orphans(server):
        _report(message)
