"""Limits of this process (ulimit), against what ranks and workers need."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.runtime.cgroups import ControlGroups
from samestep.tools.doctor.finding import Finding, fails, informs, passes, size_text, warns
from samestep.tools.doctor.plan import Plan

_OFTEN = 1024  # what most systems have; scripts hold files of their own besides
_SMALL_STACK = 1 << 20
_SMALL_FILE = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Soft limits; None where there is none.

    Attributes:
        files: that a process may hold open (-n).
        tasks: processes and threads of this user (-u).
        tasks_now: how many this user has; 0 where that does not matter.
        group_tasks_left: processes and threads that the control group may still start.
        locked: bytes of memory that may be kept from being swapped out (-l).
        core: bytes of the memory image that a crash leaves (-c).
        stack: bytes of a stack (-s).
        file_size: bytes of a file (-f).
        is_root: the kernel does not hold this user to `tasks`.
        has_infiniband: there are adapters that need locked memory.
    """

    files: int | None = None
    tasks: int | None = None
    tasks_now: int = 0
    group_tasks_left: int | None = None
    locked: int | None = None
    core: int | None = None
    stack: int | None = None
    file_size: int | None = None
    is_root: bool = False
    has_infiniband: bool = False


def read_limits(groups: ControlGroups) -> Limits:
    """Those of this process."""
    tasks = _soft(resource.RLIMIT_NPROC)
    return Limits(
        files=_soft(resource.RLIMIT_NOFILE),
        tasks=tasks,
        tasks_now=_tasks_of_user() if tasks is not None else 0,
        group_tasks_left=groups.tasks_left,
        locked=_soft(resource.RLIMIT_MEMLOCK),
        core=_soft(resource.RLIMIT_CORE),
        stack=_soft(resource.RLIMIT_STACK),
        file_size=_soft(resource.RLIMIT_FSIZE),
        is_root=os.geteuid() == 0,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def _soft(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _tasks_of_user() -> int:
    count, user = 0, os.getuid()
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids, threads = process.info["uids"], process.info["num_threads"]
        if uids is not None and uids.real == user:
            count += threads or 1
    return count


def check_files(limits: Limits, plan: Plan) -> Finding:
    """Whether a rank can open what it needs."""
    name, need = "open files, ulimit -n", plan.files
    if limits.files is None:
        return passes(name, "no limit")
    value = f"{limits.files} a process; a rank needs some {need}, and what a script opens itself"
    rule = "pipes and shared memory of workers, connections between ranks, checkpoints; torch tells of it as "
    rule += '"Too many open files" or "received 0 items of ancdata"'
    if limits.files < need:
        return fails(name, value, rule=rule, do="ulimit -n 65536, or LimitNOFILE= of the service")
    if limits.files < max(_OFTEN, 2 * need):
        return warns(name, value, rule=rule, do="ulimit -n 65536, or LimitNOFILE= of the service")
    return passes(name, f"{limits.files}")


def check_tasks(limits: Limits, plan: Plan) -> Iterator[Finding]:
    """Whether ranks, workers and their threads may be started."""
    need = plan.tasks
    rule = 'every process and thread counts; "Resource temporarily unavailable" is how it ends'
    name = "processes and threads, ulimit -u"
    if limits.tasks is None:
        yield passes(name, "no limit")
    elif limits.tasks - limits.tasks_now < need:
        value = f"{limits.tasks}, of which {limits.tasks_now} are taken; {need} are needed for {plan}"
        if limits.is_root:
            value += " (root is not held to it, other users are)"
        yield fails(name, value, rule=rule, do="ulimit -u 65536, or end processes of this user that are left over")
    else:
        yield passes(name, f"{limits.tasks}, of which {limits.tasks_now} are taken")
    left = limits.group_tasks_left
    if left is not None and left < need:
        yield fails(
            "processes and threads of the control group",
            f"{left} are left; {need} are needed for {plan}",
            rule=rule,
            do="docker run --pids-limit=-1, TasksMax= of the service, or the pod's limit",
        )


def check_locked_memory(limits: Limits) -> Finding:
    """Whether network adapters can have their buffers."""
    name = "locked memory, ulimit -l"
    if limits.locked is None:
        return passes(name, "no limit")
    if limits.has_infiniband:
        return warns(
            name,
            size_text(limits.locked),
            rule="InfiniBand adapters need their buffers locked; NCCL fails with ibv_reg_mr or ibv_create_cq otherwise",
            do="ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of Slurm's daemon",
        )
    return passes(name, f"{size_text(limits.locked)}, and no InfiniBand that needs more")


def check_sizes(limits: Limits) -> Iterator[Finding]:
    """Whether stacks, files and memory images have a useful size."""
    if limits.stack is not None and limits.stack < _SMALL_STACK:
        yield warns(
            "stack, ulimit -s",
            size_text(limits.stack),
            rule="1 MiB or more: deep modules and their backward pass crash on less, without a message",
            do="ulimit -s 8192",
        )
    else:
        yield passes("stack, ulimit -s", "no limit" if limits.stack is None else size_text(limits.stack))
    if limits.file_size is None:
        yield passes("size of a file, ulimit -f", "no limit")
    else:
        small = limits.file_size < _SMALL_FILE
        yield (fails if small else warns)(
            "size of a file, ulimit -f",
            size_text(limits.file_size),
            rule='a file of weights or optimizer state may be as large as it is; "File too large" otherwise',
            do="ulimit -f unlimited",
        )
    core = "no limit" if limits.core is None else size_text(limits.core)
    yield informs("memory image of a crash, ulimit -c", "none is written" if limits.core == 0 else core)
