"""A step is what one large batch would have done, whatever its shards."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from batches import batch_of, random_batch, random_data
from models import Fragile, Normed, Perceptron, Picky, Recorder, Tokens, Watching, seeded
from samestep.config import StepRules
from samestep.engine.step import Engine
from samestep.errors import InputError
from samestep.runtime.random_state import preserved_generators, seed_generators

World = samestep.World


def engine_of(
    world: World, model: nn.Module, loss: Any = samestep.cross_entropy, *, scheduler: Any = None, **rules: Any
) -> Engine:
    """An engine whose update is the gradient itself."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    made = scheduler(optimizer) if scheduler else None
    return Engine(model, optimizer, loss, world=world, scheduler=made, rules=StepRules(**rules))


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def updates(engine: Engine, batch: Any) -> list[torch.Tensor]:
    """By how much a step changes each parameter."""
    before = weights_of(engine.model)
    engine.step(batch)
    return [old - new for old, new in zip(before, weights_of(engine.model), strict=True)]


def mean_gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the mean loss, computed at once."""
    loss = functional.cross_entropy(model(inputs), targets)
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


# --- the gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(("size", "shards"), [(1, 1), (1, 8), (5, 8), (8, 8), (13, 3), (16, 5), (7, 1)])
def test_the_gradient_is_the_mean_over_the_batch(alone: World, size: int, shards: int, reduction: str) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), reduction=reduction)
    expected = mean_gradient(engine.model, *random_data(size))
    assert_close(updates(engine, random_batch(alone, size, shards)), expected)


def test_a_mean_for_a_loss_gives_the_same_gradient(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), functional.cross_entropy)
    expected = mean_gradient(engine.model, *random_data(13))
    assert_close(updates(engine, random_batch(alone, 13, 5)), expected)


def test_steps_do_not_add_up(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    for seed in range(3):
        expected = mean_gradient(engine.model, *random_data(9, seed=seed))
        assert_close(updates(engine, random_batch(alone, 9, 4, seed=seed)), expected)


@pytest.mark.parametrize("shards", [1, 3, 6])
def test_tokens_are_counted_one_by_one(alone: World, shards: int) -> None:
    """Shards with very different numbers of tokens, one of them without any: a mean of means would be wrong."""
    tokens = torch.randint(0, 11, (6, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(1)
    for row, length in enumerate([9, 1, 4, 0, 0, 7]):
        targets[row, length:] = -100
    engine = engine_of(alone, seeded(0, Tokens))
    expected = mean_gradient(engine.model, tokens, targets)
    mean = functional.cross_entropy(engine.model(tokens), targets).detach()
    before = weights_of(engine.model)
    result = engine.step(batch_of(alone, tokens, targets, shards))
    assert_close([old - new for old, new in zip(before, weights_of(engine.model), strict=True)], expected)
    assert result.count == 21
    assert result.loss == pytest.approx(float(mean), rel=1e-12)


def test_tied_weights_get_the_gradient_of_both_ends(alone: World) -> None:
    model = seeded(0, Tokens)
    tokens = torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(1))
    engine = engine_of(alone, model)
    expected = mean_gradient(model, tokens, tokens)
    assert_close(updates(engine, batch_of(alone, tokens, tokens, 3)), expected)
    assert model.out.weight is model.embed.weight


def test_inputs_may_be_several(alone: World) -> None:
    class Sum(Perceptron):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return super().forward(first + second)

    inputs, targets = random_data(8)
    plain = updates(engine_of(alone, seeded(0, Perceptron)), batch_of(alone, inputs, targets, 1))
    for several in (Pairs(inputs / 2, inputs / 2), Named(first=inputs / 2, second=inputs / 2)):
        engine = engine_of(alone, seeded(0, Sum))
        assert_close(updates(engine, batch_of(alone, several, targets, 1)), plain)


class Pairs(tuple[torch.Tensor, ...]):
    """A tuple whose slice is one of its tensors' rows."""

    def __new__(cls, *tensors: torch.Tensor) -> "Pairs":
        return super().__new__(cls, tensors)

    def __getitem__(self, rows: Any) -> Any:
        return tuple(tensor[rows] for tensor in self)


