"""Built-in metrics and metrics of torchmetrics: the same values on any number of ranks."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Perceptron, seeded
from samestep.engine.engine import Engine
from samestep.errors import InputError
from samestep.launcher.launch import LaunchConfig, run_workers
from samestep.metrics.metrics import as_metrics, build_metrics
from samestep.torchvision_import import make_torchvision_importable

World = samestep.World


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


@pytest.mark.parametrize("shape", [(40,), (40, 1), (10, 1, 2, 2)])
def test_accuracy_of_binary_logits(torchmetrics: Any, alone: World, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator).round()
    (metric,) = build_metrics(("accuracy",))
    metric.update(outputs, targets)
    expected = torchmetrics.functional.classification.binary_accuracy(outputs.sigmoid(), targets.long())
    assert metric.compute(alone) == float(expected)


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


def test_metrics_of_a_loop_ignore_the_targets_of_the_loss(alone: World) -> None:
    inputs, targets = random_data(20)
    for loss in (nn.CrossEntropyLoss(ignore_index=3), partial(samestep.cross_entropy, ignore_index=3)):
        values = engine_of(alone, loss).evaluate([batch_of(alone, inputs, targets, 4)], ["accuracy"])
        kept = targets != 3
        expected = engine_of(alone).evaluate([batch_of(alone, inputs[kept], targets[kept], 4)], ["accuracy"])
        assert values["accuracy"] == expected["accuracy"]


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


@pytest.mark.long
def test_built_in_metrics_import_no_library() -> None:
    """The import of torchmetrics takes seconds and hundreds of MiB."""
    script = (
        "import sys, torch, samestep\n"
        "from samestep.recipes.run import evaluate\n"
        "from samestep.metrics.metrics import build_metrics\n"
        "for metric in build_metrics(('accuracy', 'top5', 'dice', 'f1', 'iou'), 3):\n"
        "    metric.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))\n"
        "print({'torchmetrics', 'transformers', 'matplotlib', 'torchvision'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert done.stdout == "set()\n"
