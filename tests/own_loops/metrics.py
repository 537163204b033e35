"""Metrics of evaluation and training, and evaluation without an optimizer."""

from typing import Any

import torch
import torchmetrics.classification
import torchmetrics.regression
from torch import nn

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import Points


def evaluation(setting: Setting, size: int = 23, **options: Any) -> Any:
    return samestep.loader(Points(size), batch_size=8, microbatches=4, world=setting.world, **options)


def engine_of(setting: Setting, model: nn.Module, **options: Any) -> samestep.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, **options)


def outputs_and_targets(model: nn.Module, size: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    points = Points(size)
    inputs, targets = (torch.stack(column) for column in zip(*(points[i] for i in range(size)), strict=True))
    model.eval()
    with torch.no_grad():
        return model(inputs), targets


def errors(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 1 - outputs.softmax(1).gather(1, targets[:, None])[:, 0]


def hits(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


@same
def function_that_returns_one_value_per_sample(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics=[errors])
    assert abs(values["errors"] - float(errors(*outputs_and_targets(model)).mean())) < 1e-6
    return values


@same
def function_that_returns_sum_and_count(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics=[hits, "accuracy"])
    total, count = hits(*outputs_and_targets(model))
    assert values["hits"] == float(total) / count
    return values


@same
def function_as_a_metric_of_training(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    engine = engine_of(setting, model, metrics=[errors, "accuracy"])
    batches = samestep.loader(Points(), batch_size=16, microbatches=4, shuffle=True, world=setting.world)
    for batch in batches:
        engine.step(batch)
    values = engine.training_values()
    assert 0 < values["errors"] < 1
    return values, engine.evaluate(evaluation(setting))


@refused("E_METRIC")
def function_without_a_name(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    engine_of(setting, model).evaluate(evaluation(setting), metrics=[lambda outputs, targets: outputs])


@refused("E_METRIC")
def function_that_returns_a_mean(setting: Setting) -> Any:
    def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return errors(outputs, targets).mean()

    engine_of(setting, nn.Linear(6, 3)).evaluate(evaluation(setting), metrics=[error])


@same
def metric_of_torchmetrics_by_counts(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    metric = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics={"score": metric})
    outputs, targets = outputs_and_targets(model)
    assert abs(values["score"] - float((outputs.argmax(1) == targets).float().mean())) < 1e-6
    return values


@same
def metric_of_torchmetrics_by_sums(setting: Setting) -> Any:
    class Probability(torchmetrics.regression.MeanSquaredError):
        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            super().update(preds.softmax(1), nn.functional.one_hot(target, 3).float())

    model = nn.Linear(6, 3)
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics=[Probability()])
    outputs, targets = outputs_and_targets(model)
    expected = (outputs.softmax(1) - nn.functional.one_hot(targets, 3)).square().mean()
    assert abs(values["probability"] - float(expected)) < 1e-6
    return values


@refused("E_METRIC")
def metric_of_torchmetrics_that_keeps_all_outputs(setting: Setting) -> Any:
    metric = torchmetrics.classification.MulticlassAUROC(3, thresholds=None)
    engine_of(setting, nn.Linear(6, 3)).evaluate(evaluation(setting), metrics={"auroc": metric})


@same
def built_in_metrics_as_objects(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    metrics = [samestep.Accuracy(), samestep.Accuracy("top2", top_k=2), "f1"]
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics=metrics)
    outputs, targets = outputs_and_targets(model)
    assert values["accuracy"] == float((outputs.argmax(1) == targets).float().mean())
    assert values["top2"] >= values["accuracy"]
    return values


@same
def own_metric_with_a_class(setting: Setting) -> Any:
    class Largest:
        name = "largest"

        def __init__(self) -> None:
            self.reset()

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self._value = max(self._value, float(outputs.max()))

        def compute(self, world: samestep.World) -> float:
            value = max(samestep.all_gather(self._value, world))
            self.reset()
            return value

        def reset(self) -> None:
            self._value = -1e9

    model = nn.Linear(6, 3)
    values = engine_of(setting, model).evaluate(evaluation(setting), metrics=[Largest()])
    # torch rounds a matrix product of another number of rows differently
    assert abs(values["largest"] - float(outputs_and_targets(model)[0].max())) < 1e-5
    return values


# Evaluation without an optimizer.


@same
def evaluation_without_an_optimizer(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    values = samestep.evaluate(model, evaluation(setting), ["accuracy", errors], world=setting.world)
    outputs, targets = outputs_and_targets(model)
    assert values["accuracy"] == float((outputs.argmax(1) == targets).float().mean())
    assert set(values) == {"accuracy", "errors", "samples"}
    return values


@same
def evaluation_equals_that_of_an_engine(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    by_engine = engine_of(setting, model).evaluate(evaluation(setting), metrics=["accuracy", "f1"])
    alone = samestep.evaluate(
        model, evaluation(setting), ["accuracy", "f1"], world=setting.world, loss=nn.CrossEntropyLoss()
    )
    assert alone == by_engine
    return alone


@same
def evaluation_of_fewer_samples_than_ranks(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    return samestep.evaluate(model, evaluation(setting, 2), ["accuracy", errors], world=setting.world)


@same
def evaluation_of_weights_that_differ_between_ranks_uses_those_of_rank_0(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.bias.add_(setting.world.rank)
    return samestep.evaluate(model, evaluation(setting), ["accuracy", errors], world=setting.world)


@refused("E_METRIC")
def metric_of_the_loss_without_a_loss(setting: Setting) -> Any:
    samestep.evaluate(nn.Linear(6, 3), evaluation(setting), ["perplexity"], world=setting.world)


@refused("E_BUFFER")
def evaluation_that_writes_parameters(setting: Setting) -> Any:
    class Halving(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(inputs)

    samestep.evaluate(Halving(6, 3), evaluation(setting), ["accuracy"], world=setting.world)


@refused("E_LAUNCH")
def second_session(setting: Setting) -> Any:
    samestep.init()
