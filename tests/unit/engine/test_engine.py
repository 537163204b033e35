"""Steps of an engine on one rank, compared with plain torch on the whole batch."""

import random
import signal
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Fragile, Normed, Perceptron, Picky, Recorder, Tokens, Watching, seeded
from samestep.config import StepConfig
from samestep.distributed.rng import preserved_generators, seed_generators
from samestep.distributed.signals import StopRequest
from samestep.distributed.world import RunContext
from samestep.engine.engine import Engine
from samestep.errors import InputError, UnusedParameterError

World = samestep.World


def engine_of(
    world: World, model: nn.Module, loss: Any = samestep.cross_entropy, *, make_scheduler: Any = None, **options: Any
) -> Engine:
    """Return an engine whose update equals the gradient."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    return Engine(
        model,
        optimizer,
        loss,
        world=world,
        scheduler=scheduler,
        scheduler_interval="step" if scheduler else None,
        config=StepConfig(**options),
    )


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def updates(engine: Engine, batch: Any) -> list[torch.Tensor]:
    """Return the decrease of each parameter in one step."""
    before = weights_of(engine.model)
    engine.step(batch)
    return [old - new for old, new in zip(before, weights_of(engine.model), strict=True)]


def mean_gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of the mean loss over the whole batch."""
    loss = functional.cross_entropy(model(inputs), targets)
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def assert_close(tensors: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for tensor, reference in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, reference, rtol=tolerance, atol=tolerance)


# --- the gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(("size", "microbatches"), [(1, 1), (1, 8), (5, 8), (8, 8), (13, 3), (16, 5), (7, 1)])
def test_gradient_is_that_of_the_mean_loss_of_the_batch(
    alone: World, size: int, microbatches: int, reduction: str
) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), reduction=reduction)
    expected = mean_gradient(engine.model, *random_data(size))
    assert_close(updates(engine, random_batch(alone, size, microbatches)), expected)


def test_loss_function_that_returns_a_mean_gives_the_same_gradient(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), functional.cross_entropy)
    expected = mean_gradient(engine.model, *random_data(13))
    assert_close(updates(engine, random_batch(alone, 13, 5)), expected)


