"""What a test must leave as it found it, as a picture to compare with an earlier one."""

import gc
import multiprocessing
import os
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist

# pytest writes the name of the running test there; torch says where it would keep compiled code.
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


@dataclass(frozen=True)
class Picture:
    """The parts of this process that one test could leave to the next."""

    environment: dict[str, str]
    threads: frozenset[int]
    children: frozenset[int]
    modes: dict[str, object]
    has_group: bool


def picture() -> Picture:
    """This process now."""
    multiprocessing.active_children()  # reaps those that have ended
    return Picture(
        environment={name: value for name, value in os.environ.items() if name not in _NOT_OURS},
        threads=frozenset(thread.native_id or 0 for thread in threading.enumerate()),
        children=frozenset(_children()),
        modes=_modes(),
        has_group=dist.is_initialized(),
    )


def left_behind(before: Picture) -> list[str]:
    """What is here now and was not in `before`."""
    found = differences(before, picture())
    if found:
        gc.collect()  # a loader ends its workers when it goes; collecting takes long, so only where it may matter
        found = differences(before, picture())
    return found


def differences(before: Picture, after: Picture) -> list[str]:
    """What `after` has that `before` had not, in words."""
    names = before.environment.keys() | after.environment.keys()
    changed = sorted(name for name in names if before.environment.get(name) != after.environment.get(name))
    found = [f"environment variable {name}" for name in changed]
    started = after.threads - before.threads
    found += [f"thread {thread.name}" for thread in threading.enumerate() if thread.native_id in started]
    found += [f"process {child}" for child in sorted(after.children - before.children)]
    found += [f"torch's {name}" for name in before.modes if before.modes[name] != after.modes[name]]
    if after.has_group and not before.has_group:
        found.append("a process group")
    return found


def _modes() -> dict[str, object]:
    return {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
    }


def _children() -> set[int]:
    """Processes below this one, without those that Python itself keeps: the fork server and the resource tracker."""
    server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        for child in _children_of(unseen.pop()):
            found.add(child)
            unseen.append(child)
    return found - {server, tracker}


def _children_of(process: int) -> list[int]:
    """Children of a process as Linux tells them; elsewhere those that `multiprocessing` knows of."""
    if not Path("/proc/self/task").is_dir():
        known = multiprocessing.active_children() if process == os.getpid() else []
        return [child.pid for child in known if child.pid is not None]
    try:
        lists = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it ended while we looked
    return [int(child) for line in lists for child in line.split()]
