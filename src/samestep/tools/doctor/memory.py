"""Memory, shared memory and address space, against what ranks and workers need."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import psutil

from samestep.runtime.cgroups import ControlGroups
from samestep.tools.doctor.finding import Finding, fails, informs, passes, size_text, warns
from samestep.tools.doctor.plan import Plan

SHARED = "/dev/shm"
# A rank that computes on a CPU; measured, 1.9 GiB with a small model.
_RANK_ADDRESSES = 4 << 30
# CUDA maps the memory of all GPUs and of the machine in one space of addresses.
_GPU_ADDRESSES = 64 << 30
# What containers get unless they are told otherwise.
_CONTAINER_SHARED = 64 << 20


@dataclass(frozen=True)
class Memory:
    """What there is, in bytes.

    Attributes:
        total: of the machine.
        available: that new processes can have without swapping.
        group: the limit of the control group, if it has one.
        group_left: what is left of it.
        addresses: the limit on one process' address space or data (`ulimit -v`, `-d`), if there is one.
        shared_total: size of /dev/shm; None where there is none.
        shared_free: what is free of it.
    """

    total: int
    available: int
    group: int | None = None
    group_left: int | None = None
    addresses: int | None = None
    shared_total: int | None = None
    shared_free: int | None = None


def read_memory(groups: ControlGroups) -> Memory:
    """What this process finds."""
    found = psutil.virtual_memory()
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    try:
        shared = psutil.disk_usage(SHARED)
    except OSError:
        shared = None
    return Memory(
        total=found.total,
        available=found.available,
        group=groups.memory,
        group_left=groups.memory_left,
        addresses=min(finite, default=None),
        shared_total=shared.total if shared else None,
        shared_free=shared.free if shared else None,
    )


def check_memory(memory: Memory, plan: Plan) -> Finding:
    """Whether ranks and workers fit."""
    name, need = "memory", plan.memory
    by_group = memory.group_left is not None and memory.group_left < memory.available
    there = memory.group_left if by_group and memory.group_left is not None else memory.available
    whose = "left by the control group's limit" if by_group else "available"
    value = f"{size_text(there)} {whose}, {size_text(need)} for {plan}"
    rule = "ranks and workers fit into the memory that is there; the kernel kills one of them when they do not"
    do = "fewer --processes or --workers, or a higher limit (docker run --memory, sbatch --mem)"
    if need > there:
        return fails(name, value, rule=rule, do=do)
    if need > 0.8 * there:
        return warns(name, value, rule=rule, do=do)
    return passes(name, value)


def check_shared_memory(memory: Memory, plan: Plan) -> Finding:
    """Whether what workers hand over fits into /dev/shm."""
    name, need = f"shared memory, {SHARED}", plan.shared_memory
    if memory.shared_total is None or memory.shared_free is None:
        return informs(name, "there is none")
    value = f"{size_text(memory.shared_free)} free of {size_text(memory.shared_total)}, {size_text(need)} for {plan}"
    rule = "what workers hand over, and NCCL's buffers between GPUs without peer access, lie there; with too "
    rule += "little, loaders hang or end in a bus error"
    do = f"docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8G {SHARED}; or fewer --workers"
    if need > memory.shared_free:
        return fails(name, value, rule=rule, do=do)
    if memory.shared_free <= _CONTAINER_SHARED:
        return warns(name, value, rule=rule, do=do)
    return passes(name, value)


def check_address_space(memory: Memory, gpus: int) -> Finding:
    """Whether one rank may map what it needs."""
    name, need = "address space, ulimit -v and -d", _GPU_ADDRESSES if gpus else _RANK_ADDRESSES
    if memory.addresses is None:
        return passes(name, "no limit")
    value = (
        f"{size_text(memory.addresses)} a process; a rank{' with a GPU' if gpus else ''} maps some {size_text(need)}"
    )
    if memory.addresses >= need:
        return informs(name, value)
    return fails(
        name,
        value,
        rule="a rank maps far more than it holds, so that its libraries fail to load, or std::bad_alloc comes early",
        do="ulimit -v unlimited; ulimit -d unlimited; bound memory by a control group, which counts what is held",
    )
