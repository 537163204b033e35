"""One report of a failure among ranks that no launcher of ours watches."""

from __future__ import annotations

import time

import torch.distributed as dist

from samestep.runtime.failure import Failure
from samestep.runtime.job import Job

_NAP_SECONDS = 0.02
# How long a rank that lost another one waits for that one's report.
_SETTLE_SECONDS = 1.0
# How long rank 0, with which the store may end, gives the others to look.
_PARTING_SECONDS = 1.0
_TELLERS, _TOLD, _SEEN = "failure/tellers", "failure/exit-code", "failure/seen"


def somebody_told(store: dist.Store) -> bool:
    """Whether a rank has told of a failure, or its end took the store along."""
    try:
        return bool(store.check([_TOLD]))
    except dist.DistError:
        return True


def tell_once(job: Job, failure: Failure) -> tuple[bool, int]:
    """Whether this rank is the one to tell, and the exit code of the failure that is told.

    A rank that merely lost another one tells only if nobody else does. Where the store is gone, rank 0 or the launcher
    is gone: it has told, or was killed, which is told by who started it.
    """
    store = job.store
    is_first, code = False, failure.exit_code
    if job.rank != 0 and not job.is_store_there():
        return is_first, code
    try:
        if failure.is_consequence:
            _wait(store, [_TOLD], _SETTLE_SECONDS)
        is_first = store.add(_TELLERS, 1) == 1
        if is_first:
            store.set(_TOLD, str(code))
        else:
            code = int(store.get(_TOLD))
        # From here on rank 0 may be gone, and the store with it.
        store.set(f"{_SEEN}/{job.rank}", "")
        if job.rank == 0:
            _wait(store, [f"{_SEEN}/{other}" for other in range(1, job.size)], _PARTING_SECONDS)
    except dist.DistError:
        return is_first, code
    return is_first, code


def _wait(store: dist.Store, keys: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_NAP_SECONDS)
