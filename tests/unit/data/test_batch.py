"""Transfer of the tensors in nested data to devices."""

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch

from samestep.data.batch import move

OTHER = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Any
    targets: Any


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [([one(), 1], list), ((one(), 1), tuple), (Pair(one(), 1), Pair)],
)
def test_a_sequence_keeps_its_type(data: Any, kind: type) -> None:
    moved = move(data, OTHER)
    assert type(moved) is kind
    assert len(moved) == len(data)
    assert [item.device for item in moved if isinstance(item, torch.Tensor)] == [OTHER]


def test_nested_tensors_are_moved() -> None:
    moved = move(({"ids": [one()]}, Pair(one(), None)), OTHER)
    assert moved[0]["ids"][0].device == OTHER
    assert moved[1].inputs.device == OTHER
    assert moved[1].targets is None


class Encoding(UserDict[str, Any]):
    """Batch of a tokenizer, with attributes and a method `to`."""

    def __init__(self, values: dict[str, Any], more: str) -> None:
        super().__init__(values)
        self.more = more

    def to(self, device: torch.device) -> None:
        raise NotImplementedError  # it would change the original


class Graph:
    """Object with tensors that no other function finds."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.nodes.to(device))


@pytest.mark.parametrize("data", [OrderedDict(a=one()), Encoding({"a": one()}, "more")])
def test_a_mapping_keeps_its_type(data: Any) -> None:
    moved = move(data, OTHER)
    assert type(moved) is type(data)
    assert getattr(moved, "more", None) == getattr(data, "more", None)
    assert (moved["a"].device, data["a"].device) == (OTHER, CPU)


def test_objects_with_a_method_are_moved() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([one()])
    moved = move({"graph": Graph(one()), "packed": packed}, OTHER)
    assert moved["graph"].nodes.device == OTHER
    assert moved["packed"].data.device == OTHER
    assert moved["packed"].batch_sizes.device == CPU


@pytest.mark.parametrize("data", ["text", 3, 2.5, None, b"bytes"])
def test_other_values_are_unchanged(data: Any) -> None:
    assert move(data, OTHER) is data


class Moved:
    """An object that returns the arguments of its move."""

    def to(self, device: torch.device, non_blocking: bool) -> tuple[torch.device, bool]:
        return device, non_blocking


def test_the_host_waits_for_copies_from_an_accelerator() -> None:
    """Copies of tensors without a wait are in page-locked memory, and complete at some later time."""
    assert move(Moved(), CPU) == (CPU, False)
    assert move(Moved(), torch.device("cuda", 0)) == (torch.device("cuda", 0), True)
