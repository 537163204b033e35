"""Worker process: the code around the launched function in one rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from samestep.distributed.env import hide_ranks, prepare_torch_environment, set_environment
from samestep.distributed.standard_streams import (
    STALL_SECONDS,
    STDOUT_SECONDS,
    protect_output,
    send_output_to,
)
from samestep.distributed.stop_request import GROUP_SIGNALS, StoppedLoop, die_with_parent
from samestep.errors import InputError
from samestep.launcher.failure import Failure
from samestep.launcher.pickling import pack
from samestep.launcher.process_state import WorkerSpec, process_state
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS
from samestep.report_text import message_of

_SCRIPT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class RankResult:
    """Result of the function in one rank."""

    value: bytes  # pickled; empty for ranks other than 0
    running: tuple[str, ...]  # threads and child processes that keep the process from ending
    is_stopped: bool = False  # the loop of the function ended on request


def run_rank(worker_spec: WorkerSpec, channel: Connection) -> None:
    """Run the function as one rank; send a `Failure` or a `RankResult`."""
    gc.freeze()  # no collection visits the objects of the modules that the fork server has imported
    gc.enable()
    die_with_parent(worker_spec.server)
    # The fork server does not end with the launcher on systems without prctl, and if a thread other
    # than the launcher's main thread started the server.
    threading.Thread(target=_watch_launcher, name="samestep-launcher-watch", daemon=True).start()
    # Ctrl-C reaches every process of the terminal; the launcher alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker_spec.stacks.install()
    rank = worker_spec.rank
    status = worker_spec.rank_status
    status.heartbeat()  # the rank has started
    is_stopped = False
    packed = b""
    try:
        _set_up(worker_spec)
        value = _call(worker_spec)
        if rank == 0:
            packed = pack(value)
    except StoppedLoop:
        is_stopped = True
    except SystemExit as error:
        # By Python's rules None is 0, and text is 1 and part of the report.
        message = ""
        exit_code = 1
        if error.code is None or isinstance(error.code, int):
            exit_code = (error.code or 0) & 0xFF  # the system keeps one byte: 255 for -1
        else:
            message = message_of(error.code)
        is_script = status.snapshot.is_script
        channel.send(
            Failure.of_exit(rank, exit_code, status.activity, message=message, is_script=is_script)
        )
        exit_process(1)
    except BaseException as error:  # boundary: the launcher reports any exception
        channel.send(Failure.of_exception(rank, error, status.activity))
        exit_process(1)
    end_loader_workers()
    threads = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    running = [thread.name for thread in threads if not thread.daemon]
    running += [child.name for child in multiprocessing.active_children() if not child.daemon]
    channel.send(RankResult(packed, tuple(running), is_stopped))
    # A forked rank joins its child processes first, which would wait without end for those of an
    # open ProcessPoolExecutor; the interpreter of a script ends the threads first.
    threading._shutdown()  # type: ignore[attr-defined]


def _watch_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    # Not `sys.exit`, which would end this thread alone.
    os.kill(os.getpid(), signal.SIGKILL)


def end_loader_workers() -> None:
    """Kill running loader workers, which ignore the SIGTERM that Python would send."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report a killed worker as a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _set_up(worker_spec: WorkerSpec) -> None:
    """Set the name, the output and the environment of this process."""
    with suppress(OSError):  # systems without /proc
        # In lists of processes, such as those of `ps -e` and `top`.
        Path("/proc/self/comm").write_text(f"samestep-{worker_spec.rank}", encoding="ascii")
    if worker_spec.log is not None:
        send_output_to(worker_spec.log)
    # A rank that waits for the reader of its output must continue before it counts as hung.
    limit = (worker_spec.timeout - COLLECTIVE_MARGIN_SECONDS) / 2
    protect_output(
        stdout_seconds=min(limit, STDOUT_SECONDS), stderr_seconds=min(limit, STALL_SECONDS)
    )
    # Before torch's defaults, which keep the variables that are set.
    set_environment(worker_spec.environment)
    prepare_torch_environment(loopback=True)


def _call(worker_spec: WorkerSpec) -> Any:
    # A frame of its own: stacks of ranks are shown from here on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # blocked since the fork server
    process_state.worker = worker_spec
    with process_state.exit_stack:  # the world of `samestep.init()`
        return worker_spec.function()


