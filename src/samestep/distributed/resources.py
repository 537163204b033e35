"""Resources of this machine: processors, memory of the allocator, open files, loopback, sockets."""

from __future__ import annotations

import _thread
import ctypes
import os
import resource
import socket
import tempfile
import threading
from functools import partial
from multiprocessing import util
from pathlib import Path

from samestep.errors import InputError
from samestep.number_text import plural

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_KEPT_BYTES = 2**28
# The largest value of the threshold that glibc adapts. Larger blocks are mapped: in the heap they
# could fragment it.
_MAPPED_BYTES = 2**25
_USUAL_OPEN_FILES = 1024  # default of most systems
# The launcher needs three per rank, a rank 32 and 4 per rank; workers of loaders need more, and
# torch ten to spare.
_OPEN_FILES = 48
_OPEN_FILES_PER_RANK = 4
_OPEN_FILES_PER_WORKER = 16  # pipes, semaphores and a few tensors
# Processes and threads: the launcher, its fork server and the tracker of resources; a rank with
# its process groups. Threads that compute are as many as processors.
_TASKS = 6
_TASKS_PER_RANK = 14
_TASK_STACK_BYTES = 2**18
_ADDRESS_SPACE = 2**30  # of a process that has imported torch, with a small model
# More ranks on one processor are a mistake in the command.
_MAX_RANKS_PER_PROCESSOR = 64
# unix(7): the path of a socket has at most 107 bytes. multiprocessing appends
# `/pymp-12345678/listener-12345678`.
_MAX_FOLDER_BYTES = 107 - 34
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 5.0
_machine_error = partial(InputError, code="E_MACHINE")


def usable_processors(root: Path = Path("/")) -> int:
    """Return the number of processors that can compute at the same time for this process.

    They are limited by the affinity mask and by the control groups on all levels (cgroups(7),
    version 2). The folder `root` contains `proc` and `sys`.
    """
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has no affinity
        allowed = len(os.sched_getaffinity(0))

    def text(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            return ""  # version 1 of control groups, or a group that is not visible here

    top = root / "sys" / "fs" / "cgroup"
    _, _, path = text(root / "proc" / "self" / "cgroup").strip().rpartition("::")
    # In a container the path may be that of the host, with the container's own group mounted as
    # the root.
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        quota, _, period = text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            # Rounded down: the kernel stops threads beyond the quota until the next period.
            allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)


def keep_freed_memory() -> bool:
    """Keep 256 MiB of freed memory for all threads; return whether the C library accepted this.

    Each step allocates and frees tensors of equal sizes. With its defaults, glibc returns their
    memory to the system, which fills it with zeros again, page by page: up to a tenth of a step.
    Threads that start later use one heap: with heaps of their own, memory that one thread has
    freed would not serve another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        and mallopt(_ARENA_MAX, 1)
    )


def require_machine(processes: int) -> None:
    """Require that `processes` ranks can start here, and raise the limit of open files if needed.

    Raises:
        InputError: there are too many ranks, too few open files, processes or bytes of memory are
            allowed, or no folder can hold a socket.
    """
    processors = usable_processors()
    most = _MAX_RANKS_PER_PROCESSOR * processors
    if processes > most:
        raise _machine_error(
            f"{processes} ranks on a machine with {processors} usable processors",
            expected=f"at most {most} ranks here, {_MAX_RANKS_PER_PROCESSOR} per processor",
            fix=f"--processes {processors}",
        )
    ranks = plural(processes, "rank")
    require_open_files(
        _OPEN_FILES + _OPEN_FILES_PER_RANK * processes,
        f"{ranks} ({_OPEN_FILES}, and {_OPEN_FILES_PER_RANK} per rank)",
    )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY and memory < _ADDRESS_SPACE:
        raise _machine_error(
            f"a process may use {memory >> 10} KiB of address space here (ulimit -v)",
            expected=f"at least {_ADDRESS_SPACE >> 10} KiB in each process of {ranks}, and more "
            "for large models and for GPUs",
            fix="ulimit -v unlimited, or limit the memory by a control group",
        )
    _require_tasks(_TASKS + _TASKS_PER_RANK * processes + processors, ranks)
    use_short_temporary_folder()


def require_open_files(needed: int, purpose: str) -> None:
    """Require that this process may open `needed` files, and raise its limit to a usual one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < needed:
        raise _machine_error(
            f"a process may open {hard} files here (ulimit -n)",
            expected=f"at least {needed} open files per process for {purpose}",
            fix=f"ulimit -n {max(_USUAL_OPEN_FILES, needed)}, or a higher LimitNOFILE= of the "
            "service",
        )
    usual = max(_USUAL_OPEN_FILES, needed)
    if soft != unlimited and soft < usual:
        if hard != unlimited:
            usual = min(usual, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))


def require_files_of_workers(workers: int) -> None:
    """Require that a rank may open the files of this number of loader workers."""
    needed = _OPEN_FILES + _OPEN_FILES_PER_WORKER * workers
    require_open_files(needed, f"a rank with {plural(workers, 'loader worker')}")


def _require_tasks(needed: int, ranks: str) -> None:
    """Start as many threads as the ranks need processes and threads, and end them.

    Limits of the account, of a control group and of a service are not compared: all of them count
    what else runs.
    """
    end = threading.Event()
    # Small stacks: the usual ones of 8 MiB would count against `ulimit -v`.
    before = threading.stack_size(_TASK_STACK_BYTES)
    started = 0
    try:
        # `threading.Thread` would wait for each of them, which takes ten times as long.
        while started < needed:
            _thread.start_new_thread(end.wait, ())
            started += 1
    except RuntimeError as error:
        raise _machine_error(
            f"only {plural(started, 'more process')} or threads can start here (ulimit -u)",
            expected=f"at least {needed} for {ranks} ({_TASKS_PER_RANK} per rank)",
            fix="ulimit -u 4096, docker run --pids-limit 4096, or TasksMax= of the service",
        ) from error
    finally:
        threading.stack_size(before)
        end.set()


def use_short_temporary_folder() -> None:
    """Let `multiprocessing` create its sockets below /tmp if the temporary folder's path is long.

    Child processes inherit the choice, loader workers too.

    Raises:
        InputError: /tmp is not writable.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # the first call creates the folder of all sockets
    except OSError as error:
        raise _machine_error(
            f"the path of the temporary folder {folder} is too long for sockets, and /tmp is not "
            "writable",
            expected=f"at most {_MAX_FOLDER_BYTES} bytes: the kernel limits the paths of sockets",
            fix="set TMPDIR to a folder with a shorter path",
        ) from error
    finally:
        tempfile.tempdir = folder


def free_loopback_socket() -> socket.socket:
    """Return a listening socket on a free port of the loopback interface.

    Raises:
        InputError: the interface is missing or down.
    """
    try:
        listener = socket.create_server((_LOOPBACK, 0), backlog=128)
        # A port can be opened while the interface is down; a connection needs it.
        socket.create_connection(listener.getsockname(), timeout=_CONNECT_SECONDS).close()
        listener.accept()[0].close()
    except OSError as error:
        raise _machine_error(
            f"the loopback interface does not work: {error}",
            expected=f"ranks on one machine communicate by {_LOOPBACK}",
            fix="ip link set lo up (a container without a network, such as unshare -n, starts with "
            "lo down)",
        ) from error
    return listener
