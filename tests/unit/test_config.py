"""A recipe that cannot be meant is refused when it is made, with the rule and a way out."""

import dataclasses
import math
from typing import Any

import pytest

from samestep.config import ModelPart, Part, Recipe, RunOptions, SchedulePart, StepRules, default_workers
from samestep.errors import InputError, RecipeError


def recipe(**changes: Any) -> Recipe:
    given: dict[str, Any] = {
        "data": Part(name="digits"),
        "model": ModelPart(name="resnet18"),
        "optimizer": Part(name="sgd", options={"lr": 0.1}),
        "batch_size": 64,
        "epochs": 2,
    }
    return Recipe(**{**given, **changes})


REFUSED = [
    (lambda: StepRules(seed=-1), "step.seed is -1", "0 <= seed < 2**64", "set step.seed: 0"),
    (lambda: StepRules(threads=0), "step.threads is 0", "threads >= 1", "set step.threads: 1"),
    (lambda: StepRules(clip_norm=0.0), "step.clip_norm is 0.0", "clip_norm > 0, or null", "set step.clip_norm: 1.0"),
    (
        lambda: StepRules(clip_norm=math.nan),
        "step.clip_norm is nan",
        "clip_norm > 0, or null",
        "set step.clip_norm: 1.0",
    ),
    (
        lambda: SchedulePart(warmup_epochs=-0.5),
        "schedule.warmup_epochs is -0.5",
        "schedule.warmup_epochs >= 0",
        "set schedule.warmup_epochs: 0",
    ),
    (
        lambda: SchedulePart(final=1.5),
        "schedule.final is 1.5",
        "0 <= schedule.final <= 1 (a fraction of the first rate)",
        "set schedule.final: 0.01",
    ),
    (lambda: recipe(epochs=0), "epochs is 0", "epochs >= 1", "set epochs: 1"),
    (lambda: recipe(shards=0), "shards is 0", "shards >= 1", "set shards: 8"),
    (
        lambda: recipe(batch_size=4),
        "batch_size is 4 but there are 8 shards, so some would be empty",
        "batch_size >= shards (batch_size counts the samples of all ranks together)",
        "set batch_size: 8 or more, or shards: 4 or fewer",
    ),
    (lambda: RunOptions(keep=0), "keep is 0", "at least 1 checkpoint stays", "--keep 1"),
    (lambda: RunOptions(workers=-1), "workers is -1", "workers >= 0", "--workers 0"),
    (lambda: RunOptions(prefetch=0), "prefetch is 0", "at least 1 shard", "--prefetch 2"),
    (lambda: RunOptions(checkpoint_every=0), "checkpoint_every is 0", "at least 1 step", "--checkpoint-every 100"),
    *(
        (
            lambda seconds=seconds: RunOptions(lose_at_most=seconds),
            f"lose_at_most is {seconds}",
            "a number of seconds above 0",
            "--lose-at-most 30s",
        )
        for seconds in (0.0, -1.0, math.inf, math.nan)
    ),
]


@pytest.mark.parametrize(("make", "value", "rule", "do"), REFUSED)
def test_refusal_gives_value_rule_and_way_out(make: Any, value: str, rule: str, do: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make()
    assert (refused.value.value, refused.value.rule, refused.value.do) == (value, rule, do)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepRules(seed=0, threads=1, clip_norm=1e-9),
        lambda: StepRules(seed=2**64 - 1, clip_norm=math.inf),
        lambda: SchedulePart(warmup_epochs=0, final=0),
        lambda: SchedulePart(final=1),
        lambda: recipe(batch_size=8, shards=8, epochs=1),
        lambda: recipe(batch_size=1, shards=1),
        lambda: RunOptions(workers=0, prefetch=1, checkpoint_every=1, lose_at_most=1e-9, keep=1),
    ],
)
def test_the_edge_of_a_rule_is_inside_it(make: Any) -> None:
    make()


@pytest.mark.parametrize(
    "change",
    [{"reduction": "exakt"}, {"batch_norm": "global"}, {"non_finite": "ignore"}, {"precision": "fp8"}],
)
def test_words_that_mean_nothing_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        StepRules(**change)


def test_a_seed_that_no_random_state_can_be_made_of_is_refused() -> None:
    with pytest.raises(InputError):
        StepRules(seed=2**64)


@pytest.mark.parametrize("part", [StepRules(), recipe(), Part(name="digits"), SchedulePart(), RunOptions()])
def test_what_a_recipe_says_does_not_change(part: Any) -> None:
    field = dataclasses.fields(part)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, field, None)


def test_recipe_holds_the_default_step_rules() -> None:
    assert recipe().step == StepRules()
    assert StepRules().reduction == "exact"


@pytest.mark.parametrize(("cores", "processes", "workers"), [(1, 1, 0), (2, 2, 0), (8, 2, 3), (64, 1, 8), (4, 8, 0)])
def test_workers_are_what_cores_allow(cores: int, processes: int, workers: int) -> None:
    assert default_workers(cores, processes) == workers
