"""Rank functions for `unit/distributed/test_local_sockets.py`."""

import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from samestep.distributed.local_sockets import LocalSockets
from samestep.distributed.world import World
from samestep.errors import PeerLostError
from samestep.session import start
from workers.gathering import gathered


def connected(world: World) -> LocalSockets:
    sockets = world.connect()
    assert sockets is not None
    return sockets


def exchanged(world: World, sockets: LocalSockets, elements: int, ranks: tuple[int, ...]) -> bool | None:
    """Return whether this rank received the values of all `ranks`; None if this rank is none of them."""
    if world.rank not in ranks:
        return None
    rows = torch.empty(len(ranks), elements, dtype=torch.float64)
    sockets.all_gather(torch.arange(elements, dtype=torch.float64) + world.rank, rows, ranks)
    return all(torch.equal(row, torch.arange(elements) + rank) for rank, row in zip(ranks, rows, strict=True))


def error_of(world: World, sockets: LocalSockets) -> str:
    try:
        exchanged(world, sockets, 1, tuple(range(world.size)))
    except PeerLostError as error:
        return error.code
    return ""


def closed_connections(world: World) -> str:
    """Return the code of an exchange with ranks of which the last has closed its connections."""
    sockets = connected(world)
    if world.rank == world.size - 1:
        sockets.close()
        return "E_PEER_LOST"
    return error_of(world, sockets)


def missing_rank(world: World) -> tuple[str, float]:
    """Return the code of an exchange to which the last rank does not come, and the seconds of the wait."""
    sockets = connected(replace(world, timeout=timedelta(seconds=0.5)))
    began = time.monotonic()
    code = "E_PEER_LOST" if world.rank == world.size - 1 else error_of(world, sockets)
    waited = time.monotonic() - began
    world.barrier()
    return code, waited


def long_folder(world: World, folder: str) -> bool:
    """Return whether ranks connect if the last one can have no Unix socket in its temporary folder."""
    if world.rank == world.size - 1:
        tempfile.tempdir = folder
    sockets = world.connect()
    tempfile.tempdir = None
    return sockets is not None


def combined(world: World, elements: int) -> list[Any]:
    """Return extremes of a sum and of a maximum over ranks, and the maximum of scalars."""
    total = torch.full((2, elements), 2.0**world.rank)
    largest = torch.full((elements,), float(world.rank))
    largest[-1] = -largest[-1]
    scalar = torch.tensor(float(world.rank), dtype=torch.float64)
    world.combine(total)
    for values in (largest, scalar):
        world.combine(values, "max")
    return [[float(total.min()), float(total.max())], [float(largest[0]), float(largest[-1])], float(scalar)]


def run_checks(folder: str) -> dict[str, list[Any]]:
    """Return the results of every check, by rank."""
    with start(device="cpu") as world:
        sockets, everyone = connected(world), tuple(range(world.size))
        results = {
            "small": gathered([exchanged(world, sockets, 3, everyone) for _ in range(20)]),
            "large": gathered([exchanged(world, sockets, 200_000, everyone) for _ in range(3)]),
            "some": gathered(exchanged(world, sockets, 5, everyone[1:])),
            "combined": gathered([combined(world, elements) for elements in (3, 20_000)]),
            "closed": gathered(closed_connections(world)),
            "missing": gathered(missing_rank(world)),
            "long folder": gathered(long_folder(world, folder)),
        }
        sockets.close()
        return results
