"""With `gather: global`, a step and an evaluation equal those of plain PyTorch on the whole batch."""

import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Perceptron, Root, seeded
from samestep.config import StepConfig
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.errors import InputError, NonFiniteError, UnusedParameterError

World = samestep.World


class TwoTowers(nn.Module):
    """Two encoders and a learned scale, as in CLIP; an output that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Perceptron(), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        image, text = (functional.normalize(tower(inputs), dim=1) for tower in (self.image, self.text))
        return {"image": image, "text": [text], "scale": self.logit_scale.exp(), "unused": inputs, "note": "two"}


def clip_loss(outputs: Mapping[str, Any], targets: torch.Tensor) -> torch.Tensor:
    logits = outputs["scale"] * outputs["image"] @ outputs["text"][0].T
    labels = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def supervised_contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples of the loss of Khosla et al., "Supervised Contrastive Learning" (2020)."""
    features = functional.normalize(outputs, dim=1)
    itself = torch.eye(len(features), dtype=torch.bool)
    logits = (features @ features.T / 0.5).masked_fill(itself, -math.inf)
    positives = (targets[:, None] == targets) & ~itself
    log_shares = functional.log_softmax(logits, dim=1).masked_fill(~positives, 0.0)
    return -(log_shares.sum(1) / positives.sum(1).clamp(min=1)).mean()


