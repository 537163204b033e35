"""Batch norm inside of divided calls: equal to torch's on the whole batch."""

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.view.operations import Operations
from samestep.view.region import Exchange, Region, inside
from samestep.view.slice_threads import AllHere, Part, run_in_lockstep


class Meeting:
    """Sums over threads that all call it equally often."""

    def __init__(self, size: int) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self.calls = 0

    def __call__(self, rank: int, values: Tensor) -> Tensor:
        self.calls += rank == 0
        self._slots[rank] = values.clone()
        self._barrier.wait()
        total = torch.stack(self._slots).sum(0)
        self._barrier.wait()
        return total


class Apart:
    """Exchange of ranks with graphs of their own."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    def join(self, compute: Any, value: Any) -> Any:
        return compute(self, [value])[0]

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        return self._meeting(self._rank, parts[0])


class Counted(AllHere):
    """Sums over slices of one process in one graph."""

    calls = 0

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        return super().sum(parts)


def divided(
    compute: Callable[[int, Region], Any], counts: Sequence[int], joined: bool = False, **options: Any
) -> tuple[list[Any], int]:
    """Return results of `compute` for each rank or slice with `counts` rows, and the number of sums."""
    meeting = Meeting(len(counts))
    stops = list(itertools.accumulate(counts))

    def slice_of(rank: int, exchange: Exchange) -> Any:
        region = Region(stops[-1], stops[rank] - counts[rank], stops[rank], exchange, (), **options)
        return compute(rank, region)

    if joined:
        sums = Counted()
        parts = [Part(partial(slice_of, rank), nullcontext) for rank in range(len(counts))]
        results = run_in_lockstep(parts, sums)
        return results, sums.calls

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(lambda rank: slice_of(rank, Apart(rank, meeting)), range(len(counts)))), meeting.calls


def forward(module: nn.Module, rows: Tensor, region: Region | None) -> Tensor:
    with inside(region), Operations(region):
        output: Tensor = module(rows)
    return output


def assert_close(one: Tensor | None, other: Tensor | None, tolerance: float | None = None) -> None:
    if one is None or other is None:
        assert one is other
        return
    tolerance = tolerance or (1e-12 if one.dtype == torch.float64 else 2e-6)
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def compare(
    module: nn.Module, inputs: Tensor, counts: Sequence[int], tolerance: float | None = None, joined: bool = False
) -> int:
    """Compare two training calls with and without division; return the number of exchanges."""
    slopes = torch.randn(inputs.shape).to(inputs)
    calls = 0
    whole, modules = copy.deepcopy(module), [copy.deepcopy(module) for _ in counts]
    for _ in range(2):
        x = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
        y = whole(x)
        y.backward(slopes)

        def compute(rank: int, region: Region) -> tuple[Tensor, Tensor]:
            own = inputs[region.start : region.stop].clone(memory_format=torch.preserve_format).requires_grad_()
            output = forward(modules[rank], own, region)
            if not joined:
                output.backward(slopes[region.start : region.stop])
            return own, output

        results, count = divided(compute, counts, joined)
        calls += count
        if joined:
            torch.cat([output for _, output in results]).backward(slopes.clone())  # torch may keep views as gradients
        assert_close(torch.cat([output for _, output in results]), y, tolerance)
        assert_close(torch.cat([own.grad for own, _ in results]), x.grad, tolerance)
    for name, parameter in whole.named_parameters():
        gradients: list[Any] = [dict(one.named_parameters())[name].grad for one in modules]
        if parameter.grad is None:
            assert gradients == [None] * len(counts)
        else:
            assert_close(torch.stack(gradients).sum(0), parameter.grad, tolerance and 4 * tolerance)
    for one in modules:
        for name, buffer in whole.named_buffers():
            assert_close(dict(one.named_buffers())[name], buffer, tolerance)
    return calls


LAYERS: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, ()),
    (nn.BatchNorm1d, (4,)),
    (nn.BatchNorm2d, (4, 3)),
    (nn.BatchNorm3d, (2, 3, 2)),
]
OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 1e-3, "momentum": 0.3}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_layers_equal_torch_on_the_whole_batch(layer: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    for dtype, joined in ((torch.float32, False), (torch.float64, True)):
        rows = torch.randn(9, 5, *shape, dtype=dtype) * 3 + 2
        compare(layer(5, **options).to(dtype), rows, [4, 2, 3], joined=joined)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("counts", [[1, 1], [2, 0, 1], [0, 3]])
def test_ranks_with_one_row_or_none(counts: list[int], joined: bool) -> None:
    torch.manual_seed(0)
    compare(nn.BatchNorm1d(4).double(), torch.randn(sum(counts), 4, dtype=torch.float64), counts, joined=joined)
    inputs = torch.randn(sum(counts), 4, 3, 3, dtype=torch.float64)
    compare(nn.BatchNorm2d(4).double(), inputs, counts, joined=joined)


def test_one_exchange_forward_and_one_backward() -> None:
    torch.manual_seed(0)
    assert compare(nn.BatchNorm2d(4), torch.randn(6, 4, 3, 3), [3, 3]) == 2 * 2


def test_large_means_do_not_cancel() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 3, 5, 5, dtype=torch.float64)
    compare(nn.BatchNorm2d(3).double(), inputs + 1e5, [20, 44], 1e-9)
    layer, whole = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    floats = inputs.float() + 1e3
    expected = whole(floats)
    results, _ = divided(lambda _, region: forward(layer, floats[region.start : region.stop], region), [20, 44])
    torch.testing.assert_close(torch.cat(results), expected, rtol=1e-4, atol=2e-4)  # the rounded mean shifts values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_float32_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = 4 * torch.finfo(dtype).eps
    compare(nn.BatchNorm2d(4), torch.randn(8, 4, 3, 3, dtype=dtype) + 1, [3, 5], tolerance)
    compare(nn.BatchNorm2d(4).to(dtype), torch.randn(8, 4, 3, 3, dtype=dtype) + 1, [3, 5], tolerance)


def test_channels_last_stays() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    compare(nn.BatchNorm2d(16), inputs, [3, 5])
    layers = [nn.BatchNorm2d(16), nn.BatchNorm2d(16)]
    outputs, _ = divided(lambda rank, region: forward(layers[rank], inputs[region.start : region.stop], region), [3, 5])
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in outputs)


@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"]])
def test_frozen_parameters_receive_no_gradient(names: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(4).double()
    for name in names:
        getattr(layer, name).requires_grad_(False)
    compare(layer, torch.randn(6, 4, 3, 3, dtype=torch.float64), [2, 4])


def test_inputs_without_gradient_need_no_exchange_in_the_backward() -> None:
    layers = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    inputs = torch.randn(6, 4)

    def compute(rank: int, region: Region) -> None:
        forward(layers[rank], inputs[region.start : region.stop], region).square().sum().backward()

    _, calls = divided(compute, [3, 3])
    assert calls == 1
    assert all(layer.weight.grad is not None for layer in layers)


def test_evaluation_uses_running_statistics_without_exchange() -> None:
    layer = nn.BatchNorm1d(4).eval()
    inputs = torch.randn(6, 4)
    outputs, calls = divided(lambda _, region: forward(layer, inputs[region.start : region.stop], region), [3, 3])
    assert calls == 0
    assert_close(torch.cat(outputs), layer(inputs))


def test_evaluation_without_running_statistics_uses_those_of_the_batch() -> None:
    compare(nn.BatchNorm1d(4, track_running_stats=False).eval(), torch.randn(6, 4), [3, 3])


def test_a_call_without_region_is_torch() -> None:
    inputs = torch.randn(6, 4, 3, 3)
    layer = nn.BatchNorm2d(4)
    expected = copy.deepcopy(layer)(inputs)
    assert torch.equal(forward(layer, inputs, None), expected)


@pytest.mark.parametrize("joined", [False, True])
def test_second_order_gradients(joined: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(7, 3, 2, 2, dtype=torch.float64)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Tanh(), nn.BatchNorm2d(4)).double()
    whole, modules = copy.deepcopy(network), [copy.deepcopy(network) for _ in range(3)]

    def penalty(module: nn.Module, rows: Tensor, region: Region | None) -> Tensor:
        x = rows.clone().requires_grad_()
        loss = forward(module, x, region).pow(3).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    penalty(whole, inputs, None).backward()

    def compute(rank: int, region: Region) -> None:
        penalty(modules[rank], inputs[region.start : region.stop], region).backward()

    if joined:
        x = inputs.clone().requires_grad_()
        outputs, _ = divided(
            lambda rank, region: forward(modules[rank], x[region.start : region.stop], region), [3, 2, 2], True
        )
        loss = torch.cat(outputs).pow(3).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    else:
        divided(compute, [3, 2, 2])
    for (name, parameter), *others in zip(
        whole.named_parameters(), *(one.parameters() for one in modules), strict=True
    ):
        assert parameter.grad is not None
        total = torch.stack([other.grad for other in others]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_single_value_per_channel_is_torchs_error() -> None:
    layer = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        divided(lambda _, region: forward(layer, torch.randn(1, 4)[region.start : region.stop], region), [1, 0])


def test_torch_batch_norm_has_the_same_rule() -> None:
    inputs = torch.randn(6, 4, dtype=torch.float64)
    expected = torch.batch_norm(inputs, None, None, None, None, True, 0.1, 1e-5, False)

    def compute(_: int, region: Region) -> Tensor:
        with Operations(region):
            own = inputs[region.start : region.stop]
            return torch.batch_norm(own, None, None, None, None, True, 0.1, 1e-5, False)

    outputs, _ = divided(compute, [4, 2])
    assert_close(torch.cat(outputs), expected)


def test_local_statistics_average_running_statistics() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 4, dtype=torch.float64)
    layers = [nn.BatchNorm1d(4).double() for _ in range(2)]
    outputs, calls = divided(
        lambda rank, region: forward(layers[rank], inputs[region.start : region.stop], region),
        [4, 2],
        local_batch_norm=True,
    )
    assert calls == 2
    parts = inputs.split([4, 2])
    assert_close(
        torch.cat(outputs), torch.cat([functional.batch_norm(part, None, None, training=True) for part in parts])
    )
    mean = 0.1 * (parts[0].mean(0) * 4 + parts[1].mean(0) * 2) / 6
    for layer in layers:
        assert layer.running_mean is not None
        assert_close(layer.running_mean, mean)
