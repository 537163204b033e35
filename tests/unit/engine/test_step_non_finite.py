"""A step whose loss or gradient is not finite changes nothing, and tells where it comes from."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from batches import batch_of, random_batch, random_data
from models import Normed, Root, seeded
from samestep.config import StepRules
from samestep.data.batch import GlobalBatch
from samestep.engine.step import Engine
from samestep.errors import NonFiniteError

World = samestep.World


def engine_of(world: World, model: nn.Module, loss: Any = samestep.cross_entropy, **rules: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return Engine(model, optimizer, loss, world=world, scheduler=scheduler, rules=StepRules(**rules))


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of weights, buffers and the optimizer's tensors."""
    state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    for index, slots in engine.optimizer.state_dict()["state"].items():
        state |= {f"{index}/{slot}": tensor.clone() for slot, tensor in slots.items()}
    return state


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def poisoned(world: World, rows: list[int], value: float = math.nan) -> GlobalBatch:
    """A batch of 14 samples in 7 shards, some rows of which hold `value`."""
    inputs, targets = random_data(14)
    inputs[rows] = value
    return batch_of(world, inputs, targets, 7)


def rooted(world: World, rows: list[int]) -> GlobalBatch:
    """A batch whose loss is finite and whose gradient is not where a row has a zero."""
    inputs, targets = random_data(14)
    inputs[rows, 0] = 0
    return batch_of(world, inputs, targets, 7)


def test_a_bad_loss_names_shard_and_samples(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with pytest.raises(NonFiniteError) as stopped:
        engine.step(poisoned(alone, [5]))
    assert stopped.value.value == "step 1: the loss of shard 2 is not finite (loss nan; samples 104, 105)"
    assert stopped.value.rule == "non_finite: stop ends the run before the weights change"
    assert "non_finite: skip" in (stopped.value.do or "")


def test_several_bad_losses_are_all_named(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 14, 7))
    with pytest.raises(NonFiniteError, match=r"step 2: the loss of shards 1, 4 .* samples 102, 103, 108, 109\)"):
        engine.step(poisoned(alone, [2, 9]))


def test_a_long_list_of_samples_is_cut(alone: World) -> None:
    with pytest.raises(NonFiniteError, match=r"samples 100, 101, 102, 103, 104, 105, 106, 107 and 6 more\)"):
        engine_of(alone, seeded(0, Normed)).step(poisoned(alone, list(range(14))))


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_bad_gradient_names_parameter_shard_and_samples(alone: World, reduction: str) -> None:
    engine = engine_of(alone, seeded(0, Root), reduction=reduction)
    with pytest.raises(NonFiniteError) as stopped:
        engine.step(rooted(alone, [6]))
    assert stopped.value.value == (
        "step 1: the gradient of parameter scale is not finite, from shard 3 (samples 106, 107)"
    )


def test_gradients_whose_norm_alone_overflows_are_told_apart(alone: World) -> None:
    model = nn.Linear(100, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(alone, model, lambda outputs, targets: samestep.Loss(outputs.sum(), len(targets)))
    inputs = torch.full((4, 100), 1e38)
    with pytest.raises(NonFiniteError, match="the whole model is not finite, though every shard's is finite alone"):
        engine.step(batch_of(alone, inputs, torch.zeros(4), 2))


BAD = {
    "loss": lambda world: (seeded(0, Normed), poisoned(world, [5]), random_batch(world, 14, 7)),
    "infinite loss": lambda world: (seeded(0, Normed), poisoned(world, [5], math.inf), random_batch(world, 14, 7)),
    "gradient": lambda world: (seeded(0, Root), rooted(world, [6]), rooted(world, [])),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("after", [0, 2], ids=["first step", "later"])
def test_stopping_changes_nothing(alone: World, kind: str, after: int) -> None:
    model, bad, good = BAD[kind](alone)
    engine = engine_of(alone, model)
    for _ in range(after):
        engine.step(good)
    before, generator = everything(engine), torch.get_rng_state()
    with pytest.raises(NonFiniteError):
        engine.step(bad)
    assert_same(everything(engine), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert engine.steps == after


@pytest.mark.parametrize("kind", BAD)
def test_skipping_changes_nothing_but_the_count_and_the_rate(alone: World, kind: str) -> None:
    model, bad, good = BAD[kind](alone)
    engine = engine_of(alone, model, non_finite="skip")
    engine.step(good)
    before = everything(engine)
    result = engine.step(bad)
    assert_same(everything(engine), before)
    assert (result.skipped, result.step, result.lr, engine.steps) == (True, 2, 0.05, 2)
    after = engine.step(good)
    assert (after.skipped, after.step, after.lr) == (False, 3, 0.025)
    assert math.isfinite(after.loss)


def test_a_step_after_a_skipped_one_is_as_if_there_had_been_none(alone: World) -> None:
    skipping, other = (engine_of(alone, seeded(0, Normed), non_finite="skip") for _ in range(2))
    for engine in (skipping, other):
        engine.step(random_batch(alone, 14, 7))
    skipping.step(poisoned(alone, [5]))
    assert other.scheduler is not None
    other.steps += 1
    other.scheduler.step()
    for engine in (skipping, other):
        engine.step(random_batch(alone, 14, 7, seed=1))
    assert_same(everything(skipping), everything(other))


def test_skipping_the_first_step_warns_of_nothing(alone: World) -> None:
    """torch warns of a scheduler that steps before its optimizer: here that is meant."""
    engine = engine_of(alone, seeded(0, Normed), non_finite="skip")
    assert engine.step(poisoned(alone, [5])).skipped
    assert engine.step(random_batch(alone, 14, 7)).lr == 0.05


@pytest.mark.parametrize(
    ("values", "told"),
    [([math.nan, 1.0], "nan"), ([math.inf, 1.0], "inf"), ([-math.inf, 1.0], "-inf"), ([math.inf, -math.inf], "nan")],
)
def test_the_loss_of_a_skipped_step_is_told_as_it_is(alone: World, values: list[float], told: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        model,
        optimizer,
        lambda outputs, targets: samestep.Loss((outputs * 0 + targets).sum(), len(targets)),
        world=alone,
        rules=StepRules(non_finite="skip"),
    )
    targets = torch.tensor([*values, 1.0, 1.0]).view(4, 1)
    result = engine.step(batch_of(alone, torch.ones(4, 1), targets, 4))
    assert result.skipped
    assert str(result.loss) == told


def test_clipping_does_not_hide_a_gradient_that_is_not_finite(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Root), clip_norm=1.0, non_finite="skip")
    engine.step(rooted(alone, []))
    before = everything(engine)
    assert engine.step(rooted(alone, [6])).skipped
    assert_same(everything(engine), before)
