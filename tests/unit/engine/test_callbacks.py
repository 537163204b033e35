"""Hooks of the engine, and training metrics and the best checkpoint of a loop, as in a tutorial."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Normed, seeded
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import StepConfig
from samestep.data.batch import Microbatch
from samestep.engine.callbacks import Callback, TrainingValues, of_microbatches
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.errors import CheckpointError, InputError, NonFiniteError
from samestep.torchvision_import import make_torchvision_importable


class Steps(Callback):
    """Has no hook of microbatches."""

    def begin_step(self, *_: Any) -> None:
        return


class Outputs(Steps):
    """Has one hook of microbatches."""

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        return


def test_callbacks_without_hooks_of_microbatches_let_them_be_computed_together() -> None:
    outputs, values = Outputs(), TrainingValues([])
    assert of_microbatches([Callback(), Steps(), outputs, values]) == [outputs, values]


World = samestep.World
SAMPLES = 48


def engine_of(world: World, **options: Any) -> Engine:
    model = seeded(0, Normed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, **options)


@pytest.mark.parametrize("batch_norm", ["microbatch", "sync"])
def test_training_values_are_those_of_the_outputs_of_the_steps(alone: World, batch_norm: Any) -> None:
    class Outputs(Callback):
        def __init__(self) -> None:
            self.hits: list[bool] = []

        def end_microbatch(self, microbatch: Any, outputs: torch.Tensor, loss: Any) -> None:
            self.hits += (outputs.argmax(1) == microbatch.pair[1]).tolist()

    outputs = Outputs()
    engine = engine_of(
        alone, metrics=["accuracy", "perplexity"], callbacks=[outputs], config=StepConfig(batch_norm=batch_norm)
    )
    batch = batch_of(alone, *random_data(SAMPLES), 3)
    losses = [engine.step(batch).loss for _ in range(4)]
    engine.evaluate([batch])  # has its own counts
    values = engine.training_values()
    assert values["loss"] == pytest.approx(sum(losses) / 4, rel=1e-14)
    assert values["accuracy"] == pytest.approx(sum(outputs.hits) / len(outputs.hits), rel=1e-6)
    assert values["perplexity"] == math.exp(values["loss"])
    assert len(outputs.hits) == 4 * SAMPLES
    assert math.isnan(engine.training_values()["loss"]), "the counts start again"


@pytest.mark.parametrize("non_finite", ["skip", "stop"])
def test_training_values_leave_out_skipped_and_failed_steps(alone: World, non_finite: Any) -> None:
    make_torchvision_importable()
    import torchmetrics  # takes seconds

    class Largest(torchmetrics.Metric):  # type: ignore[misc]
        """Sum of the largest outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.total += outputs.max(dim=1).values.sum()

        def compute(self) -> torch.Tensor:
            return self.total

    def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean(dim=1)

    def values(*batches: Any) -> dict[str, float]:
        accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        metrics = ["accuracy", mean_output, accuracy, Largest()]
        engine = engine_of(alone, metrics=metrics, config=StepConfig(non_finite=non_finite))
        engine.model.get_submodule("3").p = 0.0  # skipped steps change the random numbers of later ones
        for batch in batches:
            with suppress(NonFiniteError):
                engine.step(batch)
        return engine.training_values()

    inputs, targets = random_data(SAMPLES)
    one, other = batch_of(alone, inputs, targets, 3), batch_of(alone, *random_data(SAMPLES, seed=1), 3)
    bad = batch_of(alone, torch.cat([inputs[:-1], torch.full_like(inputs[:1], torch.nan)]), targets, 3)
    assert values(bad, one, bad, other, bad) == values(one, other)


def test_engine_without_metrics_has_no_training_values(alone: World) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone).training_values()
    assert error.value.code == "E_METRIC"


def test_metrics_of_the_engine_are_the_default_of_an_evaluation(alone: World) -> None:
    batches = [batch_of(alone, *random_data(SAMPLES), 3)]
    engine = engine_of(alone, metrics=["accuracy"])
    assert engine.evaluate(batches).keys() == {"loss", "samples", "accuracy"}
    assert engine.evaluate(batches, ["top5"]).keys() == {"loss", "samples", "top5"}


