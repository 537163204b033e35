"""Batches of any structure, forward functions, and parts of a step that a plain loop writes by hand."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import Points


class Named(Points):
    """Samples as mappings, with the words of Hugging Face."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return {"input_values": inputs, "labels": target, "weight": torch.tensor(1.0 + index % 3)}


class Triples(Points):
    """Samples of two views and a class."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs, inputs.flip(0), target


class Fields(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


class FieldPoints(Points):
    def __getitem__(self, index: int) -> Any:
        return Fields(*super().__getitem__(index))


class LabelModel(nn.Module):
    """A model that computes its own loss from `labels`, as those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        logits = self.linear(input_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def engine_of(setting: Setting, model: nn.Module, loss: Any = None, **options: Any) -> samestep.Engine:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    config = samestep.StepConfig(**options.pop("config", {}))
    return samestep.Engine(model, optimizer, loss, world=setting.world, config=config, **options)


def batches_of(setting: Setting, dataset: Points, **options: Any) -> Any:
    return samestep.loader(dataset, batch_size=16, microbatches=4, shuffle=True, world=setting.world, **options)


def train(setting: Setting, model: nn.Module, dataset: Points, forward: Any, **options: Any) -> list[Any]:
    engine = engine_of(setting, model, **options)
    return [engine.step(batch, forward=forward) for _ in range(2) for batch in batches_of(setting, dataset)]


def require_plain_weights(setting: Setting, model: nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
    """The weights of `linear` are those of a plain loop over the same batches, to rounding."""
    plain = nn.Linear(6, 3)
    plain.load_state_dict(initial)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    points = Points()
    for _ in range(2):
        for batch in batches_of(setting, Points()):
            inputs, targets = zip(*(points[int(index)] for index in batch.indices), strict=True)
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(torch.stack(inputs)), torch.stack(targets)).backward()
            optimizer.step()
    trained = model.linear if hasattr(model, "linear") else model
    assert torch.allclose(trained.weight, plain.weight, rtol=1e-4, atol=1e-6)


def by_labels(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


# Batches of any structure.


@same
def batch_of_a_mapping_with_labels(setting: Setting) -> Any:
    model = LabelModel()
    initial = {name: value.clone() for name, value in model.linear.state_dict().items()}
    results = train(setting, model, Named(), by_labels)
    require_plain_weights(setting, model, initial)
    return model, [result.loss for result in results]


@same
def batch_of_a_named_tuple(setting: Setting) -> Any:
    model = nn.Linear(6, 3)

    def forward(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    initial = {name: value.clone() for name, value in model.state_dict().items()}
    results = train(setting, model, FieldPoints(), forward)
    require_plain_weights(setting, model, initial)
    return model, [result.loss for result in results]


@same
def batch_of_lists_of_different_lengths(setting: Setting) -> Any:
    class Lengths(Points):
        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return inputs[: 1 + index % 6], target

    def forward(model: nn.Module, batch: Any) -> samestep.Loss:
        losses = [nn.functional.cross_entropy(model(row.mean().expand(6)), target) for row, target in batch]
        return samestep.Loss(torch.stack(losses).sum(), len(losses))

    model = nn.Linear(6, 3)
    engine = engine_of(setting, model)
    batches = batches_of(setting, Lengths(), collate_fn=list)
    return model, [engine.step(batch, forward=forward).loss for batch in batches]


@refused("E_BATCH")
def mapping_without_a_forward(setting: Setting) -> Any:
    engine = engine_of(setting, LabelModel(), nn.CrossEntropyLoss())
    for batch in batches_of(setting, Named()):
        engine.step(batch)


@refused("E_LOSS")
def engine_without_a_loss_and_step_without_a_forward(setting: Setting) -> Any:
    engine = engine_of(setting, nn.Linear(6, 3))
    for batch in batches_of(setting, Points()):
        engine.step(batch)


# Forward functions.


@same
def loss_by_sum_and_count_of_weights(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> samestep.Loss:
        losses = nn.functional.cross_entropy(model(batch["input_values"]).logits, batch["labels"], reduction="none")
        return samestep.Loss((losses * batch["weight"]).sum(), batch["weight"].sum())

    model = LabelModel()
    return model, [result.loss for result in train(setting, model, Named(), forward)]


@same
def mapping_with_a_loss_and_values_for_logging(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        output = model(**batch)
        correct = output.logits.argmax(1) == batch["labels"]
        hits = samestep.Loss(correct.sum().float(), batch["weight"].sum())
        return {"loss": output.loss, "accuracy": correct.float().mean(), "hits": hits, "share": 0.5}

    model = LabelModel()
    results = train(setting, model, Named(), forward)
    assert all(0 <= result.values["accuracy"] <= 1 and result.values["share"] == 0.5 for result in results)
    assert any(result.values["accuracy"] != result.values["hits"] for result in results)
    return model, [(result.loss, sorted(result.values.items())) for result in results]


@same
def two_calls_of_the_model_under_sync_batch_norm(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        first, second, targets = batch
        return nn.functional.cross_entropy(model(first) + model(second), targets)

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    results = train(setting, model, Triples(), forward, config={"batch_norm": "sync"})
    return model, [result.loss for result in results]


class Parts(nn.Module):
    """A model whose parts are called one by one, and not the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.encoder(inputs)).relu()


@same
def methods_of_the_model(setting: Setting) -> Any:
    def forward(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.cross_entropy(model.head(model.encode(inputs)), targets)

    model = Parts()
    before = model.encoder.weight.detach().clone()
    results = train(setting, model, Points(48), forward)
    assert not torch.equal(model.encoder.weight, before)
    return model, [result.loss for result in results]


@refused("E_INCOMPATIBLE")
def model_of_the_enclosing_scope_under_sync_batch_norm(setting: Setting) -> Any:
    model = Parts()

    def forward(_: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.cross_entropy(model.head(model.encode(inputs)), targets)

    train(setting, model, Points(48), forward, config={"batch_norm": "sync"})


@same
def gradient_of_the_input_as_a_penalty(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch[0].clone().requires_grad_(), batch[1]
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, [result.loss for result in train(setting, model, Points(), forward)]


@refused("E_LOSS")
def forward_that_returns_the_outputs(setting: Setting) -> Any:
    train(setting, nn.Linear(6, 3), Points(), lambda model, batch: model(batch[0]))


@refused("E_LOSS")
def value_for_logging_that_is_a_vector(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "logits": outputs}

    train(setting, nn.Linear(6, 3), Points(), forward)


# Evaluation.


@same
def evaluation_by_a_forward(setting: Setting) -> Any:
    def forward(model: nn.Module, batch: Any) -> Any:
        output = model(**batch)
        return {"loss": output.loss, "outputs": output.logits, "targets": batch["labels"]}

    model = LabelModel()
    engine = engine_of(setting, model)
    evaluation = samestep.loader(Named(23), batch_size=8, microbatches=4, world=setting.world)
    values = engine.evaluate(evaluation, metrics=["accuracy"], forward=forward)
    points = Points(23)
    inputs, targets = (torch.stack(column) for column in zip(*(points[i] for i in range(23)), strict=True))
    logits = model.linear(inputs)
    assert values["samples"] == 23
    assert abs(values["loss"] - float(nn.functional.cross_entropy(logits, targets))) < 1e-5
    assert values["accuracy"] == float((logits.argmax(1) == targets).float().mean())
    return values


@refused("E_METRIC")
def metrics_without_outputs_of_the_forward(setting: Setting) -> Any:
    engine = engine_of(setting, LabelModel())
    evaluation = samestep.loader(Named(23), batch_size=8, microbatches=4, world=setting.world)
    engine.evaluate(evaluation, metrics=["accuracy"], forward=by_labels)


# Inside the step.


@same
def gradient_hook_of_a_parameter(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    engine = engine_of(setting, model, nn.CrossEntropyLoss())
    return model, [engine.step(batch).loss for batch in batches_of(setting, Points())]


@refused("E_PARAMETER")
def gradient_hook_under_sync_batch_norm(setting: Setting) -> Any:
    model = Parts()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model.head(model.encode(batch[0])), batch[1])

    train(setting, model, Points(48), forward, config={"batch_norm": "sync"})


@same
def gradients_read_by_a_callback_after_reduction(setting: Setting) -> Any:
    class Centre(samestep.Callback):
        """Gradient centralisation (Yong et al., 2020)."""

        def end_gradients(self, engine: samestep.Engine) -> None:
            for parameter in engine.model.parameters():
                if parameter.grad is not None and parameter.dim() > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    model = nn.Linear(6, 3)
    before = model.weight.detach().sum(1)
    engine = engine_of(setting, model, nn.CrossEntropyLoss(), callbacks=[Centre()])
    losses = [engine.step(batch).loss for batch in batches_of(setting, Points())]
    assert torch.allclose(model.weight.sum(1), before, atol=1e-5)
    return model, losses


class SharpnessAware(torch.optim.SGD):
    """Needs a closure, as the usual implementations of SAM (Foret et al., 2021)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure()
        super().step()


@refused("E_OPTIMIZER")
def optimizer_that_needs_a_closure_at_its_step(setting: Setting) -> Any:
    model = nn.Linear(6, 3)
    optimizer = SharpnessAware(model.parameters(), lr=0.1)
    engine = engine_of(setting, model, nn.CrossEntropyLoss(), optimizer=optimizer)
    for batch in batches_of(setting, Points()):
        engine.step(batch)


class Prototypes(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - self.centres[targets]).square().sum(1).mean()


@refused("E_LOSS")
def parameters_in_the_loss(setting: Setting) -> Any:
    engine_of(setting, nn.Linear(6, 3), Prototypes())


@same
def parameters_of_the_loss_as_a_part_of_the_model(setting: Setting) -> Any:
    model = nn.ModuleDict({"net": nn.Linear(6, 3), "loss": Prototypes()})
    before = model["loss"].centres.detach().clone()

    def forward(model: Any, batch: Any) -> Any:
        return model["loss"](model["net"](batch[0]), batch[1])

    results = train(setting, model, Points(), forward)
    assert not torch.equal(model["loss"].centres, before)
    return model, [result.loss for result in results]