def engine_of(world: World, model: nn.Module, loss: Any, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Engine(model, optimizer, loss, world=world, config=StepConfig(**{"gather": "global", **options}))


def plain_step(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Set the gradients of a plain loop on one device, and return the loss."""
    model.zero_grad()
    value = loss(model(inputs), targets)
    value.backward()
    return float(value.detach())


def assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-14)


# --- equality with a plain loop ------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(("size", "microbatches"), [(19, 1), (19, 5), (16, 8), (3, 8)])
@pytest.mark.parametrize(("kind", "loss"), [(TwoTowers, clip_loss), (Perceptron, supervised_contrastive)])
def test_step_and_evaluation_equal_a_plain_loop(
    alone: World, kind: type[nn.Module], loss: Any, size: int, microbatches: int, reduction: str
) -> None:
    inputs, targets = random_data(size)
    model, plain = seeded(0, kind), seeded(0, kind)
    engine = engine_of(alone, model, loss, reduction=reduction)
    batch = batch_of(alone, inputs, targets, microbatches)
    value = engine.evaluate([batch])["loss"]
    result = engine.step(batch)
    expected = plain_step(plain, loss, inputs, targets)
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert value == pytest.approx(expected, rel=1e-12)
    assert result.count == size
    assert_equal_gradients(model, plain)


def test_losses_of_microbatches_are_another_loss(alone: World) -> None:
    """Control for the test above."""
    values = [
        engine_of(alone, seeded(0, TwoTowers), clip_loss, gather=gather).step(random_batch(alone, 19, 5)).loss
        for gather in ("global", "microbatch")
    ]
    assert abs(values[0] - values[1]) > 0.1


def test_steps_do_not_depend_on_microbatches(alone: World) -> None:
    losses = []
    for microbatches in (1, 4):
        engine = engine_of(alone, seeded(0, TwoTowers), clip_loss, clip_norm=0.1)
        losses.append([engine.step(random_batch(alone, size, microbatches, seed=size)).loss for size in (19, 16, 3, 9)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_sum_and_count(alone: World) -> None:
    """The loss of a step is sum / count over the whole batch."""

    def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        distances = (outputs[:, None] - outputs).square().sum(2)
        return Loss(distances.sum(), len(outputs) * (len(outputs) - 1))

    inputs, targets = random_data(13)
    model, plain = seeded(0, Perceptron), seeded(0, Perceptron)
    result = engine_of(alone, model, pairs).step(batch_of(alone, inputs, targets, 4))
    expected = plain_step(plain, lambda o, t: pairs(o, t).sum / (13 * 12), inputs, targets)
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert result.count == 13 * 12
    assert_equal_gradients(model, plain)


def test_torch_loss_equals_that_of_microbatches(alone: World) -> None:
    inputs, targets = random_data(13)
    targets[3:6] = -100
    models = []
    for gather in ("global", "microbatch"):
        models.append(seeded(0, Perceptron))
        engine = engine_of(alone, models[-1], nn.CrossEntropyLoss(), gather=gather)
        assert engine.step(batch_of(alone, inputs, targets, 4)).count == 10
    assert_equal_gradients(*models)


def test_multi_loss(alone: World) -> None:
    inputs, targets = random_data(13)
    targets[:5] = -100
    terms = [
        samestep.LossTerm("pairs", supervised_contrastive, "once", weight=0.3),
        samestep.LossTerm(
            "classes", lambda o, t: samestep.cross_entropy(o, t).sum, lambda targets: (targets != -100).sum()
        ),
    ]
    model, plain = seeded(0, Perceptron), seeded(0, Perceptron)
    engine = engine_of(alone, model, samestep.MultiLoss(terms))
    batch = batch_of(alone, inputs, targets, 4)
    values = engine.evaluate([batch])
    expected = plain_step(
        plain, lambda o, t: 0.3 * supervised_contrastive(o, t) + functional.cross_entropy(o, t), inputs, targets
    )
    assert values["loss"] == pytest.approx(expected, rel=1e-12)
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-12)
    assert 0.3 * values["loss_pairs"] + values["loss_classes"] == pytest.approx(expected, rel=1e-12)
    assert_equal_gradients(model, plain)


def test_invalid_count_of_a_term(alone: World) -> None:
    term = samestep.LossTerm("pairs", supervised_contrastive, lambda targets: -1.0)
    with pytest.raises(InputError) as error:
        engine_of(alone, seeded(0, Perceptron), samestep.MultiLoss([term])).step(random_batch(alone, 8, 4))
    assert error.value.code == "E_LOSS"


def test_forward_function_returns_outputs_and_targets(alone: World) -> None:
    inputs, targets = random_data(13)
    model, plain = seeded(0, Perceptron), seeded(0, Perceptron)
    engine = engine_of(alone, model, supervised_contrastive)

    def forward(model: nn.Module, data: Any) -> dict[str, Any]:
        return {"outputs": model(data[0]), "targets": data[1], "inputs": data[0].mean()}

    batch = batch_of(alone, inputs, targets, 4)
    value = engine.evaluate([batch], forward=forward)
    result = engine.step(batch, forward=forward)
    expected = plain_step(plain, supervised_contrastive, inputs, targets)
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert value["loss"] == pytest.approx(expected, rel=1e-12)
    assert result.values["inputs"] == pytest.approx(float(inputs.mean()), rel=1e-12)
    assert_equal_gradients(model, plain)


def test_evaluation_is_the_mean_over_batches_by_samples(alone: World) -> None:
    model = seeded(0, Perceptron)
    batches = [random_batch(alone, size, 4, seed=size) for size in (8, 3)]
    with torch.no_grad():
        data = [random_data(size, seed=size) for size in (8, 3)]
        values = [float(supervised_contrastive(model(inputs), targets)) for inputs, targets in data]
    expected = (8 * values[0] + 3 * values[1]) / 11
    assert engine_of(alone, model, supervised_contrastive).evaluate(batches)["loss"] == pytest.approx(
        expected, rel=1e-12
    )
    config = StepConfig(gather="global")
    alone_value = samestep.evaluate(model, batches, world=alone, loss=supervised_contrastive, config=config)
    assert alone_value["loss"] == pytest.approx(expected, rel=1e-12)
    accuracy = samestep.evaluate(model, batches, ["accuracy"], world=alone, config=config)
    assert accuracy.keys() == {"samples", "accuracy"}


# --- state of the model ------------------------------------------------------------------------


def test_norm_layers_in_both_modes(alone: World) -> None:
    """Statistics are those of microbatches; a norm layer in evaluation mode needs its buffers in backward."""
    inputs, targets = random_data(16)
    for trains in (True, False):
        model, plain = seeded(0, Normed), seeded(0, Normed)
        for net in (model, plain):
            net[1].train(trains)
            net[3].p = 0.0
        buffers = dict(model.named_buffers())
        result = engine_of(alone, model, supervised_contrastive).step(batch_of(alone, inputs, targets, 4))
        expected = supervised_contrastive(torch.cat([plain(part) for part in inputs.split(4)]), targets)
        expected.backward()
        assert result.loss == pytest.approx(float(expected.detach()), rel=1e-12)
        assert_equal_gradients(model, plain)
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
        assert bool(model[1].running_mean.any()) == trains


def test_dropout_and_random_numbers_of_the_loss_are_repeatable(alone: World) -> None:
    drawn: list[float] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        return supervised_contrastive(outputs, targets)

    losses = []
    for _ in range(2):
        engine = engine_of(alone, seeded(0, Normed), loss)
        losses.append([engine.step(random_batch(alone, 16, 4)).loss for _ in range(2)])
    assert losses[0] == losses[1]
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


def test_recomputed_activations_do_not_change_the_result(alone: World) -> None:
    states = []
    for recompute in ((), ("1", "3")):
        engine = engine_of(alone, seeded(0, Normed), supervised_contrastive, recompute=recompute)
        for step in range(3):
            engine.step(random_batch(alone, 16, 4, seed=step))
        states.append(engine.model.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(alone: World, precision: str) -> None:
    inputs, targets = random_data(16)
    model = seeded(0, TwoTowers, dtype=torch.float32)
    engine = engine_of(alone, model, clip_loss, precision=precision)
    exact = float(clip_loss(seeded(0, TwoTowers)(inputs), targets).detach())
    for _ in range(4):  # fp16 reduces its scale first
        result = engine.step(batch_of(alone, inputs.float(), targets, 4))
    assert result.loss == pytest.approx(exact, rel=0.2) or result.loss < exact
    assert math.isfinite(result.grad_norm) and not result.skipped


def test_metrics_of_training(alone: World) -> None:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = StepConfig(gather="global")
    engine = Engine(model, optimizer, nn.CrossEntropyLoss(), world=alone, config=config, metrics=["accuracy"])
    inputs, targets = random_data(16)
    with torch.no_grad():
        expected = (model(inputs).argmax(1) == targets).double().mean()
    result = engine.step(batch_of(alone, inputs, targets, 4))
    values = engine.training_values()
    assert values["accuracy"] == pytest.approx(float(expected))
    assert values["loss"] == result.loss


# --- errors ------------------------------------------------------------------------


def test_non_finite_outputs_name_their_microbatches(alone: World) -> None:
    inputs, targets = random_data(8)
    inputs[6] = math.nan
    model = seeded(0, Perceptron)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"the loss of microbatch 3 .*samples 106, 107"):
        engine_of(alone, model, supervised_contrastive).step(batch_of(alone, inputs, targets, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_non_finite_gradient_names_its_microbatch(alone: World) -> None:
    inputs, targets = random_data(8)
    inputs[2] = 0.0
    with pytest.raises(NonFiniteError, match=r"gradient of parameter scale is not finite, from microbatch 1 "):
        engine_of(alone, seeded(0, Root), supervised_contrastive).step(batch_of(alone, inputs, targets, 4))


def test_unused_parameter_is_refused(alone: World) -> None:
    with pytest.raises(UnusedParameterError):
        engine_of(alone, seeded(0, TwoTowers), lambda o, t: o["image"].square().sum(1).mean()).step(
            random_batch(alone, 8, 4)
        )


class Returning(nn.Module):
    """Returns the result of a function of the features."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 4), function

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.function(self.linear(inputs))


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: torch.cat([rows, rows]),  # two views of each sample
        lambda rows: rows.T,
        lambda rows: rows.mean(0, keepdim=True),
        lambda rows: {"rows": rows, "balance": rows.mean()},
        lambda rows: SimpleNamespace(rows=rows),
        lambda rows: Pair(rows, rows),
        lambda rows: (rows, object()),
        lambda rows: {("a", 1): rows},
        lambda rows: (rows, len(rows)),
        lambda rows: rows[:, : len(rows)],
        lambda rows: rows if len(rows) == 3 else rows.float(),
        lambda rows: [rows] * len(rows),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(alone: World, function: Any) -> None:
    model = Returning(function).double()
    with pytest.raises(InputError) as error:
        engine_of(alone, model, lambda outputs, targets: outputs.sum()).step(random_batch(alone, 10, 4))
    assert error.value.code == "E_SHAPE"


@pytest.mark.parametrize(
    ("forward", "code"),
    [
        (lambda model, data: model(data[0]).square().mean(), "E_SHAPE"),
        (lambda model, data: {"loss": model(data[0]).mean(), "outputs": data[0], "targets": data[1]}, "E_SHAPE"),
    ],
)
def test_forward_function_that_returns_a_loss_is_refused(alone: World, forward: Any, code: str) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone, seeded(0, Perceptron), supervised_contrastive).step(random_batch(alone, 8, 4), forward=forward)
    assert error.value.code == code


def test_engine_without_a_loss_is_refused(alone: World) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone, seeded(0, Perceptron), None).step(random_batch(alone, 8, 4))
    assert error.value.code == "E_LOSS"