def loop(world: World, folder: Path, epochs: int, **options: Any) -> tuple[list[dict[str, float]], list[bool]]:
    """Train like a tutorial, and return the evaluation of each epoch and whether it was the best so far."""
    engine = engine_of(world, metrics=["accuracy"])
    batches = samestep.loader(
        TensorDataset(*random_data(SAMPLES)), batch_size=16, microbatches=1, shuffle=True, world=world
    )
    test_batches = samestep.loader(TensorDataset(*random_data(40, seed=2)), batch_size=16, microbatches=1, world=world)
    values, best = [], []
    with samestep.CheckpointManager(folder, engine, batches, **options) as checkpoints:
        checkpoints.resume()
        while batches.cursor.epoch < epochs:
            for batch in batches:
                engine.step(batch)
            values.append(engine.evaluate(test_batches))
            best.append(checkpoints.save(values[-1]))
    return values, best


@pytest.mark.parametrize(
    ("options", "key", "better"),
    [
        ({}, "loss", min),
        ({"best_by": "accuracy"}, "accuracy", max),
        ({"best_by": "accuracy", "best_mode": "min"}, "accuracy", min),
    ],
)
def test_best_and_last_checkpoints_of_a_loop(
    alone: World, tmp_path: Path, options: dict[str, Any], key: str, better: Any
) -> None:
    values, flags = loop(alone, tmp_path, 3, **options)
    more, more_flags = loop(alone, tmp_path, 6, **options)  # resumed: the best value so far is in the checkpoint
    results = [value[key] for value in values + more]
    assert len(results) == 6
    first = results.index(better(results))
    assert [number for number, flag in enumerate(flags + more_flags) if flag][-1] == first
    folder = CheckpointFolder(tmp_path)
    assert folder.find("best").name == f"step-{3 * (first + 1):09}"
    assert folder.find("last").name == "step-000000018"
    assert folder.find("epoch-6") == folder.find("last")


def test_best_checkpoint_can_be_evaluated_after_training(alone: World, tmp_path: Path) -> None:
    values, _ = loop(alone, tmp_path, 6)
    engine, data = engine_of(alone, metrics=["accuracy"]), TensorDataset(*random_data(SAMPLES))
    batches = samestep.loader(data, batch_size=16, microbatches=1, shuffle=True, world=alone)
    test_batches = samestep.loader(TensorDataset(*random_data(40, seed=2)), batch_size=16, microbatches=1, world=alone)
    with samestep.CheckpointManager(tmp_path, engine, batches) as checkpoints:
        assert checkpoints.resume("best")
        assert engine.evaluate(test_batches)["loss"] == min(value["loss"] for value in values)
        with pytest.raises(CheckpointError):
            checkpoints.resume("77")


def test_values_that_are_not_finite_are_never_the_best(alone: World, tmp_path: Path) -> None:
    engine = engine_of(alone)
    batches = samestep.loader(TensorDataset(*random_data(SAMPLES)), batch_size=16, microbatches=1, world=alone)
    with samestep.CheckpointManager(tmp_path, engine, batches, best_by="accuracy") as checkpoints:
        assert not checkpoints.save({"loss": math.nan, "accuracy": 0.9})
        assert not checkpoints.save({"loss": math.inf, "accuracy": 0.9})
        assert not checkpoints.save({"loss": 1.0, "accuracy": math.nan})
        assert checkpoints.save({"loss": 1.0, "accuracy": 0.1})
        assert not checkpoints.save()
        engine.steps = 9
        with pytest.raises(InputError) as error:
            checkpoints.save({"loss": 1.0})
    assert error.value.code == "E_METRIC"
    assert (tmp_path / "last").resolve().name == "step-000000009"


@pytest.mark.parametrize("options", [{"best_by": "auroc"}, {"best_by": "accuracy", "best_mode": "largest"}])
def test_best_rule_of_an_unknown_metric_needs_a_mode(alone: World, tmp_path: Path, options: dict[str, Any]) -> None:
    engine = engine_of(alone)
    batches = samestep.loader(TensorDataset(*random_data(SAMPLES)), batch_size=16, microbatches=1, world=alone)
    with pytest.raises(InputError) as error:
        samestep.CheckpointManager(tmp_path, engine, batches, **options)
    assert error.value.code == "E_METRIC"