def test_gradients_of_steps_are_independent(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    for seed in range(3):
        expected = mean_gradient(engine.model, *random_data(9, seed=seed))
        assert_close(updates(engine, random_batch(alone, 9, 4, seed=seed)), expected)


@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_loss_is_the_mean_over_tokens(alone: World, microbatches: int) -> None:
    """The numbers of tokens of the microbatches differ and one is 0, so a mean of means would be wrong."""
    tokens = torch.randint(0, 11, (6, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(1)
    for row, length in enumerate([9, 1, 4, 0, 0, 7]):
        targets[row, length:] = -100
    engine = engine_of(alone, seeded(0, Tokens))
    expected = mean_gradient(engine.model, tokens, targets)
    mean = functional.cross_entropy(engine.model(tokens), targets).detach()
    before = weights_of(engine.model)
    result = engine.step(batch_of(alone, tokens, targets, microbatches))
    assert_close([old - new for old, new in zip(before, weights_of(engine.model), strict=True)], expected)
    assert result.count == 21
    assert result.loss == pytest.approx(float(mean), rel=1e-12)


def test_tied_weights_receive_the_gradient_of_both_uses(alone: World) -> None:
    model = seeded(0, Tokens)
    tokens = torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(1))
    engine = engine_of(alone, model)
    expected = mean_gradient(model, tokens, tokens)
    assert_close(updates(engine, batch_of(alone, tokens, tokens, 3)), expected)
    assert model.out.weight is model.embed.weight


def test_model_with_several_inputs(alone: World) -> None:
    class Sum(Perceptron):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return super().forward(first + second)

    inputs, targets = random_data(8)
    plain = updates(engine_of(alone, seeded(0, Perceptron)), batch_of(alone, inputs, targets, 1))
    for several in (TensorTuple(inputs / 2, inputs / 2), TensorDict(first=inputs / 2, second=inputs / 2)):
        engine = engine_of(alone, seeded(0, Sum))
        assert_close(updates(engine, batch_of(alone, several, targets, 1)), plain)


class TensorTuple(tuple[torch.Tensor, ...]):
    """A tuple of tensors; a slice selects rows of every tensor."""

    def __new__(cls, *tensors: torch.Tensor) -> "TensorTuple":
        return super().__new__(cls, tensors)

    def __getitem__(self, rows: Any) -> Any:
        return tuple(tensor[rows] for tensor in self)


class TensorDict(dict[str, torch.Tensor]):
    """A dictionary of tensors; a slice selects rows of every tensor."""

    def __getitem__(self, rows: Any) -> Any:
        return {name: tensor[rows] for name, tensor in self.items()}


# --- results of a step ------------------------------------------------------------------------------------


def test_result_has_loss_count_learning_rate_and_norm(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    inputs, targets = random_data(13)
    loss = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    norm = float(torch.stack([g.norm() for g in mean_gradient(engine.model, inputs, targets)]).norm())
    result = engine.step(batch_of(alone, inputs, targets, 5))
    assert (result.step, result.count, result.lr, result.skipped, result.stop) == (1, 13, 1.0, False, False)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=1e-12), pytest.approx(norm, rel=1e-12))


def test_result_has_the_learning_rate_of_the_step(alone: World) -> None:
    engine = engine_of(
        alone,
        seeded(0, Perceptron),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    assert [engine.step(random_batch(alone, 4, 2)).lr for _ in range(3)] == [1.0, 0.5, 0.25]


def test_result_has_a_stop_request(alone: World) -> None:
    stop = StopRequest()
    world = World(rank=0, size=1, device=alone.device, context=RunContext.local(stop))
    engine = engine_of(world, seeded(0, Perceptron))
    first = engine.step(random_batch(world, 4, 2)).stop
    stop.number = signal.SIGTERM
    assert (first, engine.step(random_batch(world, 4, 2)).stop) == (False, True)


def test_result_has_a_save_request(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    saves = [engine.step(random_batch(alone, 4, 2), save=save).save for save in (False, True, False)]
    assert saves == [False, True, False]


# --- clipping ---------------------------------------------------------------------------------------------


def test_gradient_above_clip_norm_is_scaled_to_it(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), clip_norm=0.05)
    expected = mean_gradient(engine.model, *random_data(13))
    norm = float(torch.stack([g.norm() for g in expected]).norm())
    before = weights_of(engine.model)
    result = engine.step(random_batch(alone, 13, 4))
    changes = [old - new for old, new in zip(before, weights_of(engine.model), strict=True)]
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    assert norm > 0.05
    assert_close(changes, [g * 0.05 / norm for g in expected], 1e-6)


def test_gradient_below_clip_norm_is_unchanged(alone: World) -> None:
    plain, clipped = (engine_of(alone, seeded(0, Perceptron), clip_norm=limit) for limit in (None, 1e6))
    pair = [updates(engine, random_batch(alone, 13, 4)) for engine in (plain, clipped)]
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))


# --- buffers ----------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_the_mean_over_microbatches(alone: World) -> None:
    inputs, targets = random_data(12)
    engine = engine_of(alone, seeded(0, Normed))
    microbatches = [engine.model[0](part).detach() for part in inputs.split(3)]
    mean = torch.stack([microbatch.mean(0) for microbatch in microbatches]).mean(0)
    variance = torch.stack([microbatch.var(0) for microbatch in microbatches]).mean(0)
    engine.step(batch_of(alone, inputs, targets, 4))
    norm = engine.model[1]
    assert_close([norm.running_mean, norm.running_var], [0.1 * mean, 0.9 + 0.1 * variance])


