"""What is moved keeps its shape as a structure, and shards come in the order in which they went in."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from samestep.data.batch import Shard
from samestep.data.transfer import move, prefetched

ELSEWHERE = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Any
    targets: Any


def one() -> torch.Tensor:
    return torch.ones(2)


def test_a_tensor_is_moved() -> None:
    assert move(one(), ELSEWHERE).device == ELSEWHERE


@pytest.mark.parametrize(
    ("data", "kind"),
    [([one(), 1], list), ((one(), 1), tuple), (Pair(one(), 1), Pair), (Shard(2, 1, one()), Shard)],
)
def test_a_sequence_keeps_its_type(data: Any, kind: type) -> None:
    moved = move(data, ELSEWHERE)
    assert type(moved) is kind
    assert len(moved) == len(data)
    assert [item.device for item in moved if isinstance(item, torch.Tensor)] == [ELSEWHERE]


def test_a_mapping_keeps_its_keys_in_order() -> None:
    moved = move(OrderedDict(b=one(), a=one()), ELSEWHERE)
    assert list(moved) == ["b", "a"]
    assert all(value.device == ELSEWHERE for value in moved.values())


def test_nested_tensors_are_moved() -> None:
    moved = move(Shard(0, 1, ({"ids": [one()]}, Pair(one(), None))), ELSEWHERE)
    assert moved.data[0]["ids"][0].device == ELSEWHERE
    assert moved.data[1].inputs.device == ELSEWHERE
    assert moved.data[1].targets is None


@pytest.mark.parametrize("data", ["text", 3, 2.5, None, b"bytes"])
def test_what_holds_no_tensor_is_left_alone(data: Any) -> None:
    assert move(data, ELSEWHERE) is data


def test_moving_does_not_change_the_original() -> None:
    data = {"a": one()}
    move(data, ELSEWHERE)
    assert data["a"].device == CPU


def shards(count: int) -> list[Shard]:
    return [Shard(number, 4, (torch.full((4,), number), {"length": torch.tensor(number)})) for number in range(count)]


def test_on_a_cpu_shards_are_handed_on_as_they_are() -> None:
    given = shards(5)
    assert all(got is gave for got, gave in zip(prefetched(iter(given), CPU), given, strict=True))


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    source = iter(shards(5))
    ahead = prefetched(source, CPU)
    next(ahead)
    assert next(source).number == 1


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_on_a_gpu_every_shard_arrives_whole_and_in_order(count: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    got = list(prefetched(iter(shards(count)), device))
    assert [shard.number for shard in got] == list(range(count))
    for shard in got:
        assert shard.data[0].device == device
        assert shard.data[0].tolist() == [shard.number] * 4
        assert shard.data[1]["length"].item() == shard.number
