"""Losses as sum and count, and cross entropy."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from samestep.engine.loss import Loss, as_loss, cross_entropy
from samestep.errors import InputError


def test_loss_is_returned_unchanged() -> None:
    loss = Loss(torch.tensor(3.0), 7)
    assert as_loss(loss, 100) is loss


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scalar_is_the_mean_over_the_samples_of_the_microbatch(shape: tuple[int, ...]) -> None:
    loss = as_loss(torch.full(shape, 0.5), 6)
    assert float(loss.sum) == 3.0
    assert loss.count == 6


def test_gradient_flows_through_a_mean() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    as_loss(weight * 3, 5).sum.backward()
    assert float(weight.grad) == 15.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, "returned a float"),
        (None, "returned a NoneType"),
        ((torch.tensor(1.0), 3), "returned a tuple"),
        (torch.ones(4), r"returned a Tensor of shape \(4,\)"),
        (Loss(torch.ones(4), 4), r"returned a Tensor of shape \(4,\)"),
        (torch.ones(0), r"returned a Tensor of shape \(0,\)"),
    ],
)
def test_invalid_losses_are_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        as_loss(value, 4)
    assert error.value.code == "E_LOSS"


def outputs_and_targets(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    return outputs, targets


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_divided_by_count_is_the_mean_of_torch(shape: tuple[int, ...], smoothing: float) -> None:
    outputs, targets = outputs_and_targets(*shape)
    targets.view(-1)[::3] = -100
    loss = cross_entropy(outputs, targets, label_smoothing=smoothing)
    mean = functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
    assert int(loss.count) == int((targets != -100).sum())
    torch.testing.assert_close(loss.sum / loss.count, mean, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_cross_entropy_divided_by_count_is_the_mean_of_torch(shape: tuple[int, ...], smoothing: float) -> None:
    outputs, targets = outputs_and_targets(*shape)
    targets.view(-1)[::3] = -100
    weight = [0.1, 2.0, 0.0, 0.7]
    loss = cross_entropy(outputs, targets, weight=weight, label_smoothing=smoothing)
    expected = functional.cross_entropy(
        outputs, targets, weight=torch.tensor(weight, dtype=torch.float64), label_smoothing=smoothing
    )
    assert float(loss.count) == pytest.approx(sum(weight[int(target)] for target in targets.view(-1) if target >= 0))
    torch.testing.assert_close(loss.sum / loss.count, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("weight", [None, [0.1, 2.0, 0.0, 0.7]])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5)])
def test_cross_entropy_of_probabilities_is_that_of_torch(shape: tuple[int, ...], weight: list[float] | None) -> None:
    outputs, _ = outputs_and_targets(*shape)
    targets = torch.softmax(outputs.flip(0), 1)
    loss = cross_entropy(outputs, targets, weight=weight, label_smoothing=0.1)
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    expected = functional.cross_entropy(outputs, targets, weight=weights, label_smoothing=0.1)
    torch.testing.assert_close(loss.sum / loss.count, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("weight", [[0.3, 2.0, 1.0], torch.tensor([0.3, 2.0, 1.0])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_class_weights_have_the_type_of_the_outputs(weight: Any, dtype: torch.dtype) -> None:
    outputs, targets = outputs_and_targets(5, 3)
    loss = cross_entropy(outputs.to(dtype), targets, weight=weight)
    assert loss.sum.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = functional.cross_entropy(outputs, targets, weight=torch.tensor([0.3, 2.0, 1.0], dtype=torch.float64))
    assert float(loss.sum / loss.count) == pytest.approx(float(expected), rel=1e-2)


def test_sums_have_at_least_32_bits() -> None:
    outputs = torch.zeros(5000, 2, dtype=torch.bfloat16)
    assert float(cross_entropy(outputs, torch.zeros(5000, dtype=torch.int64)).sum) == pytest.approx(5000 * math.log(2))


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(2, 4, 3\) .* \(3, 2\)") as error:
        cross_entropy(torch.zeros(2, 4, 3), torch.zeros(3, 2, dtype=torch.int64))
    assert error.value.code == "E_SHAPE"
    with pytest.raises(InputError, match=r"\(3,\) for 4 classes") as error:
        cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), weight=[1, 1, 1])
    assert error.value.code == "E_SHAPE"


def test_ignored_targets_change_neither_sum_nor_count() -> None:
    outputs, targets = outputs_and_targets(5, 3)
    expected = cross_entropy(outputs[:3], targets[:3])
    targets[3:] = 9
    loss = cross_entropy(outputs, targets, ignore_index=9)
    assert (float(loss.sum), int(loss.count)) == (float(expected.sum), 3)


def test_sum_and_count_are_zero_if_all_targets_are_ignored() -> None:
    outputs, targets = outputs_and_targets(4, 3)
    loss = cross_entropy(outputs.requires_grad_(), torch.full_like(targets, -100))
    loss.sum.backward()
    assert (float(loss.sum.detach()), int(loss.count)) == (0.0, 0)
    assert not outputs.grad.any()
