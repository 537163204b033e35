"""Losses of masks equal their formulas, and do not depend on the division of a batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from samestep.engine.loss import Loss
from samestep.errors import InputError
from samestep.zoo.segmentation.losses import DicePlus, bce_with_logits, dice_loss

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


def mean(losses: list[Loss]) -> torch.Tensor:
    return sum(loss.sum for loss in losses) / sum(float(loss.count) for loss in losses)  # type: ignore[return-value]


@pytest.mark.parametrize("weight", [1.0, 7.5])
def test_bce_is_torchs_mean_over_what_is_not_ignored(weight: float) -> None:
    outputs, targets = drawn(0, 3, 1)
    loss = bce_with_logits(outputs, targets, foreground_weight=weight)
    counted = targets != IGNORED
    wanted = functional.binary_cross_entropy_with_logits(
        outputs[counted], targets[counted], pos_weight=torch.tensor(weight, dtype=torch.float64)
    )
    assert loss.count == counted.sum()
    torch.testing.assert_close(loss.sum / loss.count, wanted, rtol=1e-12, atol=0)


def test_dice_is_the_overlap_of_each_sample() -> None:
    outputs, targets = drawn(1, 3, 1)
    wanted = []
    for logits, mask in zip(outputs, targets, strict=True):
        counted = mask != IGNORED
        results, asked = logits.sigmoid()[counted], mask[counted]
        wanted.append(1 - (2 * (results * asked).sum() + 1) / (results.sum() + asked.sum() + 1))
    loss = dice_loss(outputs, targets)
    assert loss.count == 3
    torch.testing.assert_close(loss.sum, torch.stack(wanted).sum(), rtol=1e-12, atol=0)


def test_dice_of_classes_is_the_mean_over_them() -> None:
    outputs, targets = drawn(2, 2, 4)
    counted, results = targets != IGNORED, outputs.softmax(dim=1)
    wanted = 0.0
    for sample in range(2):
        for number in range(4):
            p = results[sample, number][counted[sample]]
            q = (targets[sample] == number)[counted[sample]].double()
            wanted += float(1 - (2 * (p * q).sum() + 0.5) / (p.sum() + q.sum() + 0.5)) / 4
    assert float(dice_loss(outputs, targets, smooth=0.5).sum) == pytest.approx(wanted, rel=1e-12)


@given(
    seed=st.integers(0, 1000),
    classes=st.sampled_from([1, 3]),
    cuts=st.sets(st.integers(1, 6), max_size=4),
    weight=st.sampled_from([1.0, 3.25]),
)
def test_no_cut_changes_a_loss_or_its_gradient(seed: int, classes: int, cuts: set[int], weight: float) -> None:
    outputs, targets = drawn(seed, 7, classes)
    targets[2] = IGNORED  # a sample that counts nothing
    bounds = [0, *sorted(cuts), 7]
    losses = [dice_loss]
    if classes == 1:
        losses.append(lambda *pair: bce_with_logits(*pair, foreground_weight=weight))  # type: ignore[arg-type]
    for loss in losses:
        results = []
        for edges in ([0, 7], bounds):
            leaf = outputs.clone().requires_grad_()
            microbatches = [loss(leaf[a:b], targets[a:b]) for a, b in pairwise(edges)]
            value = mean(microbatches)
            value.backward()  # type: ignore[no-untyped-call]
            results.append((value.detach(), leaf.grad))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)
        assert results[0][1] is not None
        assert not results[0][1][2].any()


def test_weights_are_not_negative() -> None:
    outputs, targets = torch.randn(2, 1, 3, 3), torch.ones(2, 1, 3, 3)
    for name, compute in {
        "foreground_weight": lambda: bce_with_logits(outputs, targets, foreground_weight=-1.0),
        "smooth": lambda: dice_loss(outputs, targets, smooth=float("nan")),
        "dice_weight": lambda: DicePlus(dice_weight=-1.0),
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
        assert loss.count == 2
        loss.sum.backward()
    assert whole.grad is not None
    assert not whole.grad[1].any()
    torch.testing.assert_close(whole.grad[[0, 2]], counted.grad, rtol=0, atol=0)


@pytest.mark.parametrize("classes", [1, 3])
def test_dice_plus_has_two_terms_with_separate_counts(classes: int) -> None:
    outputs, targets = drawn(3, 4, classes)
    loss = DicePlus(dice_weight=0.5)
    entropy, dice = loss.term_losses(outputs, targets, 4)
    assert float(entropy.count) == float((targets != IGNORED).sum())
    assert float(dice.count) == 4
    sums = [(float(part.sum), float(part.count)) for part in (entropy, dice)]
    values = loss.means(sums)
    assert values["loss"] == pytest.approx(values["loss_pixel"] + 0.5 * values["loss_dice"], rel=1e-12)


def test_mismatched_shapes_are_refused() -> None:
    for loss in (bce_with_logits, dice_loss):
        with pytest.raises(InputError, match="shape"):
            loss(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4))
    with pytest.raises(InputError, match="targets"):
        dice_loss(torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.int64))


def test_from_masks_is_refused_outside_of_recipes() -> None:
    with pytest.raises(InputError, match="foreground_weight is 'from_masks'"):
        bce_with_logits(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), foreground_weight="from_masks")  # type: ignore[arg-type]
