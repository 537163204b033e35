"""Exchange of batch norm statistics between microbatches, and layers that use them."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from helpers.lockstep import ONE_RANK, Microbatches
from helpers.waits import Waits
from samestep.engine.sync_batch_norm import Message, StatisticsExchange
from samestep.errors import InputError
from samestep.reduce.tree import MicrobatchTree

LAYERS = ["first", "second"]


def exchange_of(microbatches: int = 3, samples: int = 9, plan: Sequence[int] = ()) -> StatisticsExchange:
    filled = [
        microbatch
        for microbatch in range(microbatches)
        if MicrobatchTree(microbatches, samples).has_samples((microbatch, microbatch + 1))
    ]
    return StatisticsExchange(ONE_RANK, None, MicrobatchTree(microbatches, samples), filled, LAYERS, 4, list(plan))


def message(values: list[float], layer: int = 0, direction: Any = "forward", count: int = 2) -> Message:
    return Message(layer, direction, count, torch.tensor(values, dtype=torch.float64), lambda n, v: (n, v.clone()))


def test_result_has_one_row_per_microbatch() -> None:
    counts, values = exchange_of()([message([1, 2]), message([3, 4], count=5), message([5, 6])])
    assert counts.tolist() == [[2], [5], [2]]
    assert values.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_microbatch_without_samples_has_a_row_of_zeros() -> None:
    counts, values = exchange_of(samples=2)([message([1, 2]), message([3, 4])])
    assert counts.tolist() == [[0], [2], [2]]
    assert values.tolist() == [[0, 0], [1, 2], [3, 4]]


def test_negative_zero_becomes_positive() -> None:
    """Rows of other ranks are added to zeros, and so are rows of this rank."""
    _, values = exchange_of()([message([-0.0])] * 3)
    assert [math.copysign(1, value) for value in values.flatten().tolist()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("other", "location"),
    [
        (message([1], layer=1), "microbatch 2 is at the forward of the norm layer 'second'"),
        (message([1], direction="backward"), "microbatch 2 is at the backward of the norm layer 'first'"),
        (None, "microbatch 2 is done"),
    ],
)
def test_microbatches_at_different_layers_are_refused(other: Message | None, location: str) -> None:
    with pytest.raises(InputError) as error:
        exchange_of()([message([1]), message([1]), other])
    assert error.value.value == f"microbatch 0 is at the forward of the norm layer 'first' while {location}"
    assert error.value.code == "E_BATCH_NORM"


def test_last_exchange_returns_none() -> None:
    assert exchange_of()([None] * 3) is None


def test_first_exchange_with_non_finite_values_is_recorded() -> None:
    exchange = exchange_of()
    exchange([message([1])] * 3)
    assert (exchange.bad, exchange.bad_direction) == ([], None)
    exchange([message([1], 1), message([math.nan], 1), message([1], 1)])
    exchange([message([math.inf], 1, "backward")] * 3)
    exchange([None] * 3)
    assert (exchange.bad, exchange.bad_direction) == ([1], "forward")


def test_non_finite_values_of_the_backward_are_recorded() -> None:
    exchange = exchange_of()
    exchange([message([1], 1, "backward"), message([1], 1, "backward"), message([-math.inf], 1, "backward")])
    assert (exchange.bad, exchange.bad_direction) == ([2], "backward")


def test_host_reads_at_the_end_if_the_exchanges_are_those_of_the_last_step() -> None:
    first = exchange_of()
    for part in ([message([1])] * 3, [message([1], 1)] * 3, [None] * 3):
        first(part)
    second = exchange_of(plan=first.codes)
    with Waits() as waits:
        second([message([1])] * 3)
        second([message([math.nan], 1), message([1], 1), message([1], 1)])
        assert not waits.calls
        second([None] * 3)
    assert waits.calls == {"tolist": 1}
    assert (second.bad, second.bad_direction) == ([0], "forward")


def test_host_reads_at_once_at_another_layer_than_in_the_last_step() -> None:
    exchange = exchange_of(plan=[message([1]).code, 1])
    with Waits() as waits:
        exchange([message([1], 1)] * 3)
    assert waits.calls == {"tolist": 1}
    with pytest.raises(InputError, match="microbatch 2 is done"):
        exchange([message([1], 1), message([1], 1), None])


def test_exchange_of_one_value_per_channel_is_refused() -> None:
    with pytest.raises(InputError, match="one value per channel"):
        exchange_of(samples=1)([message([1], count=1)])


CHANNELS = 3
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d over time": (nn.BatchNorm1d, (4,)),
    "2d": (nn.BatchNorm2d, (2, 3)),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
    "sync": (nn.SyncBatchNorm, (2, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
    {"track_running_stats": False},
    {"track_running_stats": False, "affine": False},
]
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1)


class Activated(nn.BatchNorm2d):
    """A norm layer with an activation, as in some libraries."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.leaky_relu(super().forward(inputs))