def exit_process(code: int) -> NoReturn:
    """End this process at once.

    `sys.exit` does not suffice: the main thread may be stuck, and the teardown of a process group
    with stuck peers could block or abort. Loader workers end with this process through their own
    death signal.
    """
    with suppress(OSError, ValueError):  # the output of a user's script may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class EndOfScript(BaseException):
    """Early end of a script by the tool that runs it; no `except Exception` catches it."""


def run_script(
    script: Path,
    arguments: tuple[str, ...],
    restarts: int = 0,
    max_restarts: int = 0,
    *,
    own_group: bool = True,
    is_module: bool = False,
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run `script` in this rank as `python script.py arguments` would.

    With `is_module`, `script` is the name of a module, as of `python -m`. The script runs inside of
    `surroundings`, after some `restarts` of the launch.

    With `own_group`, the script may call `torch.distributed.init_process_group()` as under
    torchrun. The store exists already, as with torchrun's agent, so no rank opens a port on other
    interfaces. Otherwise torchrun's variables are absent, so that a script with a part for several
    processes takes its part for one.
    """
    from samestep.launcher.rendezvous import host_store  # imports torch

    worker_spec = process_state.worker
    assert worker_spec is not None
    host_store(worker_spec, _SCRIPT_TIMEOUT)
    process_state.is_script = True
    worker_spec.rank_status.begin_script()
    if own_group:
        set_environment(_torchrun_variables(worker_spec, restarts, max_restarts))
    else:
        hide_ranks()
    main = _main_module(script, is_module=is_module)
    file = str(main.__file__)
    sys.argv = [file, *arguments]
    # The module is never removed: when a script drops its models, and the last process group with
    # them, torch waits for gloo threads that may wait for the GIL in turn.
    sys.modules["__main__"] = main
    process_state.source_files.note_imports()
    try:
        with surroundings():
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(main))
    except EndOfScript:
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except ImportError as error:
        if not is_module and message_of(error).startswith("attempted relative import"):
            raise _module_error(script, error) from error
        raise
    except (KeyError, ValueError) as error:
        if own_group or not _lacks_rank(error):
            raise
        raise _variables_error(script, error) from error


def _variables_error(script: Path, error: Exception) -> InputError:
    return InputError(
        f"{script.name} reads the variables of a launcher: {message_of(error)}",
        expected="a script for one process, or one that creates a process group of its own "
        "with --own-group",
        fix="samestep run --own-group for a script with DistributedDataParallel or "
        "init_process_group",
        code="E_OWN_GROUP",
    )


def _module_error(script: Path, error: ImportError) -> InputError:
    top = script.resolve().parent
    while (top.parent / "__init__.py").exists():
        top = top.parent
    name = ".".join(script.resolve().relative_to(top.parent).with_suffix("").parts)
    return InputError(
        f"{script} imports parts of its package by relative names: {message_of(error)}",
        expected="a module that is run by its name",
        fix=f"samestep run -m {name}, in {top.parent}",
        code="E_SCRIPT",
    )


def _main_module(script: Path, *, is_module: bool) -> ModuleType:
    """Return the empty module of a script, and put the folder of its imports first on the path."""
    main = ModuleType("__main__")
    if not is_module:
        main.__file__ = str(script)
        sys.path.insert(0, str(script.resolve().parent))
        return main
    sys.path.insert(0, os.getcwd())
    spec = find_spec(str(script))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{script}.__main__")
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise InputError(
            f"there is no module {script} to run",
            expected="a module with source code, as of python -m",
            fix="check the name, and run the command in the folder that contains the package",
            code="E_FILE_MISSING",
        )
    main.__file__ = spec.origin
    main.__spec__ = spec
    main.__package__ = spec.parent
    return main


def _torchrun_variables(
    worker_spec: WorkerSpec, restarts: int, max_restarts: int
) -> dict[str, str]:
    # https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
    address, port = worker_spec.store_address
    ranks = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(ranks, str(worker_spec.rank)),
        **dict.fromkeys(sizes, str(worker_spec.size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": "samestep",
    }


def _lacks_rank(error: KeyError | ValueError) -> bool:
    """Whether the script, or torch's rendezvous, lacks a variable of a launcher."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if isinstance(error, KeyError):
        return error.args in [(name,) for name in names]
    return any(f"environment variable {name} expected" in str(error) for name in names)