class Named(dict[str, torch.Tensor]):
    """The same with names."""

    def __getitem__(self, rows: Any) -> Any:
        return {name: tensor[rows] for name, tensor in self.items()}


# --- what a step tells ------------------------------------------------------------------------------------


def test_the_result_tells_loss_count_rate_and_norm(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    inputs, targets = random_data(13)
    loss = float(functional.cross_entropy(engine.model(inputs), targets).detach())
    norm = float(torch.stack([g.norm() for g in mean_gradient(engine.model, inputs, targets)]).norm())
    result = engine.step(batch_of(alone, inputs, targets, 5))
    assert (result.step, result.count, result.lr, result.skipped, result.stop) == (1, 13, 1.0, False, False)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=1e-12), pytest.approx(norm, rel=1e-12))


def test_steps_are_counted(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    assert [engine.step(random_batch(alone, 4, 2)).step for _ in range(3)] == [1, 2, 3]
    assert engine.steps == 3


def test_the_rate_told_is_the_one_that_was_used(alone: World) -> None:
    engine = engine_of(
        alone,
        seeded(0, Perceptron),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    assert [engine.step(random_batch(alone, 4, 2)).lr for _ in range(3)] == [1.0, 0.5, 0.25]


def test_a_request_to_end_is_told(alone: World) -> None:
    asked: list[bool] = []
    world = World(rank=0, size=1, device=alone.device, stop_requested=lambda: bool(asked))
    engine = engine_of(world, seeded(0, Perceptron))
    first = engine.step(random_batch(world, 4, 2)).stop
    asked.append(True)
    assert (first, engine.step(random_batch(world, 4, 2)).stop) == (False, True)


def test_a_wish_to_save_is_told(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron))
    told = [engine.step(random_batch(alone, 4, 2), save=save).save for save in (False, True, False)]
    assert told == [False, True, False]


# --- clipping ---------------------------------------------------------------------------------------------


def test_a_gradient_longer_than_the_limit_is_shortened_to_it(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), clip_norm=0.05)
    expected = mean_gradient(engine.model, *random_data(13))
    norm = float(torch.stack([g.norm() for g in expected]).norm())
    before = weights_of(engine.model)
    result = engine.step(random_batch(alone, 13, 4))
    found = [old - new for old, new in zip(before, weights_of(engine.model), strict=True)]
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    assert norm > 0.05
    assert_close(found, [g * 0.05 / norm for g in expected], 1e-6)


def test_a_shorter_gradient_is_left_alone(alone: World) -> None:
    plain, clipped = (engine_of(alone, seeded(0, Perceptron), clip_norm=limit) for limit in (None, 1e6))
    found = [updates(engine, random_batch(alone, 13, 4)) for engine in (plain, clipped)]
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))


# --- buffers ----------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_the_mean_over_shards(alone: World) -> None:
    inputs, targets = random_data(12)
    engine = engine_of(alone, seeded(0, Normed))
    shards = [engine.model[0](part).detach() for part in inputs.split(3)]
    mean = torch.stack([shard.mean(0) for shard in shards]).mean(0)
    variance = torch.stack([shard.var(0) for shard in shards]).mean(0)
    engine.step(batch_of(alone, inputs, targets, 4))
    norm = engine.model[1]
    assert_close([norm.running_mean, norm.running_var], [0.1 * mean, 0.9 + 0.1 * variance])


@pytest.mark.parametrize(("size", "shards"), [(12, 4), (3, 1), (14, 7)])
def test_batches_tracked_goes_up_by_one_a_step(alone: World, size: int, shards: int) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    for step in range(1, 4):
        engine.step(random_batch(alone, size, shards))
        assert int(engine.model[1].num_batches_tracked) == step


