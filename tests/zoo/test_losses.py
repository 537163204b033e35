"""Losses of recipes equal their formulas and those of torch."""

import pytest
import torch
from torch.nn import functional

from samestep.errors import InputError
from samestep.zoo.losses import bce_with_logits, cross_entropy, dice_loss, dice_plus

IGNORED = -100


def drawn(seed: int, samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(samples, classes, 5, 4, generator=generator, dtype=torch.float64)
    if classes == 1:
        targets = (torch.rand(outputs.shape, generator=generator) < 0.3).double()
    else:
        targets = torch.randint(0, classes, (samples, 5, 4), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return outputs, targets


@pytest.mark.parametrize("weight", [1.0, 7.5])
def test_bce_is_torchs_mean_over_what_is_not_ignored(weight: float) -> None:
    outputs, targets = drawn(0, 3, 1)
    loss = bce_with_logits(outputs, targets, foreground_weight=weight)
    counted = targets != IGNORED
    wanted = functional.binary_cross_entropy_with_logits(
        outputs[counted], targets[counted], pos_weight=torch.tensor(weight, dtype=torch.float64)
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)


def test_dice_is_the_overlap_of_each_sample() -> None:
    outputs, targets = drawn(1, 3, 1)
    wanted = []
    for logits, mask in zip(outputs, targets, strict=True):
        counted = mask != IGNORED
        results, asked = logits.sigmoid()[counted], mask[counted]
        wanted.append(1 - (2 * (results * asked).sum() + 1) / (results.sum() + asked.sum() + 1))
    torch.testing.assert_close(dice_loss(outputs, targets), torch.stack(wanted).mean(), rtol=1e-12, atol=0)


def test_dice_of_classes_is_the_mean_over_them() -> None:
    outputs, targets = drawn(2, 2, 4)
    counted, results = targets != IGNORED, outputs.softmax(dim=1)
    wanted = 0.0
    for sample in range(2):
        for number in range(4):
            p = results[sample, number][counted[sample]]
            q = (targets[sample] == number)[counted[sample]].double()
            wanted += float(1 - (2 * (p * q).sum() + 0.5) / (p.sum() + q.sum() + 0.5)) / 4
    assert float(dice_loss(outputs, targets, smooth=0.5)) == pytest.approx(wanted / 2, rel=1e-12)


def test_weights_are_not_negative() -> None:
    outputs, targets = torch.randn(2, 1, 3, 3), torch.ones(2, 1, 3, 3)
    for name, compute in {
        "foreground_weight": lambda: bce_with_logits(outputs, targets, foreground_weight=-1.0),
        "smooth": lambda: dice_loss(outputs, targets, smooth=float("nan")),
        "dice_weight": lambda: dice_plus(outputs, targets, dice_weight=-1.0),
    }.items():
        with pytest.raises(InputError, match=name) as caught:
            compute()
        assert caught.value.code == "E_VALUE"


@pytest.mark.parametrize("classes", [1, 3])
def test_ignored_sample_without_smooth_changes_nothing(classes: int) -> None:
    outputs, targets = drawn(5, 3, classes)
    targets[1] = IGNORED
    whole, counted = outputs.clone().requires_grad_(), outputs[[0, 2]].requires_grad_()
    for loss in (dice_loss(whole, targets, smooth=0.0), dice_loss(counted, targets[[0, 2]], smooth=0.0)):
        loss.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    assert not whole.grad[1].any()
    torch.testing.assert_close(whole.grad[[0, 2]], counted.grad, rtol=0, atol=0)


@pytest.mark.parametrize("classes", [1, 3])
def test_dice_plus_has_two_parts(classes: int) -> None:
    outputs, targets = drawn(3, 4, classes)
    losses = dice_plus(outputs, targets, dice_weight=0.5)
    pixel = bce_with_logits(outputs, targets) if classes == 1 else cross_entropy(outputs, targets)
    assert torch.equal(losses["pixel"], pixel)
    assert torch.equal(losses["dice"], dice_loss(outputs, targets))
    assert torch.equal(losses["loss"], losses["pixel"] + 0.5 * losses["dice"])


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 3)])
@pytest.mark.parametrize("weight", [None, [0.1, 2.0, 0.0, 0.7]])
@pytest.mark.parametrize("is_exact", [False, True])
def test_cross_entropy_is_torchs_mean(shape: tuple[int, ...], weight: list[float] | None, is_exact: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    targets.view(-1)[::3] = IGNORED
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    wanted = functional.cross_entropy(outputs, targets, weight=weights, label_smoothing=0.1)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_exact)  # then as rows
    try:
        loss = cross_entropy(outputs, targets, weight=weight, label_smoothing=0.1)
    finally:
        torch.use_deterministic_algorithms(before)
    torch.testing.assert_close(loss, wanted, rtol=1e-14, atol=0)


def test_targets_that_are_no_outputs_are_refused() -> None:
    with pytest.raises(InputError, match="2 outputs per target") as error:
        cross_entropy(torch.zeros(2, 2), torch.tensor([0, 2]))
    assert error.value.code == "E_SHAPE"
    with pytest.raises(RuntimeError, match="for all 4 classes"):
        cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), weight=[1, 1, 1])


def test_mismatched_shapes_are_refused() -> None:
    for loss in (bce_with_logits, dice_loss):
        with pytest.raises(InputError, match="shape"):
            loss(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4))
    with pytest.raises(InputError, match="targets"):
        dice_loss(torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.int64))
