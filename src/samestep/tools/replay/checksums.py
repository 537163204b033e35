"""Checksums of replayed states, compared with the logged ones."""

from __future__ import annotations

from samestep.distributed.world import all_gather
from samestep.engine.checksum import MODULUS, find_flipped_bit
from samestep.engine.engine import Engine
from samestep.engine.state_checksum import state_checksum, state_parts
from samestep.microbatches import Cursor
from samestep.tools.replay.launch import Replayed, ReplayRequest


def add_checksum(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> None:
    """Add the checksum of the state, if it is logged or the last one; collective as `state_checksum`."""
    step = engine.steps
    if step and (step in request.logged or step == request.last):
        value = state_checksum(engine, cursor)
        if value is not None:
            result.checksums[step] = f"{value:016x}"


def flipped_bit(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> str | None:
    """Return the bit whose flip turns the last state into the logged one, as text; None if no single bit does.

    A collective.
    """
    logged, own = request.logged.get(request.last), result.checksums.get(request.last)
    difference = (int(logged, 16) - int(own, 16)) % MODULUS if logged is not None and own is not None else 0
    differences = all_gather(str(difference), engine.world)
    location = find_flipped_bit(state_parts(engine, cursor).tensors, int(differences[0]))
    texts: list[str | None] = all_gather(location, engine.world)
    return next((text for text in texts if text is not None), None)
