"""Checks of processors, memory, open files, runs folder and launcher."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from samestep.checkpoint.files import unsupported_features
from samestep.distributed.launcher_detection import find_rendezvous
from samestep.distributed.resources import usable_processors
from samestep.errors import InputError, SamestepError
from samestep.tools.doctor.findings import Finding, Plan, Verdict, judged
from samestep.units import format_bytes

_SHM = Path("/dev/shm")
_CONTAINER_SHM_BYTES = 64 << 20  # default of docker run
_MIN_OPEN_FILES = 1024  # common default; user code opens files too
# Three checkpoints (last two, best) of 30 million parameters with Adam in float32.
_MIN_FREE_BYTES = 1 << 30


def check_resources(plan: Plan) -> Iterator[Finding]:
    """Check that the planned ranks and workers have processors, memory, shared memory and open files."""
    processors = usable_processors()
    yield judged(
        "processors",
        "pass" if plan.processes <= processors else "warn",
        f"{processors} of {os.cpu_count()} for {plan}",
        "one processor per rank; results are equal, but the run is slower",
        f"--processes {processors}, or a higher limit (docker run --cpus, resources.limits.cpu of a pod)",
    )
    available = psutil.virtual_memory().available
    yield judged(
        "memory",
        compare(available, plan.memory, plan.memory / 0.8),
        f"{format_bytes(available)} available, {format_bytes(plan.memory)} for {plan}",
        "ranks and workers fit in memory; otherwise the kernel kills one of them",
        "fewer --processes or --workers, or a higher limit (docker run --memory, sbatch --mem)",
    )
    if _SHM.is_dir():
        free = shutil.disk_usage(_SHM).free
        yield judged(
            f"shared memory, {_SHM}",
            compare(free, plan.shared_memory, _CONTAINER_SHM_BYTES + 1),
            f"{format_bytes(free)} free, {format_bytes(plan.shared_memory)} for {plan}",
            "space for microbatches from workers and buffers of NCCL; otherwise loaders hang or end with a bus error",
            f"docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8G {_SHM}; or fewer --workers",
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY:
        yield judged(
            "open files, ulimit -n",
            compare(limit, plan.open_files, max(_MIN_OPEN_FILES, 2 * plan.open_files)),
            f"{limit} per process; a rank needs about {plan.open_files}, user code more",
            'room for workers, connections and checkpoints; otherwise "Too many open files"',
            "ulimit -n 65536, or LimitNOFILE= of the service",
        )


def compare(limit: float, needed: float, comfortable: float) -> Verdict:
    """Return `fail` if the limit is below the need, and `warn` if it is below a comfortable value."""
    if limit < needed:
        return "fail"
    if limit < comfortable:
        return "warn"
    return "pass"


def check_folder(path: Path) -> Iterator[Finding]:
    """Check that a run can write its files; of a missing runs folder, the nearest existing parent is tried."""
    absolute = path.absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    try:
        free = shutil.disk_usage(existing).free
        missing = unsupported_features(existing)
    except (OSError, SamestepError) as error:
        value = f"{path}: {str(error).splitlines()[0]}"
        fix = "--runs DIR with a writable folder"
        yield Finding("runs folder", "fail", value, "files can be written, synced and renamed", fix)
        return
    yield Finding(
        "runs folder",
        "pass",
        f"{path} is writable{'; without ' if missing else ''}{', '.join(missing)}",
    )
    yield judged(
        "free space for runs",
        "pass" if free >= _MIN_FREE_BYTES else "warn",
        format_bytes(free),
        "space for four checkpoints (weights and optimizer state): last two, best, and one being written",
        "free space, or --runs DIR on another disk; a full disk loses the newest checkpoint only",
    )


def check_launcher(variables: Mapping[str, str]) -> Finding:
    """Check that the variables of a launcher are complete."""
    try:
        launcher = find_rendezvous(variables)
    except InputError as error:
        expected = error.expected or "complete launcher variables"
        return Finding(
            "launcher", "fail", error.value, expected, error.fix or "unset these variables"
        )
    if launcher is None:
        return Finding("launcher", "pass", "none; samestep starts the ranks")
    return Finding(
        "launcher", "pass", f"{launcher.launcher}, rank {launcher.rank} of {launcher.world_size}"
    )
