"""Global batches: samples of each microbatch; transfer of tensors to devices, and prefetch without races."""

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.simulated_accelerator import DeviceTensor, SimulatedAccelerator, simulated_accelerator
from samestep.data.batch import GlobalBatch, Microbatch, move, prefetch_to_device
from samestep.microbatches import Cursor


def batch_of(size: int, microbatches: int) -> GlobalBatch:
    return GlobalBatch(Cursor(), Cursor(0, size), numpy.arange(size)[::-1] + 100, microbatches, ())


@given(st.integers(1, 300), st.integers(1, 40))
def test_microbatches_are_slices_of_the_batch_in_order(size: int, microbatches: int) -> None:
    batch = batch_of(size, microbatches)
    assert [
        sample for microbatch in range(microbatches) for sample in batch.samples_of(microbatch)
    ] == batch.indices.tolist()
    assert batch.size == size


@given(st.integers(1, 300), st.integers(1, 40))
def test_filled_counts_microbatches_that_have_samples(size: int, microbatches: int) -> None:
    batch = batch_of(size, microbatches)
    assert batch.filled == sum(bool(batch.samples_of(microbatch)) for microbatch in range(microbatches))


OTHER = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Any
    targets: Any


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [([one(), 1], list), ((one(), 1), tuple), (Pair(one(), 1), Pair), (Microbatch(2, 1, one()), Microbatch)],
)
def test_a_sequence_keeps_its_type(data: Any, kind: type) -> None:
    moved = move(data, OTHER)
    assert type(moved) is kind
    assert len(moved) == len(data)
    assert [item.device for item in moved if isinstance(item, torch.Tensor)] == [OTHER]


def test_nested_tensors_are_moved() -> None:
    moved = move(Microbatch(0, 1, ({"ids": [one()]}, Pair(one(), None))), OTHER)
    assert moved.data[0]["ids"][0].device == OTHER
    assert moved.data[1].inputs.device == OTHER
    assert moved.data[1].targets is None


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
    moved = move(Microbatch(0, 1, {"graph": Graph(one()), "packed": packed}), OTHER)
    assert moved.data["graph"].nodes.device == OTHER
    assert moved.data["packed"].data.device == OTHER
    assert moved.data["packed"].batch_sizes.device == CPU


@pytest.mark.parametrize("data", ["text", 3, 2.5, None, b"bytes"])
def test_other_values_are_unchanged(data: Any) -> None:
    assert move(data, OTHER) is data


def microbatches(count: int) -> list[Microbatch]:
    return [
        Microbatch(number, 4, (torch.full((4,), number), {"length": torch.tensor(number)})) for number in range(count)
    ]


def test_cpu_microbatches_are_unchanged() -> None:
    source = microbatches(5)
    assert all(a is b for a, b in zip(prefetch_to_device(iter(source), CPU), source, strict=True))


class Moved:
    """Object that records how it is moved."""

    def to(self, device: torch.device, non_blocking: bool) -> tuple[torch.device, bool]:
        return device, non_blocking


def test_the_host_waits_for_copies_from_an_accelerator() -> None:
    """Copies of tensors without a wait are in page-locked memory, and complete at some later time."""
    assert move(Moved(), CPU) == (CPU, False)
    assert move(Moved(), torch.device("cuda", 0)) == (torch.device("cuda", 0), True)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_gpu_prefetch_preserves_data_and_order(count: int, ahead: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    got = list(prefetch_to_device(iter(microbatches(count)), device, ahead))
    assert [microbatch.number for microbatch in got] == list(range(count))
    for microbatch in got:
        assert microbatch.data[0].device == device
        assert microbatch.data[0].tolist() == [microbatch.number] * 4
        assert microbatch.data[1]["length"].item() == microbatch.number


@pytest.mark.gpu
def test_gpu_prefetch_is_ahead_by_the_microbatches_of_a_step() -> None:
    source = iter(microbatches(9))
    prefetched = prefetch_to_device(source, torch.device("cuda", torch.cuda.current_device()), 4)
    assert next(prefetched).number == 0
    assert next(source).number == 5


def sums(accelerator: SimulatedAccelerator, count: int = 5) -> list[float]:
    """Use each microbatch in the current stream."""
    received = list[float]()
    for microbatch in prefetch_to_device(iter(microbatches(count)), CPU):
        inputs, targets = microbatch.data
        received.append(float((inputs.sum() + targets["length"]).clone().as_subclass(torch.Tensor)))
        assert isinstance(inputs, DeviceTensor)
        assert [stream.number for stream in inputs.streams] == [0]
    return received


def test_microbatches_arrive_in_order_without_races() -> None:
    with simulated_accelerator() as accelerator:
        assert sums(accelerator) == [5.0 * number for number in range(5)]
    assert accelerator.races == []
    assert accelerator.counts["operations of stream 1"] == accelerator.counts["copies"] == 2 * 5  # two tensors each
    assert accelerator.counts["waits"] == 5
    assert accelerator.counts["synchronize"] == 0  # the host never waits


def test_missing_order_is_noticed() -> None:
    """The sanitizer must find the race that `prefetch_to_device` avoids."""
    for is_ordered in (True, False):
        with simulated_accelerator() as accelerator:
            side = accelerator.Stream(CPU)
            with accelerator.stream(side):
                copied = accelerator.copy(torch.ones(4))
            if is_ordered:
                accelerator.current_stream(CPU).wait_event(side.record_event())
            copied.sum()
        assert len(accelerator.races) == int(not is_ordered)
