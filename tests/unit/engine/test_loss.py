"""Losses as sums and counts, and the losses of PyTorch."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of
from helpers.models import seeded
from samestep.engine.engine import Engine
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


World = samestep.World
SAMPLES, FEATURES, CLASSES = 13, 5, 4  # microbatches of different sizes
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(SAMPLES, FEATURES, generator=GENERATOR, dtype=torch.float64)
NUMBERS = torch.randint(0, CLASSES, (SAMPLES,), generator=GENERATOR)
IGNORED = NUMBERS.masked_fill(torch.arange(SAMPLES) % 3 == 0, -100)
VALUES = torch.rand(SAMPLES, CLASSES, generator=GENERATOR, dtype=torch.float64)
SHARES = VALUES / VALUES.sum(dim=1, keepdim=True)
SIGNS = VALUES.gt(0.5).double() * 2 - 1
WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)

LOSSES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), NUMBERS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), NUMBERS),
    "ignored targets": (nn.CrossEntropyLoss(), IGNORED),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=2), NUMBERS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), NUMBERS),
    "class weights, ignored targets": (nn.CrossEntropyLoss(weight=WEIGHTS), IGNORED),
    "class weights, sum": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), IGNORED),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHTS), SHARES),
    "function": (functional.cross_entropy, IGNORED),
    "function with arguments": (partial(functional.cross_entropy, weight=WEIGHTS), IGNORED),
    "function, sum": (partial(functional.mse_loss, reduction="sum"), VALUES),
    "negative log-likelihood": (nn.NLLLoss(weight=WEIGHTS), IGNORED),
    "negative log-likelihood, sum": (nn.NLLLoss(reduction="sum"), NUMBERS),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), VALUES),
    "binary, sum": (nn.BCEWithLogitsLoss(reduction="sum"), VALUES),
    "squares": (nn.MSELoss(), VALUES),
    "absolute": (nn.L1Loss(), VALUES),
    "huber": (nn.HuberLoss(delta=0.3), VALUES),
    "smooth": (nn.SmoothL1Loss(), VALUES),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), SHARES),
    "poisson": (nn.PoissonNLLLoss(), VALUES),
    "margin": (nn.SoftMarginLoss(), SIGNS),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHTS), NUMBERS),
    "multi label": (nn.MultiLabelSoftMarginLoss(), VALUES.gt(0.5).double()),
}


def model() -> nn.Module:
    return seeded(1, partial(nn.Linear, FEATURES, CLASSES, dtype=torch.float64))


def engine_of(world: World, loss: Any) -> Engine:
    net = model()
    return Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world)


def plain_step(loss: Callable[..., torch.Tensor], targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return loss and weights of one step of a plain loop."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    value = loss(net(INPUTS), targets)
    value.backward()
    optimizer.step()
    return float(value.detach()), net.weight.detach()


@pytest.mark.parametrize("name", LOSSES)
def test_step_equals_a_plain_loop_for_every_number_of_microbatches(alone: World, name: str) -> None:
    loss, targets = LOSSES[name]
    value, weights = plain_step(loss, targets)
    for microbatches in (1, 4, SAMPLES):
        engine = engine_of(alone, loss)
        result = engine.step(batch_of(alone, INPUTS, targets, microbatches))
        assert result.loss == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(engine.model.weight.detach(), weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_is_the_mean_over_the_dataset(alone: World, name: str) -> None:
    loss, targets = LOSSES[name]
    is_sum = "sum" in name
    value = float(loss(model()(INPUTS), targets).detach()) / (SAMPLES if is_sum else 1)
    values = engine_of(alone, loss).evaluate([batch_of(alone, INPUTS, targets, 4)])
    assert values["loss"] == pytest.approx(value, rel=1e-12)


def test_module_of_the_user_is_unchanged(alone: World) -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    engine_of(alone, loss).step(batch_of(alone, INPUTS, NUMBERS, 4))
    assert loss.reduction == "mean"
    assert loss.weight is WEIGHTS


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (nn.CrossEntropyLoss(reduction="none"), "E_LOSS"),
        (partial(functional.mse_loss, reduction="none"), "E_LOSS"),
        (nn.TripletMarginLoss(), "E_LOSS"),
        (nn.CTCLoss(), "E_LOSS"),
    ],
)
def test_losses_without_one_number_per_batch_are_refused(alone: World, loss: Any, code: str) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone, loss)
    assert error.value.code == code


@pytest.mark.parametrize("targets", [torch.zeros(4), torch.zeros(4, 2), torch.full((4,), 3), torch.full((4,), -1)])
def test_targets_of_other_classes_than_the_outputs_are_refused(targets: torch.Tensor) -> None:
    with pytest.raises(InputError) as error:
        cross_entropy(torch.zeros(4, 3), targets)
    assert error.value.code == "E_SHAPE"


@pytest.mark.parametrize("loss", [nn.MSELoss(), functional.l1_loss])
def test_targets_that_would_be_broadcast_are_refused(alone: World, loss: Any) -> None:
    """Outputs (N, 1) and targets (N) would be compared N times N."""
    net = seeded(1, partial(nn.Linear, FEATURES, 1, dtype=torch.float64))
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=alone)
    with pytest.raises(InputError) as error:
        engine.step(batch_of(alone, INPUTS, VALUES[:, 0], 4))
    assert error.value.code == "E_SHAPE"


class Focal(nn.Module):
    """A loss of the user, in the form of the tutorials."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        losses = (1 - torch.exp(-losses)) ** 2 * losses
        return losses.sum() if self.reduction == "sum" else losses.mean()


