"""Steps with a non-finite loss or gradient: reports, and unchanged state."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Root, seeded
from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.engine.engine import Engine
from samestep.errors import NonFiniteError

World = samestep.World


def engine_of(world: World, model: nn.Module, loss: Any = samestep.cross_entropy, **options: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return Engine(
        model,
        optimizer,
        loss,
        world=world,
        scheduler=scheduler,
        scheduler_interval="step",
        config=StepConfig(**options),
    )


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return copies of weights, buffers and the tensors of the optimizer."""
    state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    for index, slots in engine.optimizer.state_dict()["state"].items():
        state |= {f"{index}/{slot}": tensor.clone() for slot, tensor in slots.items()}
    return state


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def bad_loss_batch(world: World, rows: list[int], value: float = math.nan) -> GlobalBatch:
    """Return 14 samples in 7 microbatches, with inputs equal to `value` in some rows."""
    inputs, targets = random_data(14)
    inputs[rows] = value
    return batch_of(world, inputs, targets, 7)


def bad_gradient_batch(world: World, rows: list[int]) -> GlobalBatch:
    """Return a batch with a finite loss; the gradients of some rows are not finite."""
    inputs, targets = random_data(14)
    inputs[rows, 0] = 0
    return batch_of(world, inputs, targets, 7)


def test_bad_loss_is_reported_with_microbatch_and_samples(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with pytest.raises(NonFiniteError) as error:
        engine.step(bad_loss_batch(alone, [5]))
    assert error.value.value == "step 1: the loss of microbatch 2 is not finite (loss nan; samples 104, 105)"
    assert error.value.code == "E_NONFINITE"
    assert "non_finite: skip" in (error.value.fix or "")


def test_all_bad_losses_are_reported(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    engine.step(random_batch(alone, 14, 7))
    with pytest.raises(NonFiniteError, match=r"step 2: the loss of microbatches 1, 4 .* samples 102, 103, 108, 109\)"):
        engine.step(bad_loss_batch(alone, [2, 9]))


def test_long_list_of_samples_is_shortened(alone: World) -> None:
    with pytest.raises(NonFiniteError, match=r"samples 100, 101, 102, 103, 104, 105, 106, 107 and 6 more\)"):
        engine_of(alone, seeded(0, Normed)).step(bad_loss_batch(alone, list(range(14))))


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_bad_gradient_is_reported_with_parameter_microbatch_and_samples(alone: World, reduction: str) -> None:
    engine = engine_of(alone, seeded(0, Root), reduction=reduction)
    with pytest.raises(NonFiniteError) as error:
        engine.step(bad_gradient_batch(alone, [6]))
    assert error.value.value == (
        "step 1: the gradient of parameter scale is not finite, from microbatch 3 (samples 106, 107)"
    )


def test_overflow_of_the_norm_is_reported(alone: World) -> None:
    model = nn.Linear(100, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(alone, model, lambda outputs, targets: samestep.Loss(outputs.sum(), len(targets)))
    inputs = torch.full((4, 100), 1e38)
    with pytest.raises(
        NonFiniteError, match="the whole model is not finite, although each microbatch's gradient is finite"
    ):
        engine.step(batch_of(alone, inputs, torch.zeros(4), 2))


BAD = {
    "loss": lambda world: (seeded(0, Normed), bad_loss_batch(world, [5]), random_batch(world, 14, 7)),
    "infinite loss": lambda world: (
        seeded(0, Normed),
        bad_loss_batch(world, [5], math.inf),
        random_batch(world, 14, 7),
    ),
    "gradient": lambda world: (seeded(0, Root), bad_gradient_batch(world, [6]), bad_gradient_batch(world, [])),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("after", [0, 2], ids=["first step", "later step"])
def test_stop_changes_no_state(alone: World, kind: str, after: int) -> None:
    model, bad, good = BAD[kind](alone)
    engine = engine_of(alone, model)
    for _ in range(after):
        engine.step(good)
    before, generator = state_of(engine), torch.get_rng_state()
    with pytest.raises(NonFiniteError):
        engine.step(bad)
    assert_equal(state_of(engine), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert engine.steps == after


@pytest.mark.parametrize("kind", BAD)
def test_skip_changes_only_step_count_and_learning_rate(alone: World, kind: str) -> None:
    model, bad, good = BAD[kind](alone)
    engine = engine_of(alone, model, non_finite="skip")
    engine.step(good)
    before = state_of(engine)
    result = engine.step(bad)
    assert_equal(state_of(engine), before)
    assert (result.skipped, result.step, result.lr, engine.steps) == (True, 2, 0.05, 2)
    after = engine.step(good)
    assert (after.skipped, after.step, after.lr) == (False, 3, 0.025)
    assert math.isfinite(after.loss)


def test_skipped_step_does_not_affect_the_next_step(alone: World) -> None:
    skipping, other = (engine_of(alone, seeded(0, Normed), non_finite="skip") for _ in range(2))
    other.number = 0  # the random numbers of the first engine
    for engine in (skipping, other):
        engine.step(random_batch(alone, 14, 7))
    skipping.step(bad_loss_batch(alone, [5]))
    assert other.scheduler is not None
    other.steps += 1
    other.scheduler.step()
    for engine in (skipping, other):
        engine.step(random_batch(alone, 14, 7, seed=1))
    assert_equal(state_of(skipping), state_of(other))


def test_skipping_the_first_step_gives_no_warning(alone: World) -> None:
    """Torch warns of a scheduler that steps before its optimizer; here this is intended."""
    engine = engine_of(alone, seeded(0, Normed), non_finite="skip")
    assert engine.step(bad_loss_batch(alone, [5])).skipped
    assert engine.step(random_batch(alone, 14, 7)).lr == 0.05


@pytest.mark.parametrize(
    ("values", "text"),
    [([math.nan, 1.0], "nan"), ([math.inf, 1.0], "inf"), ([-math.inf, 1.0], "-inf"), ([math.inf, -math.inf], "nan")],
)
def test_result_of_a_skipped_step_has_the_non_finite_loss(alone: World, values: list[float], text: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        model,
        optimizer,
        lambda outputs, targets: samestep.Loss((outputs * 0 + targets).sum(), len(targets)),
        world=alone,
        config=StepConfig(non_finite="skip"),
    )
    targets = torch.tensor([*values, 1.0, 1.0]).view(4, 1)
    result = engine.step(batch_of(alone, torch.ones(4, 1), targets, 4))
    assert result.skipped
    assert str(result.loss) == text


def test_clipping_does_not_hide_a_non_finite_gradient(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Root), clip_norm=1.0, non_finite="skip")
    engine.step(bad_gradient_batch(alone, []))
    before = state_of(engine)
    assert engine.step(bad_gradient_batch(alone, [6])).skipped
    assert_equal(state_of(engine), before)