def test_a_frozen_batch_norm_stays_as_it_is(alone: World) -> None:
    model = seeded(0, Normed)
    model[1].requires_grad_(False)
    before = [buffer.clone() for buffer in model[1].buffers()]
    engine = engine_of(alone, model)
    inputs, targets = random_data(12)
    engine.step(batch_of(alone, inputs, targets, 4))
    assert all(torch.equal(old, new) for old, new in zip(before, model[1].buffers(), strict=True))


def test_shards_without_samples_have_no_part_in_the_mean(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Watching))
    inputs, targets = random_data(5)
    engine.step(batch_of(alone, inputs, targets, 8))
    assert int(engine.model.forwards) == 1
    assert_close([engine.model.last], [inputs.mean(0)])


@pytest.mark.parametrize("switch", [lambda model: model.eval(), lambda model: model.eval().train()])
def test_a_frozen_batch_norm_stays_as_it_is_whatever_happens_between_steps(alone: World, switch: Any) -> None:
    model = seeded(0, Normed)
    model[1].requires_grad_(False)
    before = [buffer.clone() for buffer in model[1].buffers()]
    engine = engine_of(alone, model)
    engine.step(random_batch(alone, 12, 4))
    switch(model)
    engine.step(random_batch(alone, 12, 4))
    assert all(torch.equal(old, new) for old, new in zip(before, model[1].buffers(), strict=True))


@pytest.mark.parametrize("switch", [lambda model: model.eval(), lambda model: model[3].eval()], ids=["all", "part"])
def test_a_step_trains_whatever_mode_it_finds(alone: World, switch: Any) -> None:
    switched, other = (engine_of(alone, seeded(0, Normed)) for _ in range(2))
    for engine in (switched, other):
        engine.step(random_batch(alone, 12, 4))
    switch(switched.model)
    for engine in (switched, other):
        engine.step(random_batch(alone, 12, 4))
    found, expected = switched.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_step_after_an_evaluation_trains(alone: World) -> None:
    evaluated, other = (engine_of(alone, seeded(0, Normed)) for _ in range(2))
    for engine in (evaluated, other):
        engine.step(random_batch(alone, 12, 4))
    evaluated.evaluate([random_batch(alone, 12, 4)])
    for engine in (evaluated, other):
        engine.step(random_batch(alone, 12, 4))
    found, expected = evaluated.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_shards_see_the_statistics_that_the_step_began_with(alone: World) -> None:
    """With a momentum of one the last shard would else decide alone."""
    model = seeded(0, Normed)
    model[1].momentum = 1.0
    inputs, targets = random_data(12)
    means = [model[0](part).detach().mean(0) for part in inputs.split(3)]
    engine_of(alone, model).step(batch_of(alone, inputs, targets, 4))
    assert_close([model[1].running_mean], [torch.stack(means).mean(0)])


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_parameter_without_a_part_in_the_loss_is_refused(alone: World, reduction: str) -> None:
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    engine = engine_of(alone, model, reduction=reduction)
    with pytest.raises(InputError) as refused:
        engine.step(random_batch(alone, 8, 4))
    assert refused.value.value == "1 trained parameters took no part in the loss: idle"
    assert refused.value.do is not None


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("using", [0, 3], ids=["first", "last"])
def test_a_parameter_that_only_one_shard_uses_is_refused(alone: World, using: int, reduction: str) -> None:
    inputs, targets = random_data(8)
    inputs[:, 0] = -1
    inputs[2 * using : 2 * using + 2, 0] = 1
    engine = engine_of(alone, seeded(0, Picky), reduction=reduction)
    with pytest.raises(InputError, match=r"2 trained parameters took no part in the loss.*: sometimes") as refused:
        engine.step(batch_of(alone, inputs, targets, 4))
    assert ("of shard 1, though they did in that of shard 0 before" in refused.value.value) == (using == 0)
    assert f"here shard {1 if using == 0 else 0} gave none" in str(refused.value)


