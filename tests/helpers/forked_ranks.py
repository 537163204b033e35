"""Functions of a test file on real ranks: forks of one process that has imported the file, as torchrun starts them.

A test gets the fixture `on_ranks`; `on_ranks(function, size, **arguments)` returns what rank 0 returned. The marker
`ranks(1, 2, slow=(4,))` runs a test with its argument `ranks` for each number of them. Arguments and results are JSON.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from helpers.started import free_port
from helpers.system import environment
from samestep.errors import SamestepError

TESTS = Path(__file__).parents[1]
TIMEOUT = 400  # seconds of a call


class Job(NamedTuple):
    """Call of a function of the module on a number of ranks."""

    function: str
    ranks: int
    arguments: dict[str, Any]


class RankServer:
    """Process that has imported a module, and runs its functions on forked ranks. Leaving the block ends it.

    Args:
        module: a module below `tests`, such as `unit.view.test_ranks`.
    """

    def __init__(self, module: str) -> None:
        self._stack = ExitStack()
        self._output = self._stack.enter_context(tempfile.TemporaryFile("w+b"))  # noqa: SIM115
        results, writer = os.pipe()
        self._results = self._stack.enter_context(os.fdopen(results, "rb"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forked_ranks", module, str(writer)],
            cwd=TESTS,
            env=environment() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # ends the process, if no rank of it hangs
        if kind is not None:
            self._kill()
        self._process.wait()
        self._stack.close()

    def __call__(
        self, function: Callable[..., Any] | str, ranks: int, *, timeout: float = TIMEOUT, **arguments: Any
    ) -> Any:
        """Run a function on a number of ranks, and return what rank 0 returned."""
        name = function if isinstance(function, str) else function.__name__
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has failed before
            self._process.stdin.write(json.dumps(Job(name, ranks, arguments)).encode() + b"\n")
        line = b""
        if select.select([self._results], [], [], timeout)[0]:
            line = self._results.readline()
        if not line:
            self._kill()
            self._output.seek(0)
            raise AssertionError(f"{name} on {ranks} ranks:\n{self._output.read().decode(errors='replace')}")
        return json.loads(line)

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


if __name__ == "__main__":
    loaded = importlib.import_module(sys.argv[1])
    with open(int(sys.argv[2]), "w", encoding="utf-8") as results:
        for line in sys.stdin:
            results.write(_run(loaded, Job(*json.loads(line))) + "\n")
            results.flush()