@pytest.mark.parametrize(("size", "microbatches"), [(12, 4), (3, 1), (14, 7)])
def test_num_batches_tracked_counts_steps(alone: World, size: int, microbatches: int) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    for step in range(1, 4):
        engine.step(random_batch(alone, size, microbatches))
        assert int(engine.model[1].num_batches_tracked) == step


def test_batch_norm_in_evaluation_mode_keeps_its_statistics(alone: World) -> None:
    model = seeded(0, Normed)
    model[1].eval()
    before = [buffer.clone() for buffer in model[1].buffers()]
    engine = engine_of(alone, model)
    inputs, targets = random_data(12)
    engine.step(batch_of(alone, inputs, targets, 4))
    assert all(torch.equal(old, new) for old, new in zip(before, model[1].buffers(), strict=True))


def test_microbatches_without_samples_do_not_change_buffers(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Watching))
    inputs, targets = random_data(5)
    engine.step(batch_of(alone, inputs, targets, 8))
    assert int(engine.model.forwards) == 1
    assert_close([engine.model.last], [inputs.mean(0)])


@pytest.mark.filterwarnings("ignore:the model is in evaluation mode")
@pytest.mark.parametrize("switch", [lambda model: model.eval(), lambda model: model[1].eval()], ids=["model", "layer"])
def test_step_keeps_the_modes_of_the_script(alone: World, switch: Any) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 12, 4))
    switch(engine.model)
    modes = [module.training for module in engine.model.modules()]
    before = [buffer.clone() for buffer in engine.model[1].buffers()]
    engine.step(random_batch(alone, 12, 4))
    assert [module.training for module in engine.model.modules()] == modes
    assert all(torch.equal(old, new) for old, new in zip(before, engine.model[1].buffers(), strict=True))


def test_step_in_evaluation_mode_warns_once(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.model.eval()
    with pytest.warns(UserWarning, match="the model is in evaluation mode"):
        engine.step(random_batch(alone, 12, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(random_batch(alone, 12, 4))


def test_evaluation_restores_the_training_mode(alone: World) -> None:
    evaluated, other = (engine_of(alone, seeded(0, Normed)) for _ in range(2))
    other.number = 0  # the random numbers of the first engine
    for engine in (evaluated, other):
        engine.step(random_batch(alone, 12, 4))
    evaluated.evaluate([random_batch(alone, 12, 4)])
    for engine in (evaluated, other):
        engine.step(random_batch(alone, 12, 4))
    state, expected = evaluated.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_every_microbatch_starts_with_the_buffers_of_the_step(alone: World) -> None:
    """With momentum 1, running statistics that are not restored would be those of the last microbatch."""
    model = seeded(0, Normed)
    model[1].momentum = 1.0
    inputs, targets = random_data(12)
    means = [model[0](part).detach().mean(0) for part in inputs.split(3)]
    engine_of(alone, model).step(batch_of(alone, inputs, targets, 4))
    assert_close([model[1].running_mean], [torch.stack(means).mean(0)])


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_unused_parameter_is_refused(alone: World, reduction: str) -> None:
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    engine = engine_of(alone, model, reduction=reduction)
    with pytest.raises(UnusedParameterError, match=r"1 trained parameters .*: idle") as error:
        engine.step(random_batch(alone, 8, 4))
    assert error.value.fix is not None


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("using", [0, 3], ids=["first", "last"])
def test_parameter_used_by_one_microbatch_only_is_refused(alone: World, using: int, reduction: str) -> None:
    inputs, targets = random_data(8)
    inputs[:, 0] = -1
    inputs[2 * using : 2 * using + 2, 0] = 1
    engine = engine_of(alone, seeded(0, Picky), reduction=reduction)
    with pytest.raises(UnusedParameterError, match=r"2 trained parameters .*: sometimes") as error:
        engine.step(batch_of(alone, inputs, targets, 4))
    assert ("of microbatch 1, but were part of the loss of microbatch 0" in error.value.value) == (using == 0)
    assert f"microbatch {1 if using == 0 else 0} gave none" in str(error.value)


def test_unused_frozen_parameter_is_accepted(alone: World) -> None:
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2), requires_grad=False))
    engine = engine_of(alone, model)
    engine.step(random_batch(alone, 8, 4))
    assert model.idle.tolist() == [0, 0]


