"""Runs of scripts in forked processes, so that torch is imported once for all of them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import json
import linecache
import os
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plain_loop.script import SCRIPTS, Script

# Modules that the scripts and Samestep import, imported once. Their import changes no numbers:
# test_forked_run_prints_what_plain_python_prints.
PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.func",
    "torch.optim",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "samestep.session",
    "samestep.parallelize",
)
GRACE_SECONDS = 10.0  # after the first failure of a rank, for the other ranks
STACK_SECONDS = 0.5


def preload(scripts: Sequence[Script], *, threads: int = 1) -> None:
    """Import the modules for the runs of some scripts. No thread may be started here, since the runs are forks.

    Args:
        scripts: the scripts.
        threads: threads of an operation of torch in each process.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = dict.fromkeys(name for script in scripts if not script.missing for name in script.imports)
    for name in [*PRELOAD, *names]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()


@dataclass
class Outcome:
    """Files that one rank left.

    Attributes:
        code: exit code, negative for a signal.
        lines: printed lines that are compared.
        errors: text of the error stream.
        summary: modules of Samestep's summary.
        error: code of the error that ended the script, name of the exception, or None.
        digest: of the printed numbers, and of parameters and states after each step of an optimizer.
    """

    code: int
    lines: list[str]
    errors: str
    summary: list[dict[str, Any]]
    error: str | None
    digest: str


