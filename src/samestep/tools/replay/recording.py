"""Record of the steps of a replay, as `samestep verify` records those of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.launcher.job import process_state, rank_and_size
from samestep.tools.replay.launch import ReplayRequest
from samestep.tools.verify.worker import Probe


@contextmanager
def recording(request: ReplayRequest) -> Iterator[None]:
    """Record the steps in the block if the request has a trial."""
    if request.trial is None:
        yield
        return
    rank, size = rank_and_size()
    with (request.trial.folder / f"rank-{rank}.jsonl").open("a") as file:
        process_state.callbacks.append(Probe(request.trial, rank, size, file))
        yield
