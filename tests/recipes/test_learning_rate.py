"""The learning rate of a recipe follows the batch size if a rule is set; its factor, step by step."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR

from samestep.config import RunOptions, ScheduleConfig
from samestep.distributed.world import World
from samestep.errors import RecipeError
from samestep.recipes.builder import Built, build, schedule_factor
from samestep.recipes.recipe_files import load_recipe

SMALL = ("data.options.lines=50", "model.options.width=16", "batch_size=16", "microbatches=4", "schedule.name=constant")
LINEAR = ("learning_rate.rule=linear", "learning_rate.base_batch_size=8")


def built(world: World, *overrides: str) -> Built:
    return build(load_recipe("tokens", [*SMALL, *overrides]), RunOptions(workers=0), world)


def rate_of_steps(made: Built, steps: int) -> list[float]:
    batches = iter(made.train)
    return [made.driver.step(next(batches)).lr for _ in range(steps)]


def test_the_rate_is_scaled_before_the_schedule_and_told(alone: World) -> None:
    made = built(alone, "optimizer.options.lr=0.01", "schedule.warmup_epochs=1", *LINEAR)
    assert made.notes == ("learning rate 0.02 = 0.01 x 16/8 (linear)",)
    assert len(made.train) == 3
    assert rate_of_steps(made, 3) == pytest.approx([0.02 / 3, 0.02 * 2 / 3, 0.02])


def test_an_optimizers_own_rate_is_scaled_too(alone: World) -> None:
    made = built(alone, "optimizer.options={}", "schedule.warmup_epochs=0", *LINEAR)
    assert made.notes == ("learning rate 0.002 = 0.001 x 16/8 (linear)",)
    assert rate_of_steps(made, 1) == [0.002]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate.rule=linear", "learning_rate.rule is linear and learning_rate.base_batch_size is None"),
        ("learning_rate.base_batch_size=256", "learning_rate.rule is fixed and learning_rate.base_batch_size is 256"),
        ("learning_rate={rule: sqrt, base_batch_size: 0}", "base_batch_size is 0"),
        ("learning_rate.rule=quadratic", '"quadratic"'),
        ("learning_rate.base=256", "unknown key learning_rate.base"),
        ("learning_rate=0.1", "learning_rate is 0.1"),
    ],
)
def test_invalid_values_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("digits", [override])
    assert message in str(error.value)
    assert error.value.expected
    assert error.value.fix


# --- factor of a schedule ---


STEPS, EPOCHS = 10, 6
FALLING = STEPS * EPOCHS - 1


def by_torch(kind: type[LRScheduler], **options: float) -> list[float]:
    """The factors of one of torch's schedulers, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, factors = kind(optimizer, **options), []  # type: ignore[arg-type]
    for _ in range(STEPS * EPOCHS):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return factors


def factors(schedule: ScheduleConfig) -> list[float]:
    factor = schedule_factor(schedule, STEPS, EPOCHS)
    return [factor(step) for step in range(STEPS * EPOCHS)]


@pytest.mark.parametrize("final", [0.0, 0.25, 1.0])
def test_linear_is_torchs(final: float) -> None:
    theirs = by_torch(LinearLR, start_factor=1.0, end_factor=final, total_iters=FALLING)
    assert factors(ScheduleConfig(name="linear", final=final)) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_cosine_is_torchs(final: float) -> None:
    theirs = by_torch(CosineAnnealingLR, T_max=FALLING, eta_min=final)
    assert factors(ScheduleConfig(name="cosine", final=final)) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(("epochs", "gamma"), [(2, 0.1), (1, 0.5), (0.5, 0.9), (100, 0.1)])
def test_step_is_torchs(epochs: float, gamma: float) -> None:
    theirs = by_torch(StepLR, step_size=round(epochs * STEPS), gamma=gamma)
    assert factors(ScheduleConfig(name="step", step_epochs=epochs, gamma=gamma)) == pytest.approx(theirs)


def test_warm_up_rises_in_equal_parts_to_one() -> None:
    factor = schedule_factor(ScheduleConfig(warmup_epochs=0.5), steps_per_epoch=10, epochs=3)
    assert [factor(step) for step in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_peak_comes_after_the_warm_up_and_the_end_at_the_last_step(name: str) -> None:
    schedule = ScheduleConfig(name=name, warmup_epochs=1, final=0.1)  # type: ignore[arg-type]
    factor = schedule_factor(schedule, steps_per_epoch=10, epochs=3)
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == factor(10) == 1.0
    middle = (10 + 29) / 2
    assert factor(19) + factor(20) == pytest.approx(2 * (0.1 + 0.9 / 2)), f"symmetric about {middle}"
    assert factor(29) == pytest.approx(0.1)
    assert factor(30) == pytest.approx(0.1), "called once more after the last step"
    fallen = {"cosine": 0.5 * (1 + math.cos(math.pi * 5 / 19)), "linear": 1 - 5 / 19}
    assert factor(15) == pytest.approx(0.1 + 0.9 * fallen[name])


@given(
    name=st.sampled_from(["cosine", "linear", "step"]),
    steps=st.integers(1, 50),
    epochs=st.integers(1, 20),
    warmup=st.floats(0, 30),
    final=st.floats(0, 1),
)
def test_factor_stays_between_its_ends_and_never_rises_after_the_warm_up(
    name: str, steps: int, epochs: int, warmup: float, final: float
) -> None:
    schedule = ScheduleConfig(name=name, warmup_epochs=warmup, final=final, step_epochs=3)  # type: ignore[arg-type]
    factor = schedule_factor(schedule, steps, epochs)
    values = [factor(step) for step in range(steps * epochs)]
    assert all(0 < value <= 1 or (value == 0 and final == 0) or value == pytest.approx(final) for value in values)
    after = values[round(warmup * steps) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
