"""A loss is a sum and a count; whatever cannot be one is refused."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from samestep.engine.loss import Loss, as_loss, cross_entropy


def test_a_loss_is_taken_as_it_is() -> None:
    given = Loss(torch.tensor(3.0), 7)
    assert as_loss(given, 100) is given


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_is_the_mean_over_the_shards_samples(shape: tuple[int, ...]) -> None:
    loss = as_loss(torch.full(shape, 0.5), 6)
    assert float(loss.sum) == 3.0
    assert loss.count == 6


def test_a_gradient_flows_through_a_mean() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    as_loss(weight * 3, 5).sum.backward()
    assert float(weight.grad) == 15.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (1.5, "returned a float;"),
        (None, "returned a NoneType;"),
        ((torch.tensor(1.0), 3), "returned a tuple;"),
        (torch.ones(4), r"returned a Tensor of shape \(4,\);"),
        (torch.ones(0), r"returned a Tensor of shape \(0,\);"),
    ],
)
def test_what_is_no_loss_is_refused(value: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        as_loss(value, 4)


def outputs_and_targets(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    return outputs, targets


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_over_its_count_is_torchs_mean(shape: tuple[int, ...], smoothing: float) -> None:
    outputs, targets = outputs_and_targets(*shape)
    targets.view(-1)[::3] = -100
    loss = cross_entropy(outputs, targets, label_smoothing=smoothing)
    mean = functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
    assert int(loss.count) == int((targets != -100).sum())
    torch.testing.assert_close(loss.sum / loss.count, mean, rtol=1e-14, atol=0)


def test_ignored_targets_neither_add_nor_count() -> None:
    outputs, targets = outputs_and_targets(5, 3)
    kept = cross_entropy(outputs[:3], targets[:3])
    targets[3:] = 9
    loss = cross_entropy(outputs, targets, ignore_index=9)
    assert (float(loss.sum), int(loss.count)) == (float(kept.sum), 3)


def test_nothing_but_ignored_targets_is_zero_of_zero() -> None:
    outputs, targets = outputs_and_targets(4, 3)
    loss = cross_entropy(outputs.requires_grad_(), torch.full_like(targets, -100))
    loss.sum.backward()
    assert (float(loss.sum.detach()), int(loss.count)) == (0.0, 0)
    assert not outputs.grad.any()
