"""Prefetch to a simulated accelerator: copies in a stream of their own, in an order without races."""

from collections.abc import Iterator

import torch

from helpers.simulated_accelerator import DeviceTensor, SimulatedAccelerator, simulated_accelerator
from samestep.data.batch import Microbatch, prefetch_to_device

CPU = torch.device("cpu")


def microbatches(count: int) -> Iterator[Microbatch]:
    for number in range(count):
        yield Microbatch(number, 4, (torch.full((4, 8), float(number)), torch.full((4,), number)))


def sums(accelerator: SimulatedAccelerator, count: int = 5) -> list[float]:
    """Use each microbatch in the current stream."""
    received = list[float]()
    for microbatch in prefetch_to_device(microbatches(count), CPU):
        inputs, targets = microbatch.data
        received.append(float((inputs.mean() + targets.sum()).clone().as_subclass(torch.Tensor)))
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
