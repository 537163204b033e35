"""Collectives of a world.

Only a lost connection means that another rank has ended. Values of `all_gather` and `reduce_dict` arrive unchanged on
every rank.
"""

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samestep
from samestep.distributed.world import World
from samestep.errors import EXIT_INPUT, InputError, PeerLostError
from samestep.launcher.failure import MEMORY_FIX, Failure, RankError
from samestep.launcher.launch import launch
from workers import gather as ranks_gather
from workers.gather import COUNTS, VALUES

LOST = [
    dist.DistNetworkError("The client socket has timed out after 5000ms"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
    RuntimeError("Application timeout caused pair closure"),
]
OTHER = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.00 MiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:120] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
]


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", LOST, ids=str)
def test_lost_connection_is_named(error: Exception) -> None:
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(PeerLostError) as lost:
        world.run_collective(lambda: failing(error), "a test")
    assert lost.value.__cause__ is error


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_other_errors_keep_their_names(error: Exception) -> None:
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(type(error)) as raised:
        world.run_collective(lambda: failing(error), "a test")
    assert raised.value is error
    failure = Failure.of_exception(0, raised.value)
    assert not failure.is_consequence
    assert (MEMORY_FIX in failure.text) == ("memory" in str(error))


RANKS = 3


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = launch(ranks_gather.run_all, processes=RANKS)
    return results


@pytest.mark.parametrize("name", VALUES)
def test_every_rank_receives_the_values_of_all_ranks(results: dict[str, list[Any]], name: str) -> None:
    assert results[name] == [VALUES[name]] * RANKS


def test_means_are_over_all_counted_items(results: dict[str, list[Any]]) -> None:
    """Ranks have 3, 0 and 5 samples; the value of the rank without samples does not count, even if it is NaN."""
    assert all(means == results["means"][0] for means in results["means"]), "the same bits on every rank"
    means = results["means"][0]
    assert list(means) == ["a", "b"]
    assert means["a"] == (3 * 1.0 + 5 * 4.0) / 8
    assert means["b"] == pytest.approx((3 * 0.1 + 5 * 0.3) / 8)
    assert sum(COUNTS) == 8


def test_different_keys_and_zero_counts_are_rejected_on_every_rank(results: dict[str, list[Any]]) -> None:
    keys, counts, shapes = results["rejected"][0]
    assert keys == "reduce_dict: rank 1 has the keys rank 1, rank 0 has rank 0 [E_REDUCE_DICT]"
    assert counts == "reduce_dict: the counts of all ranks sum to 0 [E_REDUCE_DICT]"
    assert shapes == "reduce_dict: rank 1 has the shapes [2], rank 0 has [1] [E_REDUCE_DICT]"
    assert results["rejected"] == [[keys, counts, shapes]] * RANKS


def test_tensors_are_gathered_averaged_and_summed(results: dict[str, list[Any]]) -> None:
    assert results["tensors"] == [results["tensors"][0]] * RANKS, "the same on every rank"
    tensors = results["tensors"][0]
    assert tensors["received"] == [[], [[0.0, 1.0]], [[0, 1], [2, 3]]]
    assert tensors["mean"] == {"scores": [1.0, 2 * 5 / 8], "total": 2 * 5 / 8}
    assert tensors["sum"] == {"scores": [3.0, 3.0], "total": 3.0}
    assert tensors["numbers"] == {"correct": 30}


def test_invalid_value_of_one_rank_ends_the_run() -> None:
    with pytest.raises(RankError, match="E_NOT_PICKLABLE") as failed:
        launch(ranks_gather.gather_a_set, processes=RANKS)
    assert failed.value.exit_code == EXIT_INPUT


@pytest.mark.parametrize("value", [{1}, b"x", object(), [torch.ones(2)], {(1, 2): 3}, {1: 2}, [({"a": {None: 0}},)]])
def test_values_other_than_json_are_rejected(alone: World, value: Any) -> None:
    with pytest.raises(InputError, match="E_NOT_PICKLABLE"):
        samestep.all_gather(value, alone)


def test_cycle_is_rejected(alone: World) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(InputError, match="E_NOT_PICKLABLE"):
        samestep.all_gather(cyclic, alone)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the world has no state between examples
@given(value=plain)
def test_json_values_arrive_unchanged(alone: World, value: Any) -> None:
    (received,) = samestep.all_gather(value, alone)
    assert json.dumps(received) == json.dumps(value)


def test_nan_arrives_unchanged(alone: World) -> None:
    (received,) = samestep.all_gather(math.nan, alone)
    assert math.isnan(received)
    assert math.isnan(samestep.reduce_dict({"a": math.nan}, alone)["a"])
