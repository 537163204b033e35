"""Built-in metrics and metrics of torchmetrics: the same values on any number of ranks."""

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Perceptron, seeded
from samestep.distributed.world import World
from samestep.engine.engine import Engine
from samestep.errors import InputError
from samestep.launcher.launch import LaunchConfig, run_workers
from samestep.metrics.counts import OverlapMetric, Score
from samestep.metrics.metrics import as_metrics, build_metrics
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
    torchmetrics: Any, alone: World, name: str, top_k: int, shape: tuple[int, ...], ignored: int
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
    assert metric.compute(alone) == float(reference.compute())


def engine_of(world: World, loss: Any = samestep.cross_entropy) -> Engine:
    model = seeded(0, Perceptron)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, world=world)


def test_metrics_of_a_loop_by_name_and_as_objects(torchmetrics: Any, alone: World) -> None:
    inputs, targets = random_data(29)
    engine, batches = engine_of(alone), [batch_of(alone, inputs, targets, 8)]
    kinds = torchmetrics.classification
    values = engine.evaluate(batches, ["accuracy", "top5", "f1", kinds.MulticlassF1Score(4), "perplexity"])
    assert list(values) == ["loss", "samples", "accuracy", "top5", "f1", "multiclass_f1_score", "perplexity"]
    assert values["f1"] == pytest.approx(values["multiclass_f1_score"], rel=1e-6)
    assert values["top5"] == 1.0
    named = engine.evaluate(
        batches, {"top1": kinds.MulticlassAccuracy(4), "top2": kinds.MulticlassAccuracy(4, top_k=2)}
    )
    assert 0 < named["top1"] < named["top2"]


def test_sums_of_floating_point_numbers_do_not_depend_on_the_order(torchmetrics: Any, alone: World) -> None:
    metric = torchmetrics.MeanSquaredError()
    pieces = [(torch.randn(3) * 10.0**power, torch.zeros(3)) for power in range(-4, 5)]
    values = set()
    for order in (pieces, pieces[::-1], pieces[4:] + pieces[:4]):
        (adapter,) = as_metrics([metric])
        for piece in order:
            adapter.update(*piece)
        values.add(adapter.compute(alone))
    assert len(values) == 1
    outputs = torch.cat([piece[0] for piece in pieces])
    assert values.pop() == pytest.approx(float(outputs.double().square().mean()), rel=1e-6)


def f1_of_ranks() -> float:
    make_torchvision_importable()
    from torchmetrics.classification import MulticlassF1Score  # takes seconds to import

    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(60, 5, generator=generator), torch.randint(0, 5, (60,), generator=generator)
    with samestep.start(device="cpu") as world:
        (metric,) = as_metrics([MulticlassF1Score(5)])
        metric.update(outputs[world.rank :: world.size], targets[world.rank :: world.size])
        return float(metric.compute(world))


@pytest.mark.slow
def test_states_are_added_in_one_order_with_any_hash_seeds() -> None:
    """The order of a set of names differs between interpreters, such as those of torchrun."""
    config = LaunchConfig(60.0, has_own_hash_seeds=True)
    one, three = (run_workers(f1_of_ranks, processes=n, launch_config=config).value for n in (1, 3))
    assert one == three


def test_metrics_that_cannot_be_used_are_refused(torchmetrics: Any, alone: World) -> None:
    kinds = torchmetrics.classification
    batches = [batch_of(alone, *random_data(8), 2)]
    for metrics in (
        ["acuracy"],
        [kinds.MulticlassAUROC(4)],  # keeps all outputs
        [kinds.MulticlassAccuracy(4), kinds.MulticlassAccuracy(4, top_k=2)],  # equal names
        {"mine": "accuracy"},
        [kinds.MulticlassAccuracy(4, average=None)],  # one number per class
    ):
        with pytest.raises(InputError) as error:
            engine_of(alone).evaluate(batches, metrics)
        assert error.value.code == "E_METRIC"


# --- Dice and intersection over union: independent of the division into microbatches and ranks ---


IGNORED = -100


def overlap(score: Score, classes: int) -> OverlapMetric:
    return OverlapMetric(score, classes, IGNORED, score=score)


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


def score_of(score: Score, classes: int, by_rank: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
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
    scores: tuple[Score, ...] = ("dice", "iou")
    for score in scores:
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


def test_logits_between_zero_and_one_are_not_probabilities() -> None:
    """Positive logits are foreground, also in a batch with all logits between 0 and 1."""
    outputs, targets = torch.full((1, 1, 2, 2), 0.3), torch.ones(1, 1, 2, 2)
    assert score_of("dice", 1, [[(outputs, targets)]]) == 1.0


def test_score_without_foreground_is_one() -> None:
    assert score_of("dice", 1, [[(torch.full((1, 1, 2), -1.0), torch.zeros(1, 1, 2))]]) == 1.0
    assert score_of("iou", 1, [[(torch.full((1, 1, 2), 1.0), torch.zeros(1, 1, 2))]]) == 0.0


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


def test_build_metrics_by_name(alone: World) -> None:
    outputs, targets = drawn(1, 3, 1, shape=(5, 5))
    metrics = build_metrics(("dice", "iou", "f1", "accuracy"), 1)
    for metric in metrics:
        metric.update(outputs, targets)
    dice, iou, f1, accuracy = (metric.compute(alone) for metric in metrics)
    assert dice == f1 == pytest.approx(plain("dice", outputs, targets), rel=1e-12)
    assert iou == pytest.approx(dice / (2 - dice), rel=1e-12)
    assert accuracy == pytest.approx(plain("accuracy", outputs, targets), rel=1e-7)


def test_the_metrics_of_a_collection_are_passed_one_by_one(torchmetrics: Any) -> None:
    kinds = torchmetrics.classification
    collection = torchmetrics.MetricCollection([kinds.MulticlassAccuracy(3), kinds.MulticlassF1Score(3)])
    for metrics in (collection, [collection], {"all": collection}):
        with pytest.raises(InputError, match="MetricCollection") as error:
            as_metrics(metrics)
        assert error.value.code == "E_METRIC"
    assert [metric.name for metric in as_metrics(dict(collection.items()))] == list(collection)
