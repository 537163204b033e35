"""Parts of divided calls on real ranks with gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import RankMismatchError
from samestep.view.crossings import totals
from samestep.view.in_step import InStep
from samestep.view.operations import Operations
from samestep.view.region import Region, inside


@contextmanager
def _group() -> Iterator[tuple[int, int]]:
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


class Reduced:
    """Exchange between real ranks."""

    def join(self, compute: Any, value: Any) -> Any:
        return compute(self, [value])[0]

    def total(self, values: Tensor) -> Tensor:
        return totals(self, [values])[0]

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        values = parts[0].clone()
        dist.all_reduce(values)
        return values


def _gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def batch_norm() -> Any:
    """Return the largest relative difference of a small network from the whole batch: outputs and gradients."""
    with _group() as (rank, size):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
        network.double()
        inputs = torch.randn(10, 3, 8, 8, dtype=torch.float64)
        parameters = list(network.parameters())
        expected = network(inputs)
        gradients = torch.autograd.grad(expected.pow(3).sum(), parameters)
        start, stop = (len(inputs) * number // size for number in (rank, rank + 1))
        region = Region(len(inputs), start, stop, Reduced(), ())
        with inside(region), Operations(region):
            outputs = network(inputs[start:stop])
        own = torch.autograd.grad(outputs.pow(3).sum(), parameters)
        pairs = [(outputs, expected[start:stop])]
        pairs += [(Reduced().sum([one]), other) for one, other in zip(own, gradients, strict=True)]
        # A bias before batch norm has a gradient of pure rounding, so differences are relative to the largest value.
        differences = [float((one - other).abs().max()) for one, other in pairs]
        largest = max(float(one.abs().max()) for _, one in pairs)
        return max(max(row) / largest for row in _gathered(differences))


def in_step() -> list[str]:
    """Return the errors of all ranks after a step with equal facts and one with another loss on rank 2."""
    with _group() as (rank, _):
        ranks = InStep(lambda text: [str(one) for one in _gathered(text)], is_alone=False)
        module = nn.Linear(2, 2)
        for step in range(2):
            ranks.facts_of_call(module, [torch.ones(4, 2)])
            if rank == 2 and step == 1:
                _backward(ranks, 2.0)
            else:
                _backward(ranks, 1.0)
            digests = _gathered(ranks.digest())
            error = _error(lambda digests=digests: ranks.compare(digests))  # type: ignore[misc]
        return _gathered(error)


def _backward(ranks: InStep, factor: float) -> None:
    ranks.facts_of_backward([torch.full((4, 2), factor)])


def _error(compute: Callable[[], None]) -> str:
    try:
        compute()
    except RankMismatchError as error:
        return str(error)
    return "none"