def test_optimizer_without_all_parameters_is_refused(alone: World) -> None:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(InputError, match=r"2 trained parameters .* 0 parameters") as error:
        Engine(model, optimizer, samestep.cross_entropy, world=alone)
    assert error.value.code == "E_OPTIMIZER"


def test_optimizer_of_another_model_is_refused(alone: World) -> None:
    model, other = seeded(0, Perceptron), seeded(0, Perceptron)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    with pytest.raises(InputError, match=r"4 trained parameters .* 4 parameters") as error:
        Engine(model, optimizer, samestep.cross_entropy, world=alone)
    assert error.value.code == "E_OPTIMIZER"


def test_optimizer_with_frozen_parameters_is_accepted(alone: World) -> None:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    Engine(model, optimizer, samestep.cross_entropy, world=alone).step(random_batch(alone, 8, 4))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("data", [torch.ones(4), [torch.ones(4)] * 3, {"inputs": 1, "targets": 2}, None])
def test_batch_that_is_not_a_pair_is_refused(alone: World, data: Any) -> None:
    batch = random_batch(alone, 4, 1)
    part = batch.local_microbatches[0]._replace(data=data)
    engine = engine_of(alone, seeded(0, Perceptron))
    with pytest.raises(InputError, match="E_BATCH"):
        engine.step(type(batch)(batch.begin, batch.end, batch.indices, 1, (part,)))


def test_loss_function_with_an_invalid_result_is_refused(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), lambda outputs, targets: outputs)
    with pytest.raises(InputError, match="the loss function returned a Tensor of shape"):
        engine.step(random_batch(alone, 4, 1))


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("microbatch", range(4))
def test_failed_step_does_not_affect_the_next_step(alone: World, microbatch: int, reduction: str) -> None:
    """A program may catch an error of the model and continue with the next batch."""
    failed, other = (engine_of(alone, seeded(0, Fragile), reduction=reduction) for _ in range(2))
    other.number = 0  # the random numbers of the first engine
    inputs, targets = random_data(12)
    inputs[3 * microbatch] = 1e6
    with pytest.raises(ArithmeticError, match="too large"):
        failed.step(batch_of(alone, inputs, targets, 4))
    for engine in (failed, other):
        engine.step(random_batch(alone, 12, 4, seed=1))
    state, expected = failed.model.state_dict(), other.model.state_dict()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


# --- random state -----------------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_step_leaves_the_generators_unchanged(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with preserved_generators():
        seed_generators(1)
        expected = draws()
        seed_generators(1)
        engine.step(random_batch(alone, 12, 4))
        assert draws() == expected


def test_step_does_not_depend_on_the_state_of_the_generators(alone: World) -> None:
    pair = []
    for seed in (1, 2):
        engine = engine_of(alone, seeded(0, Normed))
        with preserved_generators():
            seed_generators(seed)
            pair.append(updates(engine, random_batch(alone, 12, 4)))
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))


def model_draws(world: World, *, seed: int = 0, steps: int = 1, done: int = 0) -> list[dict[float, float]]:
    """Return the draws of the model in each step, by microbatch."""
    engine = engine_of(world, seeded(0, Recorder), seed=seed)
    engine.steps, drawn = done, []
    for _ in range(steps):
        engine.step(random_batch(world, 8, 4))
        drawn.append(dict(engine.model.drawn))
    return drawn


def test_random_state_depends_on_seed_step_and_microbatch(alone: World) -> None:
    first, second = model_draws(alone, steps=2)
    other = model_draws(alone, seed=1)[0]
    assert len({*first.values(), *second.values(), *other.values()}) == 12


def test_random_state_does_not_depend_on_a_resume(alone: World) -> None:
    assert model_draws(alone, done=1) == model_draws(alone, steps=2)[1:]
