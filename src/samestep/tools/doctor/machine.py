"""Checks of processors, memory, process limits and runs folder against the planned ranks and workers."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.checkpoint.files import sync_folder, write_file
from samestep.distributed.resources import CgroupLimits, Processors
from samestep.tools.doctor.findings import Finding, Plan, Verdict, judged
from samestep.units import format_bytes, plural

_SHM = "/dev/shm"
_CONTAINER_SHM_BYTES = 64 << 20  # default of docker run
_MIN_OPEN_FILES = 1024  # common default; user code opens files too
_TRIAL_BYTES = 1 << 20
# Three checkpoints (last two, best) of 30 million parameters with Adam in float32.
_MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Resources:
    """Memory in bytes, and limits of processes."""

    memory_total: int
    memory_available: int
    cgroup_memory: int | None = None  # memory left in the control group; None without a limit
    cgroup_tasks: int | None = None  # processes and threads left in the control group; None without a limit
    shm_total: int | None = None  # size of /dev/shm; None if it does not exist
    shm_free: int = 0
    open_files: int | None = None  # soft limit per process; None without a limit


def read_resources(cgroup: CgroupLimits) -> Resources:
    """Read memory, /dev/shm and the limits of this process."""
    memory, open_files = psutil.virtual_memory(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shm = shutil.disk_usage(_SHM) if os.path.isdir(_SHM) else None
    return Resources(
        memory.total,
        memory.available,
        cgroup.memory_left,
        cgroup.tasks_left,
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else 0,
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
    )


def _sufficient(needed: float, limit: float, comfortable: float) -> Verdict:
    """Return `fail` below the need, and `warn` below a comfortable value."""
    return "fail" if limit < needed else "warn" if limit < comfortable else "pass"


def check_processors(processors: Processors, plan: Plan) -> Iterator[Finding]:
    """Check that every compute thread has a processor."""
    allowed, quota, usable = processors.allowed, processors.quota, processors.usable
    verdict: Verdict = "pass" if usable == processors.online else "info"
    value = f"{usable}" if verdict == "pass" else f"{usable} of {processors.online} by affinity"
    if quota is not None and quota < allowed:
        value = f"{usable} of {processors.online}: the control group allows {quota:g} processors' time"
        verdict = "warn" if quota < 1 else "info"
    yield judged(
        "processors",
        verdict,
        value,
        "one processor per rank; results are equal, but the run is slower",
        "raise the quota (docker run --cpus, resources.limits.cpu of a pod)",
    )
    threads = plan.processes * plan.threads
    yield judged(
        "processes x threads",
        "pass" if threads <= usable else "warn",
        f"{plan.processes} x {plan.threads} = {threads} on {plural(usable, 'processor')}",
        "one processor per compute thread; results are equal, but the run is slower",
        f"--processes {max(1, usable // plan.threads)}, or step.threads: {max(1, usable // plan.processes)}",
    )


def check_memory(resources: Resources, plan: Plan) -> Iterator[Finding]:
    """Check that ranks and workers fit in memory, and prefetched microbatches in /dev/shm."""
    needed, available, source = plan.memory, resources.memory_available, "available"
    if resources.cgroup_memory is not None and resources.cgroup_memory < available:
        available, source = resources.cgroup_memory, "left in the control group"
    yield judged(
        "memory",
        _sufficient(needed, available, needed / 0.8),
        f"{format_bytes(available)} {source}, {format_bytes(needed)} for {plan}",
        "ranks and workers fit in memory; otherwise the kernel kills one of them",
        "fewer --processes or --workers, or a higher limit (docker run --memory, sbatch --mem)",
    )
    name, needed, total, free = f"shared memory, {_SHM}", plan.shared_memory, resources.shm_total, resources.shm_free
    if total is None:
        yield Finding(name, "info", "does not exist")
        return
    yield judged(
        name,
        _sufficient(needed, free, _CONTAINER_SHM_BYTES + 1),
        f"{format_bytes(free)} free of {format_bytes(total)}, {format_bytes(needed)} for {plan}",
        "space for microbatches from workers and for NCCL buffers between GPUs without peer access; otherwise loaders "
        "hang or end with a bus error",
        f"docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8G {_SHM}; or fewer --workers",
    )


def check_limits(resources: Resources, plan: Plan) -> Iterator[Finding]:
    """Check that a rank can open its files, and that all processes and threads can start."""
    name, needed, limit = "open files, ulimit -n", plan.open_files, resources.open_files
    verdict = "pass" if limit is None else _sufficient(needed, limit, max(_MIN_OPEN_FILES, 2 * needed))
    value = "no limit" if limit is None else f"{limit}"
    yield judged(
        name,
        verdict,
        value if verdict == "pass" else f"{limit} per process; a rank needs about {needed}, user code more",
        "room for workers, connections and checkpoints; otherwise torch raises "
        '"Too many open files" or "received 0 items of ancdata"',
        "ulimit -n 65536, or LimitNOFILE= of the service",
    )
    if resources.cgroup_tasks is not None and resources.cgroup_tasks < plan.tasks:
        yield Finding(
            "processes and threads of the control group",
            "fail",
            f"{resources.cgroup_tasks} left; {plan} need {plan.tasks}",
            'room for every process and thread; otherwise "Resource temporarily unavailable"',
            "docker run --pids-limit=-1, TasksMax= of the service, or the limit of the pod",
        )


# --- runs folder ---


@dataclass(frozen=True)
class Folder:
    """Result of a trial in the runs folder."""

    path: str  # path as the user gave it
    free: int | None = None  # bytes available to this user; None if unknown
    error: str | None = None  # reason of the system for a failure
    sync_seconds: float = 0.0  # time to write and sync one MiB
    locks: bool = True  # `flock` works


def read_folder(path: Path) -> Folder:
    """Write, sync, lock, rename and read a file in the folder, then remove the file.

    A missing folder is not created: the trial uses its nearest existing parent.
    """
    absolute = path.absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    free = None
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=existing, ignore_cleanup_errors=True) as trial:
            source, content = Path(trial, "source"), os.urandom(_TRIAL_BYTES)
            start = time.monotonic()
            write_file(source, content)
            seconds = time.monotonic() - start
            locks = False
            with source.open("rb") as file, suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = True
            target = source.rename(Path(trial, "target"))
            sync_folder(target.parent)
            error = None if target.read_bytes() == content else "reads back different bytes"
            return Folder(str(path), free, error, seconds, locks)
    except OSError as error:
        return Folder(str(path), free, f"cannot write {format_bytes(_TRIAL_BYTES)}: {error.strerror or error}")


def check_folder(folder: Folder) -> Iterator[Finding]:
    """Check that a run can write its files in the runs folder."""
    result = folder.error or f"writable; 1 MiB synced in {1000 * folder.sync_seconds:.0f} ms"
    yield judged(
        "runs folder",
        "fail" if folder.error else "pass",
        f"{folder.path}{':' if folder.error else ' is'} {result}",
        "files can be written, synced and renamed",
        "use a writable folder on a disk with free space: --runs DIR",
    )
    if not folder.locks:
        yield Finding(
            "file locks",
            "warn",
            "not supported by this file system",
            "a lock keeps two processes from writing one run",
            "mount with locks (Lustre: -o flock), or give every run a different --name",
        )
    if folder.free is not None:
        yield judged(
            "free space for runs",
            "pass" if folder.free >= _MIN_FREE_BYTES else "warn",
            format_bytes(folder.free),
            "space for four checkpoints (weights and optimizer state): last two, best, and one being written",
            "free space, or --runs DIR on another disk; a full disk loses the newest checkpoint only",
        )