@dataclass(eq=False)
class Run:
    """One run of a script: plain, or with the added line on some processes.

    Attributes:
        script: the script.
        processes: number of processes; 0 for plain Python.
        folder: folder of the run's files, which is created.
        permuted: rows of the batches are in another order.
        exact: the added line asks for the reduction `exact`.
        rows: outputs of all sizes stay divided between the processes.
        strategy: strategy of the added line; `hsdp` has two copies.
        digests_steps: with `exact`, states after each step are compared too, not only the output and the last state.
            Not with `pp`, whose ranks have other parameters.
    """

    script: Script
    processes: int
    folder: Path
    permuted: bool = False
    exact: bool = False
    rows: bool = False
    strategy: str = "ddp"
    digests_steps: bool = True
    hung: bool = False
    seconds: float = 0.0
    _pids: list[int] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)
    _began: float = 0.0
    _failed_at: float | None = None

    @property
    def ranks(self) -> int:
        """Number of processes of this run."""
        return max(self.processes, 1)

    def start(self) -> None:
        """Fork the processes."""
        (self.folder / "work").mkdir(parents=True)
        port = free_port()
        self._began = time.monotonic()
        for rank in range(self.ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _run_as_rank(self, rank, port)
            self._pids.append(pid)

    def poll(self) -> bool:
        """Return whether all processes have ended. Ends them after the time limit."""
        for rank, pid in enumerate(self._pids):
            if rank in self._codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if self._failed_at is None and any(self._codes.values()):
            self._failed_at = now
        if len(self._codes) == self.ranks:
            self.seconds = round(now - self._began, 2)
            return True
        late = now - self._began > self.script.limit
        left_alone = self._failed_at is not None and now - self._failed_at > GRACE_SECONDS
        if late or left_alone:
            self.end()
        return False

    def outcomes(self) -> list[Outcome]:
        """Return the files of the ranks, in order."""
        return [self._outcome(rank) for rank in range(self.ranks)]

    def _outcome(self, rank: int) -> Outcome:
        printed = (self.folder / f"out{rank}").read_text(encoding="utf-8", errors="replace")
        errors = (self.folder / f"err{rank}").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in printed.splitlines() if line.startswith(("R ", "D "))]
        left = self.folder / f"left{rank}.json"
        found = json.loads(left.read_text(encoding="utf-8")) if left.exists() else {}
        digest = hashlib.sha256("\n".join([*lines, found.get("steps", "")]).encode()).hexdigest()
        return Outcome(self._codes[rank], lines, errors, found.get("summary", []), found.get("error"), digest)

    def end(self) -> None:
        """Write the stacks of the processes that are left, and end them."""
        self.hung = True
        left = [pid for rank, pid in enumerate(self._pids) if rank not in self._codes]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with its loader workers


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_as_rank(run: Run, rank: int, port: int) -> None:
    """Run the script in this fork, and end the process."""
    code = 1
    try:
        _prepare_process(run, rank, port)
        code = _execute(run, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare_process(run: Run, rank: int, port: int) -> None:
    os.setpgid(0, 0)
    atexit._clear()  # private: functions that the parent registered are the parent's
    signal.alarm(int(run.script.limit) + 60)  # should the parent be killed
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(run.folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    if run.processes:
        _set_environment(run, rank, port)
    os.chdir(run.folder / "work")
    sys.argv = [str(run.script.path)]
    sys.path.insert(0, str(SCRIPTS))
    if run.permuted:
        importlib.import_module("common").PERMUTE = True


def _set_environment(run: Run, rank: int, port: int) -> None:
    """Set the variables of torchrun; join the ranks and remove the variables if the script must not see them."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run.processes),
        "LOCAL_WORLD_SIZE": str(run.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.update(variables)
    if run.script.hides_environment:
        import samestep

        samestep.init(reduction="exact" if run.exact else "fast", strategy=_strategy(run))
        for name in variables:
            os.environ.pop(name, None)


def _execute(run: Run, rank: int) -> int:
    """Run the script as the main program; return the exit code."""
    source = run.script.source
    if run.processes:
        source = run.script.source_with_line
    elif run.permuted:
        source = run.script.source_with_halves
    path = str(run.script.path)
    # Tracebacks and `inspect` read the lines from here, not from the file; without a time they are not checked.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    code, error = 0, None
    if run.processes:
        from samestep.view.view import View

        View.divides_small_calls = True  # otherwise the scripts, which are small, would test little
        if run.rows:
            View.batch_limit = View.output_limit = 1
    steps = None
    if run.exact:
        import samestep

        samestep.parallel = functools.partial(samestep.parallel, reduction="exact", strategy=_strategy(run))
        if run.digests_steps:
            steps = _DigestOfSteps()
        if run.strategy != "ddp":
            _report_full_state()
    try:
        exec(compile(source, path, "exec"), main.__dict__)
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except BaseException as exception:
        code = 1
        error = getattr(exception, "code", None) or type(exception).__name__
        sys.last_value = exception  # as the interpreter does
        traceback.print_exception(exception)
    summary = _summary() if run.processes else []
    left = {"error": error, "summary": summary, "steps": steps.hexdigest() if steps is not None else ""}
    (run.folder / f"left{rank}.json").write_text(json.dumps(left), encoding="utf-8")
    atexit._run_exitfuncs()  # private: the interpreter calls this, `os._exit` does not
    return code


def _report_full_state() -> None:
    """Let scripts print full tensors of models whose parameters are divided."""
    import samestep

    common = importlib.import_module("common")
    report = common.report

    def report_full(losses: Any, *models: Any) -> None:
        states = [samestep.full_state_dict(model) for model in models]
        report(losses, *[types.SimpleNamespace(state_dict=lambda state=state: state) for state in states])

    common.report = report_full


def _strategy(run: Run) -> Any:
    from samestep.config import MeshConfig, StrategyConfig

    mesh = MeshConfig(replicate=2) if run.strategy == "hsdp" else MeshConfig()
    return StrategyConfig(name=run.strategy, mesh=mesh)  # type: ignore[arg-type]


class _DigestOfSteps:
    """Hash of the parameters and states after each step of an optimizer.

    Steps in hooks of a backward count without their order: parameters are independent, and a layout gives each its
    gradient at another time.
    """

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._digest = hashlib.sha256()
        self._sum_in_backwards = 0
        register_optimizer_step_post_hook(self._extend)

    def _extend(self, optimizer: Any, *_: Any) -> None:
        import torch

        from samestep.strategies.divided_parameters import full_tensor

        step = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for value in (parameter, *optimizer.state.get(parameter, {}).values()):
                    if isinstance(value, torch.Tensor):
                        raw = full_tensor(value.detach()).to_dense().contiguous().reshape(-1).view(torch.uint8)
                        step.update(memoryview(raw.numpy()))
                    else:
                        step.update(repr(value).encode())
        if torch._C._current_graph_task_id() == -1:
            self._digest.update(step.digest())
        else:
            self._sum_in_backwards += int.from_bytes(step.digest(), "little")

    def hexdigest(self) -> str:
        return f"{self._digest.hexdigest()} {self._sum_in_backwards:x}"


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr)
    return 1


def _summary() -> list[dict[str, Any]]:
    """Return the modules of Samestep's summary, as JSON."""
    from samestep.launcher.process_state import process_state

    view = process_state.view
    if view is None:
        return []
    return [
        {
            "module": module.module,
            "divided": module.divided,
            "whole": module.whole,
            "reasons": list(module.reasons),
        }
        for module in view.modules
    ]
