"""State of the process that a test must not change: variables, threads, child processes, modes, process group."""

import gc
import multiprocessing
import os
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist

# Set by pytest, by torch, and by the import of scikit-learn.
_IGNORED = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}


@dataclass(frozen=True)
class Snapshot:
    """State of this process that one test could leave to the next."""

    environment: dict[str, str]
    threads: frozenset[int]
    children: frozenset[int]
    modes: dict[str, object]
    has_group: bool


def snapshot() -> Snapshot:
    """Return the current state."""
    multiprocessing.active_children()  # reaps ended children
    return Snapshot(
        environment={name: value for name, value in os.environ.items() if name not in _IGNORED},
        threads=frozenset(thread.native_id or 0 for thread in threading.enumerate()),
        children=frozenset(_children()),
        modes=_modes(),
        has_group=dist.is_initialized(),
    )


def leaks_since(before: Snapshot) -> list[str]:
    """Return descriptions of the differences to `before`."""
    leaks = differences(before, snapshot())
    if leaks:
        gc.collect()  # collecting a loader ends its workers; collection is slow, so only if needed
        leaks = differences(before, snapshot())
    return leaks


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return descriptions of the additions and changes in `after`."""
    names = before.environment.keys() | after.environment.keys()
    changed = sorted(name for name in names if before.environment.get(name) != after.environment.get(name))
    descriptions = [f"environment variable {name}" for name in changed]
    started = after.threads - before.threads
    descriptions += [f"thread {thread.name}" for thread in threading.enumerate() if thread.native_id in started]
    descriptions += [f"process {child}" for child in sorted(after.children - before.children)]
    descriptions += [f"torch's {name}" for name in before.modes if before.modes[name] != after.modes[name]]
    if after.has_group and not before.has_group:
        descriptions.append("a process group")
    return descriptions


def _modes() -> dict[str, object]:
    return {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
    }


def _children() -> set[int]:
    """Return the descendants of this process, without Python's fork server and resource tracker."""
    server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
    descendants: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in _children_of(queue.pop()):
            descendants.add(child)
            queue.append(child)
    return descendants - {server, tracker}


def _children_of(process: int) -> list[int]:
    """Return the children of a process; without Linux's /proc, those started by `multiprocessing`."""
    if not Path("/proc/self/task").is_dir():
        known = multiprocessing.active_children() if process == os.getpid() else []
        return [child.pid for child in known if child.pid is not None]
    try:
        lists = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []  # the process has ended
    return [int(child) for line in lists for child in line.split()]