class Custom(nn.BatchNorm1d):
    """A norm layer that does not call the batch norm of torch."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs - inputs.mean(0)) / inputs.std(0)


def plain(layer: nn.Module) -> nn.Module:
    """Return a copy that also runs on CPUs: `BatchNorm2d` for `SyncBatchNorm`."""
    if not isinstance(layer, nn.SyncBatchNorm):
        return copy.deepcopy(layer)
    twin = nn.BatchNorm2d(CHANNELS, layer.eps, layer.momentum, layer.affine, layer.track_running_stats).double()
    twin.load_state_dict(layer.state_dict())
    return twin


def layer_of(kind: type[nn.Module], **options: Any) -> nn.Module:
    """Return a layer in float64 with random weights and statistics."""
    layer = kind(CHANNELS, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.5)
    return layer


def data(sizes: list[int], shape: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Return microbatches with different means and scales."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, CHANNELS, *shape, generator=generator, dtype=torch.float64) for size in sizes]
    return [(1 + number) * part + 10 * number for number, part in enumerate(parts)]


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest element; absolute if all elements are zero."""
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return float((tensor - expected).abs().max()) / (scale or 1.0) if expected.numel() else 0.0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(sizes=sizes)
def test_result_equals_batch_norm_of_all_microbatches(kind: str, options: dict[str, Any], sizes: list[int]) -> None:
    layer_type, shape = KINDS[kind]
    layer = layer_of(layer_type, **options)
    reference = plain(layer)
    parts, slopes = data(sizes, shape), data(sizes, shape, seed=1)
    inputs = torch.cat(parts).requires_grad_()
    outputs = reference(inputs)
    outputs.backward(torch.cat(slopes))

    result = Microbatches(layer, parts, slopes)

    assert distance(torch.cat([result.outputs[n] for n in range(len(parts))]), outputs.detach()) < 1e-12
    assert inputs.grad is not None
    # With few samples, the gradient is the rounding error of differences of large numbers.
    slope = torch.cat([result.slopes[n] for n in range(len(parts))])
    assert float((slope - inputs.grad).abs().max()) < 1e-12 * max(1.0, float(inputs.grad.abs().max()))
    for gradient, parameter in zip(result.gradients(layer), reference.parameters(), strict=True):
        assert distance(gradient, parameter.grad) < 1e-12
    for replica in result.replicas.values():
        for tensor, buffer in zip(replica.module.buffers(), reference.buffers(), strict=True):
            assert tensor.dtype == buffer.dtype
            assert distance(tensor.double(), buffer.double()) < 1e-12


def test_single_precision_is_as_accurate_as_torch() -> None:
    layer = layer_of(nn.BatchNorm2d)
    parts, slopes = data([5, 3, 7, 2], (4, 4)), data([5, 3, 7, 2], (4, 4), seed=1)
    inputs = torch.cat(parts).requires_grad_()
    layer(inputs).backward(torch.cat(slopes))
    single = layer_of(nn.BatchNorm2d).float()
    result = Microbatches(single, [part.float() for part in parts], [slope.float() for slope in slopes])
    assert inputs.grad is not None
    assert distance(torch.cat(list(result.slopes.values())).double(), inputs.grad) < 1e-6
    for gradient, parameter in zip(result.gradients(single), layer.parameters(), strict=True):
        assert distance(gradient.double(), parameter.grad) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_type_and_computes_statistics_in_single(dtype: torch.dtype) -> None:
    layer = layer_of(nn.BatchNorm1d).float()
    parts = [part.to(dtype) for part in data([30, 20], ())]
    result = Microbatches(layer, parts, [torch.ones_like(part) for part in parts])
    expected = functional.batch_norm(
        torch.cat(parts).double(), None, None, layer.weight.double(), layer.bias.double(), True
    )
    outputs = torch.cat(list(result.outputs.values()))
    assert outputs.dtype == dtype
    assert all(slope is not None and slope.dtype == dtype for slope in result.slopes.values())
    torch.testing.assert_close(outputs.double(), expected.detach(), rtol=1e-2, atol=1e-2)
    assert all(replica.module.running_mean.dtype == torch.float32 for replica in result.replicas.values())


