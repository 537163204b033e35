"""The learning rate of a recipe follows the batch size if a rule is set."""

import pytest

from samestep import World
from samestep.config import LearningRateConfig, RunOptions
from samestep.errors import RecipeError
from samestep.recipes.builder import Built, build
from samestep.recipes.recipe_files import load_recipe, recipe_data

SMALL = ("data.options.lines=50", "model.options.width=16", "batch_size=16", "microbatches=4", "schedule.name=constant")
LINEAR = ("learning_rate.rule=linear", "learning_rate.base_batch_size=8")


def built(world: World, *overrides: str) -> Built:
    return build(load_recipe("tokens", [*SMALL, *overrides]), RunOptions(workers=0), world)


def rate_of_steps(made: Built, steps: int) -> list[float]:
    batches = iter(made.train)
    return [made.engine.step(next(batches)).lr for _ in range(steps)]


def test_the_default_is_fixed_and_says_nothing(alone: World) -> None:
    made = built(alone, "optimizer.options.lr=0.01", "schedule.warmup_epochs=0")
    assert made.notes == ()
    assert rate_of_steps(made, 2) == [0.01, 0.01]
    assert recipe_data(load_recipe("tokens"))["learning_rate"] == {"rule": "fixed", "base_batch_size": None}


def test_the_rate_is_scaled_before_the_schedule_and_told(alone: World) -> None:
    made = built(alone, "optimizer.options.lr=0.01", "schedule.warmup_epochs=1", *LINEAR)
    assert made.notes == ("learning rate 0.02 = 0.01 x 16/8 (linear)",)
    assert len(made.train) == 3
    assert rate_of_steps(made, 3) == pytest.approx([0.02 / 3, 0.02 * 2 / 3, 0.02])


def test_an_optimizers_own_rate_is_scaled_too(alone: World) -> None:
    made = built(alone, "optimizer.options={}", "schedule.warmup_epochs=0", *LINEAR)
    assert made.notes == ("learning rate 0.002 = 0.001 x 16/8 (linear)",)
    assert rate_of_steps(made, 1) == [0.002]


def test_the_rule_is_part_of_the_recipe() -> None:
    recipe = load_recipe("digits", ["learning_rate={rule: sqrt, base_batch_size: 256}"])
    assert recipe.learning_rate == LearningRateConfig(rule="sqrt", base_batch_size=256)


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


def test_a_number_for_a_rule_is_shown_where_it_belongs() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("digits", ["learning_rate=0.1"])
    assert error.value.fix == "did you mean optimizer.options.lr? --set optimizer.options.lr=0.1"
