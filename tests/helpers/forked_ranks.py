"""Ranks as forks of one process that has imported a slow library, with the variables of torchrun.

`python -m helpers.forked_ranks MODULE` reads jobs as JSON from standard input, runs one after another, and writes the
results of rank 0 as JSON to the last line of standard output.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helpers.started import free_port
from helpers.system import environment
from samestep.errors import SamestepError

TESTS = Path(__file__).parents[1]


class Job(NamedTuple):
    """Call of a function of the module on a number of ranks."""

    function: str
    ranks: int
    arguments: dict[str, Any]


def run_jobs(module: str, *jobs: Job, timeout: float = 230) -> list[Any]:
    """Run jobs in a new process, and return what rank 0 of each returned, or the code of its error."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.forked_ranks", module],
        cwd=TESTS,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return results


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


def _run(module: Any, job: Job) -> Any:
    port = free_port()
    with tempfile.NamedTemporaryFile() as file:
        children = []
        for rank in range(job.ranks):
            if (child := os.fork()) == 0:
                _run_rank(module, job, rank, port, file.name)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), f"{job}: exit codes {codes}"
        return json.loads(Path(file.name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    loaded = importlib.import_module(sys.argv[1])
    results = [_run(loaded, Job(*entry)) for entry in json.load(sys.stdin)]
    print(json.dumps(results))
