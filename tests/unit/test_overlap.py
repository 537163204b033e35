"""Scores of overlap are those of all pixels together, however these are cut."""

from typing import TYPE_CHECKING

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, jaccard_score

from samestep.errors import InputError
from samestep.metrics import build_metrics
from samestep.runtime.vision import make_torchvision_importable
from samestep.runtime.world import World

if TYPE_CHECKING:
    from samestep.overlap import Overlap, Score

IGNORED = -100


def overlap(score: "Score", classes: int) -> "Overlap":
    make_torchvision_importable()
    from samestep.overlap import Overlap

    return Overlap(score, classes, IGNORED)


def drawn(seed: int, samples: int, classes: int, *, places: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are near to what is wanted, with a class that is rare and places that are ignored."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(samples, classes, *places, generator=generator)
    if classes == 1:
        targets = (torch.rand(outputs.shape, generator=generator) < 0.2).float()
        outputs += 2 * targets - 1
    else:
        targets = torch.randint(0, max(1, classes - seed % 2), (samples, *places), generator=generator)
        outputs.scatter_add_(1, targets.unsqueeze(1), torch.ones(samples, 1, *places))
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = IGNORED
    return outputs, targets


def told(score: "Score", classes: int, parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
    """The score of shards that ranks have, with counts summed as `CountMetric` sums them."""
    ranks = [overlap(score, classes) for _ in parts]
    for metric, shards in zip(ranks, sorted(parts, key=len, reverse=True), strict=True):
        for outputs, targets in shards:
            metric.update(outputs, targets)
    for name in ranks[0]._defaults:
        total = sum(getattr(metric, name) for metric in ranks)
        assert total.dtype == torch.int64
        getattr(ranks[0], name).copy_(total)
    return float(ranks[0].compute())


@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 9),
    classes=st.sampled_from([1, 2, 3, 5]),
    places=st.sampled_from([(), (7,), (4, 5), (2, 3, 4)]),
    data=st.data(),
)
def test_any_cut_gives_the_same_bits_and_the_plain_formula(
    seed: int, samples: int, classes: int, places: tuple[int, ...], data: st.DataObject
) -> None:
    outputs, targets = drawn(seed, samples, classes, places=places)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples), label="rank of each sample")
    cuts = [
        [(outputs[n : n + 1], targets[n : n + 1]) for n, rank in enumerate(owner) if rank == number]
        for number in range(4)
    ]
    scores: tuple[Score, ...] = ("dice", "iou", "accuracy")
    for score in scores:
        whole = told(score, classes, [[(outputs, targets)]])
        assert told(score, classes, cuts) == whole
        assert whole == pytest.approx(plain(score, outputs, targets), rel=1e-12)


def plain(score: "Score", outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """With NumPy, from flat lists of class numbers."""
    is_binary = outputs.shape[1] == 1
    found = (outputs > 0).long() if is_binary else outputs.argmax(dim=1)
    a, b = found.flatten().numpy(), targets.long().flatten().numpy()
    a, b = a[b != IGNORED], b[b != IGNORED]
    if score == "accuracy":
        return float((a == b).mean()) if len(a) else 0.0
    values = []
    for number in [1] if is_binary else range(outputs.shape[1]):
        there, asked = a == number, b == number
        if there.any() or asked.any():
            both = (there & asked).sum()
            sizes = there.sum() + asked.sum() if score == "dice" else (there | asked).sum()
            values.append(both * (2 if score == "dice" else 1) / sizes)
    return float(numpy.mean(values)) if values else 1.0


@pytest.mark.parametrize("classes", [1, 4])
def test_scores_are_those_of_scikit_learn(classes: int) -> None:
    outputs, targets = drawn(2, 6, classes, places=(9, 8))
    found = (outputs > 0).long() if classes == 1 else outputs.argmax(dim=1)
    counted = (targets != IGNORED).flatten()
    a, b = found.flatten()[counted].numpy(), targets.long().flatten()[counted].numpy()
    average = "binary" if classes == 1 else "macro"
    assert told("dice", classes, [[(outputs, targets)]]) == pytest.approx(f1_score(b, a, average=average), rel=1e-12)
    assert told("iou", classes, [[(outputs, targets)]]) == pytest.approx(
        jaccard_score(b, a, average=average), rel=1e-12
    )


def test_logits_that_look_like_probabilities_are_logits() -> None:
    """A batch whose logits are all between 0 and 1 says foreground everywhere, as it would beside others."""
    outputs, targets = torch.full((1, 1, 2, 2), 0.3), torch.ones(1, 1, 2, 2)
    assert told("dice", 1, [[(outputs, targets)]]) == 1.0


def test_nothing_wanted_and_nothing_found_is_right() -> None:
    assert told("dice", 1, [[(torch.full((1, 1, 2), -1.0), torch.zeros(1, 1, 2))]]) == 1.0
    assert told("iou", 1, [[(torch.full((1, 1, 2), 1.0), torch.zeros(1, 1, 2))]]) == 0.0


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 3, 4, 4), (2, 1, 4, 5)])
def test_targets_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="a metric of overlap was given outputs"):
        overlap("dice", 1).update(torch.zeros(2, 1, 4, 4), torch.zeros(shape))


def test_a_matrix_of_a_whole_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="50,257 classes"):
        overlap("dice", 50_257)


def test_recipes_name_them(alone: World) -> None:
    outputs, targets = drawn(1, 3, 1, places=(5, 5))
    metrics = build_metrics(("dice", "iou", "f1", "accuracy"), 1, alone.device)
    for metric in metrics:
        metric.update(outputs, targets)
    dice, iou, f1, accuracy = (metric.compute(alone) for metric in metrics)
    assert dice == f1 == pytest.approx(plain("dice", outputs, targets), rel=1e-12)
    assert iou == pytest.approx(dice / (2 - dice), rel=1e-12)
    assert accuracy == pytest.approx(plain("accuracy", outputs, targets), rel=1e-12)