def test_rule_for_a_parameter_is_refused(alone: World) -> None:
    model = seeded(0, TwoTowers)
    model.text.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with pytest.raises(InputError) as error:
        Engine(model, optimizer, clip_loss, world=alone, config=StepConfig(gather="global"), buffers={"text.*": "last"})
    assert error.value.code == "E_INCOMPATIBLE"


# --- batch norm with statistics of the whole batch --------------------------------------------------------


@pytest.mark.parametrize("size", [19, 16, 3])
def test_sync_batch_norm_equals_a_plain_loop(alone: World, size: int) -> None:
    """Also with microbatches of different sizes and without samples."""
    inputs, targets = random_data(size)
    model, plain = seeded(0, Normed), seeded(0, Normed)
    for net in (model, plain):
        net[3].p = 0.0
    engine = engine_of(alone, model, supervised_contrastive, batch_norm="sync")
    result = engine.step(batch_of(alone, inputs, targets, 5))
    assert result.loss == pytest.approx(plain_step(plain, supervised_contrastive, inputs, targets), rel=1e-12)
    assert_equal_gradients(model, plain)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=1e-12, atol=1e-14)


def test_sync_batch_norm_with_a_forward_function_and_metrics(alone: World) -> None:
    inputs, targets = random_data(16)
    results = []
    for forward in (None, lambda model, data: {"outputs": model(data[0]), "targets": data[1]}):
        model = seeded(0, Normed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = StepConfig(gather="global", batch_norm="sync", clip_norm=0.5)
        engine = Engine(model, optimizer, supervised_contrastive, world=alone, config=config, metrics=["accuracy"])
        losses = [engine.step(batch_of(alone, inputs, targets, 4), forward=forward).loss for _ in range(2)]
        results.append((losses, engine.training_values()))
    assert results[0] == results[1]


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_sync_batch_norm_names_bad_microbatches(alone: World, value: float) -> None:
    """NaN makes the first statistics not finite; the gradient of a root at 0 is not finite after the norm layer."""
    inputs, targets = random_data(8)
    inputs[2] = value
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6), Root()).double()
    if value == 0.0:
        model = nn.Sequential(Root(), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    with pytest.raises(NonFiniteError, match=r"microbatch 1 "):
        engine_of(alone, model, supervised_contrastive, batch_norm="sync").step(batch_of(alone, inputs, targets, 4))


def test_sync_batch_norm_refuses_one_sample(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed), supervised_contrastive, batch_norm="sync")
    with pytest.raises(InputError) as error:
        engine.step(random_batch(alone, 1, 4))
    assert error.value.code == "E_INCOMPATIBLE"