def plain_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize("loss", [plain_sum, Focal("sum"), lambda o, t: plain_sum(o, t) / 64])
def test_function_that_returns_a_sum_is_refused(alone: World, loss: Any) -> None:
    for microbatches in (1, 4):
        with pytest.raises(InputError) as error:
            engine_of(alone, loss).step(batch_of(alone, INPUTS, NUMBERS, microbatches))
        assert error.value.code == "E_LOSS"


def test_function_that_returns_a_mean_is_accepted_without_a_warning(
    alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    for loss in (Focal(), lambda o, t: 2 * functional.cross_entropy(o, t), lambda o, t: 0.0 * o.sum()):
        engine_of(alone, loss).step(batch_of(alone, INPUTS, NUMBERS, 4))
    assert not caplog.records


def needs_four(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compare the two halves of four samples."""
    return functional.mse_loss(outputs[:2], outputs[2:4]) + 0 * targets.sum()


@pytest.mark.parametrize(
    ("loss", "samples"),
    [
        (lambda o, t: functional.cross_entropy(o, t, weight=WEIGHTS), SAMPLES),
        (lambda o, t: functional.cross_entropy(o @ o.T, torch.arange(len(o))), SAMPLES),
        (needs_four, 4),
    ],
)
def test_function_that_is_no_mean_gives_one_warning(
    alone: World, caplog: pytest.LogCaptureFixture, loss: Any, samples: int
) -> None:
    engine = engine_of(alone, loss)
    with caplog.at_level(logging.WARNING, "samestep"):
        for _ in range(2):
            engine.step(batch_of(alone, INPUTS[:samples], NUMBERS[:samples], 1))
    assert len(caplog.records) == 1
    assert "docs/concepts/losses.md" in caplog.text


def test_ignored_targets_of_a_whole_microbatch_count_nothing(alone: World) -> None:
    targets = NUMBERS.clone()
    targets[:4] = -100
    value, _ = plain_step(nn.CrossEntropyLoss(), targets)
    result = engine_of(alone, nn.CrossEntropyLoss()).step(batch_of(alone, INPUTS, targets, 4))
    assert result.loss == pytest.approx(value, rel=1e-12)
    assert not math.isnan(result.loss)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        samestep.MultiLoss([samestep.LossTerm("only", plain_sum, weight=SAMPLES - 1)]),  # a mean over 12 samples
    ],
)
def test_samples_that_are_left_out_change_no_divisor(alone: World, loss: Any) -> None:
    """As with `bad_samples: skip`: a microbatch has fewer samples than its slice of the global batch."""
    batch = batch_of(alone, INPUTS, NUMBERS, 4)
    first, *rest = batch.local_microbatches
    inputs, targets = first.data
    short = first._replace(size=first.size - 1, data=(inputs[:-1], targets[:-1]))
    kept = torch.arange(SAMPLES) != first.size - 1
    net = model()
    expected = plain_sum(net(INPUTS[kept]), NUMBERS[kept])
    expected.backward()
    engine = engine_of(alone, loss)
    result = engine.step(replace(batch, local_microbatches=(short, *rest)))
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert result.grad_norm == pytest.approx(
        float(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).norm()), rel=1e-12
    )
