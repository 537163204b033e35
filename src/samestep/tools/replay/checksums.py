"""Checksums of replayed states, compared with the logged ones."""

from __future__ import annotations

from samestep.engine.checksum import state_checksum
from samestep.engine.engine import Engine
from samestep.microbatches import Cursor
from samestep.tools.replay.launch import Replayed, ReplayRequest


def add_checksum(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> None:
    """Add the checksum of the state, if it is logged or the last one; collective as `state_checksum`."""
    step = engine.steps
    if step and (step in request.logged or step == request.last):
        value = state_checksum(engine, cursor)
        if value is not None:
            result.checksums[step] = f"{value:016x}"
