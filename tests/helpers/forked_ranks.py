"""Functions of a test file on real ranks, with the variables that torchrun sets.

They are forks of a process that has imported the file. This process is a fork of the fork server of the tests, which
has imported torch. A test gets the fixture `on_ranks`; `on_ranks(function, size, **arguments)` returns what rank 0
returned. The marker `ranks(1, 2, slow=(4,))` runs a test with its argument `ranks` for each number of them. Arguments
and results are JSON.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from helpers.started import free_port
from helpers.system import environment
from samestep.distributed.stop_request import GROUP_SIGNALS
from samestep.errors import SamestepError
from samestep.launcher.fork_server import start_server
from samestep.launcher.worker import end_loader_workers, exit_process

TESTS = Path(__file__).parents[1]
TIMEOUT = 500  # seconds of a call


class _Duplicate:
    """Descriptor of a file, duplicated for a process when it starts."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self._descriptor),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


class Job(NamedTuple):
    """Call of a function of the module on a number of ranks."""

    function: str
    ranks: int
    arguments: dict[str, Any]


class RankServer:
    """Process that has imported a module, and runs its functions on forked ranks. Leaving the block ends it.

    Args:
        module: a module below `tests`, such as `unit.view.test_messages`.
    """

    def __init__(self, module: str) -> None:
        self._stack = ExitStack()
        self._output = self._stack.enter_context(tempfile.TemporaryFile("w+b"))  # noqa: SIM115
        context = multiprocessing.get_context("forkserver")
        start_server()
        self._jobs, jobs = context.Pipe()
        self._stack.enter_context(self._jobs)
        output = _Duplicate(self._output.fileno())
        self._process = context.Process(target=_serve, args=(module, jobs, output, environment()))
        self._process.start()
        jobs.close()

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._jobs.close()  # ends the process, if no rank of it hangs
        if kind is not None:
            self._kill()
        self._process.join()
        self._stack.close()

    def __call__(
        self, function: Callable[..., Any] | str, ranks: int, *, timeout: float = TIMEOUT, **arguments: Any
    ) -> Any:
        """Run a function on a number of ranks, and return what rank 0 returned."""
        name = function if isinstance(function, str) else function.__name__
        with suppress(OSError):  # the process has failed before
            self._jobs.send_bytes(json.dumps(Job(name, ranks, arguments)).encode())
        with suppress(OSError, EOFError):
            if self._jobs.poll(timeout):
                return json.loads(self._jobs.recv_bytes())
        self._kill()
        self._output.seek(0)
        raise AssertionError(f"{name} on {ranks} ranks:\n{self._output.read().decode(errors='replace')}")

    def _kill(self) -> None:
        if self._process.is_alive():
            assert self._process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def run_jobs(module: str, *jobs: Job, timeout: float = TIMEOUT) -> list[Any]:
    """Run jobs in a new process, and return what rank 0 of each returned."""
    with RankServer(module) as on_ranks:
        return [on_ranks(job.function, job.ranks, timeout=timeout, **job.arguments) for job in jobs]


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return code and text of the error of Samestep that a call raises; `none` and no text without an error."""
    try:
        function(*arguments, **options)
    except SamestepError as error:
        return [error.code, str(error)]
    return ["none", ""]


def _run_rank(module: Any, job: Job, rank: int, port: int, path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_WORLD_SIZE=str(job.ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        GLOO_SOCKET_IFNAME="lo",
    )
    code = 1
    try:
        result = getattr(module, job.function)(**job.arguments)
        if rank == 0:
            Path(path).write_text(json.dumps(result), encoding="utf-8")
        code = 0
    except Exception:
        traceback.print_exc()
    end_loader_workers()  # those of a loop that an error has ended
    exit_process(code)


def _run(module: Any, job: Job) -> str:
    port = free_port()
    with tempfile.NamedTemporaryFile() as file:
        children = []
        for rank in range(job.ranks):
            if (child := os.fork()) == 0:
                _run_rank(module, job, rank, port, file.name)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), f"{job}: exit codes {codes}"
        return Path(file.name).read_text(encoding="utf-8")


def _serve(module: str, jobs: Connection, output: int, variables: dict[str, str]) -> None:
    """Run jobs until the connection is closed."""
    multiprocessing.set_start_method(None, force=True)  # workers of loaders start as in plain Python
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(TESTS)
    os.environ.clear()
    os.environ.update(variables, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    faulthandler.enable()  # the stacks of a rank that a signal ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # blocked in the fork server
    gc.enable()
    loaded = importlib.import_module(module)
    while True:
        try:
            job = Job(*json.loads(jobs.recv_bytes()))
        except EOFError:
            return
        jobs.send_bytes(_run(loaded, job).encode())
