"""Small messages between the ranks of one machine."""

import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from samestep import launch
from samestep.distributed.local_sockets import LocalSockets
from samestep.distributed.world import World
from samestep.errors import PeerLostError
from samestep.session import start


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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


def run_checks(folder: str) -> dict[str, list[Any]]:
    """Return the results of every check, by rank."""
    with start(device="cpu") as world:
        sockets, everyone = connected(world), tuple(range(world.size))
        results = {
            "small": gathered([exchanged(world, sockets, 3, everyone) for _ in range(20)]),
            "large": gathered([exchanged(world, sockets, 200_000, everyone) for _ in range(3)]),
            "some": gathered(exchanged(world, sockets, 5, everyone[1:])),
            "closed": gathered(closed_connections(world)),
            "missing": gathered(missing_rank(world)),
            "long folder": gathered(long_folder(world, folder)),
        }
        sockets.close()
        return results


RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("long") / ("x" * 120)
    folder.mkdir()
    results: dict[str, list[Any]] = launch(run_checks, str(folder), processes=RANKS)
    return results


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_rank_receives_all_values(results: dict[str, list[Any]], size: str) -> None:
    assert len(results[size]) == RANKS
    assert all(all(each) for each in results[size])


def test_some_ranks_exchange_without_the_others(results: dict[str, list[Any]]) -> None:
    assert results["some"] == [None, True, True, True]


def test_closed_connection_is_the_loss_of_a_rank(results: dict[str, list[Any]]) -> None:
    assert results["closed"] == ["E_PEER_LOST"] * RANKS


def test_missing_message_is_an_error_after_the_time_limit(results: dict[str, list[Any]]) -> None:
    codes, seconds = zip(*results["missing"], strict=True)
    assert codes == ("E_PEER_LOST",) * RANKS
    assert 0.4 < max(seconds[:-1]) < 10  # others end with the first


def test_no_rank_is_connected_if_one_cannot_be(results: dict[str, list[Any]]) -> None:
    assert results["long folder"] == [False] * RANKS