def test_a_frozen_parameter_need_take_no_part(alone: World) -> None:
    model = seeded(0, Perceptron)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2), requires_grad=False))
    engine = engine_of(alone, model)
    engine.step(random_batch(alone, 8, 4))
    assert model.idle.tolist() == [0, 0]


def test_an_optimizer_that_lacks_parameters_is_refused(alone: World) -> None:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(InputError, match="2 trained parameters of the model are not the optimizer's, and 0"):
        Engine(model, optimizer, samestep.cross_entropy, world=alone)


def test_an_optimizer_of_another_model_is_refused(alone: World) -> None:
    model, other = seeded(0, Perceptron), seeded(0, Perceptron)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    with pytest.raises(InputError, match="and 4 of the optimizer's are not the model's"):
        Engine(model, optimizer, samestep.cross_entropy, world=alone)


def test_an_optimizer_may_hold_what_is_frozen(alone: World) -> None:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    Engine(model, optimizer, samestep.cross_entropy, world=alone).step(random_batch(alone, 8, 4))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("data", [torch.ones(4), [torch.ones(4)] * 3, {"inputs": 1, "targets": 2}, None])
def test_a_batch_that_is_no_pair_is_refused(alone: World, data: Any) -> None:
    batch = random_batch(alone, 4, 1)
    part = batch.parts[0]._replace(data=data)
    engine = engine_of(alone, seeded(0, Perceptron))
    with pytest.raises(TypeError, match="must be a pair"):
        engine.step(type(batch)(batch.begin, batch.end, batch.indices, 1, (part,)))


def test_a_loss_that_is_no_loss_is_refused(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Perceptron), lambda outputs, targets: outputs)
    with pytest.raises(TypeError, match="the loss function returned a Tensor of shape"):
        engine.step(random_batch(alone, 4, 1))


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("shard", range(4))
def test_a_step_that_failed_leaves_nothing_to_the_next(alone: World, shard: int, reduction: str) -> None:
    """People catch what a model raises, and go on with the next batch."""
    failed, other = (engine_of(alone, seeded(0, Fragile), reduction=reduction) for _ in range(2))
    inputs, targets = random_data(12)
    inputs[3 * shard] = 1e6
    with pytest.raises(ArithmeticError, match="too large"):
        failed.step(batch_of(alone, inputs, targets, 4))
    for engine in (failed, other):
        engine.step(random_batch(alone, 12, 4, seed=1))
    found, expected = failed.model.state_dict(), other.model.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- random state -----------------------------------------------------------------------------------------


def everything_drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_a_step_leaves_the_generators_as_they_were(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with preserved_generators():
        seed_generators(1)
        expected = everything_drawn()
        seed_generators(1)
        engine.step(random_batch(alone, 12, 4))
        assert everything_drawn() == expected


def test_what_was_drawn_before_a_step_does_not_matter(alone: World) -> None:
    found = []
    for seed in (1, 2):
        engine = engine_of(alone, seeded(0, Normed))
        with preserved_generators():
            seed_generators(seed)
            found.append(updates(engine, random_batch(alone, 12, 4)))
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))


def draws_of(world: World, *, seed: int = 0, steps: int = 1, done: int = 0) -> list[dict[float, float]]:
    """What a model draws in each step, by shard."""
    engine = engine_of(world, seeded(0, Recorder), seed=seed)
    engine.steps, found = done, []
    for _ in range(steps):
        engine.step(random_batch(world, 8, 4))
        found.append(dict(engine.model.drawn))
    return found


def test_a_random_state_is_of_seed_step_and_shard(alone: World) -> None:
    first, second = draws_of(alone, steps=2)
    other = draws_of(alone, seed=1)[0]
    assert len({*first.values(), *second.values(), *other.values()}) == 12


def test_a_random_state_does_not_know_of_a_resumption(alone: World) -> None:
    assert draws_of(alone, done=1) == draws_of(alone, steps=2)[1:]
