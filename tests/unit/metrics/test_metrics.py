"""Metrics of recipes: values of torchmetrics and of plain formulas, for any division of the samples into batches."""

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.metrics.metrics import METRICS, CountMetric, build_metrics
from samestep.torchvision_import import make_torchvision_importable


@pytest.fixture(scope="module")
def torchmetrics() -> Any:
    make_torchvision_importable()
    import torchmetrics

    return torchmetrics


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("shape", [(), (6,), (3, 4)])
@pytest.mark.parametrize(("name", "top_k"), [("accuracy", 1), ("top5", 5)])
def test_accuracy_has_the_bits_of_torchmetrics(
    torchmetrics: Any, name: str, top_k: int, shape: tuple[int, ...], ignored: int
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    outputs = torch.randn(37, 9, *shape, generator=generator)
    targets = torch.randint(0, 9, (37, *shape), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = ignored
    (metric,) = build_metrics((name,), 9, ignore_index=ignored)
    reference = torchmetrics.classification.MulticlassAccuracy(9, average="micro", top_k=top_k, ignore_index=ignored)
    for start in range(0, 37, 5):
        metric.update(outputs[start : start + 5], targets[start : start + 5])
        reference.update(outputs[start : start + 5], targets[start : start + 5])
    assert metric.compute() == float(reference.compute())


# --- Dice and intersection over union: independent of the division into batches ---


IGNORED = -100


def overlap(score: str, classes: int) -> CountMetric:
    return METRICS[score](score, classes, IGNORED)


def drawn(seed: int, samples: int, classes: int, *, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits near the targets, with a rare class and ignored positions."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(samples, classes, *shape, generator=generator)
    if classes == 1:
        targets = (torch.rand(outputs.shape, generator=generator) < 0.2).float()
        outputs += 2 * targets - 1
    else:
        targets = torch.randint(0, max(1, classes - seed % 2), (samples, *shape), generator=generator)
        outputs.scatter_add_(1, targets.unsqueeze(1), torch.ones(samples, 1, *shape))
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = IGNORED
    return outputs, targets


def score_of(score: str, classes: int, by_rank: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
    """Return the score of the microbatches of several ranks, with counts summed as in `CountMetric`."""
    totals = []
    for microbatches in by_rank:
        metric = overlap(score, classes)
        for outputs, targets in microbatches:
            metric.update(outputs, targets)
        totals += [] if metric.counts is None else [metric.counts]
    total = torch.stack(totals).sum(dim=0)
    assert total.dtype == torch.int64
    return overlap(score, classes).value(total)


@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 9),
    classes=st.sampled_from([1, 2, 3, 5]),
    shape=st.sampled_from([(), (7,), (4, 5), (2, 3, 4)]),
    data=st.data(),
)
def test_any_division_gives_the_same_bits_and_matches_the_formula(
    seed: int, samples: int, classes: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    outputs, targets = drawn(seed, samples, classes, shape=shape)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples), label="rank of each sample")
    by_rank = [
        [(outputs[n : n + 1], targets[n : n + 1]) for n, rank in enumerate(owner) if rank == number]
        for number in range(4)
    ]
    for score in ("dice", "iou"):
        expected = score_of(score, classes, [[(outputs, targets)]])
        assert score_of(score, classes, by_rank) == expected
        assert expected == pytest.approx(plain(score, outputs, targets), rel=1e-12)


def plain(score: str, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the score computed with NumPy from flat lists of class indices."""
    is_binary = outputs.shape[1] == 1
    predictions = (outputs > 0).long() if is_binary else outputs.argmax(dim=1)
    a, b = predictions.flatten().numpy(), targets.long().flatten().numpy()
    a, b = a[b != IGNORED], b[b != IGNORED]
    if score == "accuracy":
        return float((a == b).mean()) if len(a) else 0.0
    values = []
    for number in [1] if is_binary else range(outputs.shape[1]):
        predicted, expected = a == number, b == number
        if predicted.any() or expected.any():
            both = (predicted & expected).sum()
            sizes = predicted.sum() + expected.sum() if score == "dice" else (predicted | expected).sum()
            values.append(both * (2 if score == "dice" else 1) / sizes)
    return float(numpy.mean(values)) if values else 1.0


@pytest.mark.parametrize(
    ("score", "logit", "target", "expected"),
    [
        ("dice", 0.3, 1, 1.0),  # logits between 0 and 1 are no probabilities: positive ones are foreground
        ("dice", -1.0, 0, 1.0),
        ("iou", 1.0, 0, 0.0),
    ],
)
def test_scores_of_one_class(score: str, logit: float, target: float, expected: float) -> None:
    batch = torch.full((1, 1, 2), logit), torch.full((1, 1, 2), target)
    assert score_of(score, 1, [[batch]]) == expected


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 3, 4, 4), (2, 1, 4, 5)])
def test_targets_of_another_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="outputs of shape") as raised:
        overlap("dice", 1).update(torch.zeros(2, 1, 4, 4), torch.zeros(shape))
    assert raised.value.code == "E_METRIC"


@pytest.mark.parametrize("target", [3, 255, -1, -99])
def test_target_that_is_no_class_raises(target: int) -> None:
    """It would be counted for another pair of classes."""
    with pytest.raises(InputError, match=f"the target {target}") as raised:
        overlap("dice", 3).update(torch.zeros(1, 3, 4), torch.tensor([[0, IGNORED, 2, target]]))
    assert raised.value.code == "E_METRIC"


def test_build_metrics_by_name() -> None:
    outputs, targets = drawn(1, 3, 1, shape=(5, 5))
    metrics = build_metrics(("dice", "iou", "f1", "accuracy"), 1)
    for metric in metrics:
        metric.update(outputs, targets)
    dice, iou, f1, accuracy = (metric.compute() for metric in metrics)
    assert dice == f1 == pytest.approx(plain("dice", outputs, targets), rel=1e-12)
    assert iou == pytest.approx(dice / (2 - dice), rel=1e-12)
    assert accuracy == pytest.approx(plain("accuracy", outputs, targets), rel=1e-7)