def test_result_does_not_depend_on_the_memory_format() -> None:
    layer = layer_of(nn.BatchNorm2d)
    parts, slopes = data([4, 3], (3, 3)), data([4, 3], (3, 3), seed=1)
    last = [part.contiguous(memory_format=torch.channels_last) for part in parts]
    one, other = Microbatches(layer, parts, slopes), Microbatches(layer, last, slopes)
    for number in range(2):
        torch.testing.assert_close(other.outputs[number], one.outputs[number], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.slopes[number], one.slopes[number], rtol=1e-12, atol=1e-12)


def test_subclass_with_an_activation_applies_it() -> None:
    layer = layer_of(Activated)
    parts = data([4, 3], (2, 2))
    result = Microbatches(layer, parts)
    torch.testing.assert_close(
        torch.cat(list(result.outputs.values())), layer(torch.cat(parts)).detach(), rtol=1e-12, atol=1e-12
    )


def test_evaluation_uses_running_statistics() -> None:
    layer = layer_of(nn.BatchNorm1d).eval()
    parts = data([4, 3], ())
    result = Microbatches(layer, parts)
    assert torch.equal(result.outputs[1], layer(parts[1]).detach())


def test_inputs_without_a_gradient() -> None:
    layer = nn.Sequential(nn.Embedding(5, CHANNELS).requires_grad_(False), layer_of(nn.BatchNorm1d)).double()
    parts = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    slopes = data([3, 2], ())
    result = Microbatches(layer, parts, slopes)
    outputs = layer(torch.cat(parts))
    outputs.backward(torch.cat(slopes))
    assert (
        distance(
            result.replicas[0].parameters[layer[1].weight].grad + result.replicas[1].parameters[layer[1].weight].grad,
            layer[1].weight.grad,
        )
        < 1e-12
    )


@pytest.mark.parametrize(("shape", "sizes"), [((), [1]), ((1, 1), [1])])
def test_one_value_per_channel_is_refused(shape: tuple[int, ...], sizes: list[int]) -> None:
    kind = nn.BatchNorm2d if shape else nn.BatchNorm1d
    with pytest.raises(InputError, match=r"'0' .* one value") as error:
        Microbatches(nn.Sequential(layer_of(kind)), data(sizes, shape))
    assert error.value.code == "E_BATCH_NORM"


def test_one_value_per_channel_and_microbatch_is_accepted() -> None:
    result = Microbatches(layer_of(nn.BatchNorm1d), data([1, 1], ()))
    assert torch.isfinite(result.outputs[0]).all()


def test_wrong_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match=r"'0' of 3 channels received 4"):
        Microbatches(nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False)), [torch.randn(3, 4)] * 2)


def test_layer_without_batch_norm_of_torch_is_refused() -> None:
    with pytest.raises(InputError, match=r"'0' \(Custom\)") as error:
        Microbatches(nn.Sequential(Custom(CHANNELS)).double(), data([4, 3], ()))
    assert error.value.code == "E_BATCH_NORM"


def test_layer_with_a_replaced_forward_is_refused() -> None:
    layer = layer_of(nn.BatchNorm1d)
    layer.forward = lambda inputs: inputs
    with pytest.raises(InputError, match="'0'") as error:
        Microbatches(nn.Sequential(layer), data([4, 3], ()))
    assert error.value.code == "E_BATCH_NORM"


def test_model_is_unchanged() -> None:
    layer = layer_of(nn.BatchNorm1d)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    Microbatches(layer, data([4, 3], ()), data([4, 3], (), seed=1))
    assert type(layer) is nn.BatchNorm1d
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
