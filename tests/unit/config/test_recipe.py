"""Validation of configuration classes on construction, and selection of names by shell patterns."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from samestep.config import (
    EmaConfig,
    LearningRateConfig,
    ModelConfig,
    NamedConfig,
    OptimizerConfig,
    Recipe,
    RecipeStep,
    RunOptions,
    ScheduleConfig,
    default_workers,
)
from samestep.config.validation import match_patterns
from samestep.errors import InputError, RecipeError


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "data": NamedConfig(name="digits"),
        "model": ModelConfig(name="resnet18"),
        "optimizer": NamedConfig(name="sgd", options={"lr": 0.1}),
        "batch_size": 64,
        "epochs": 2,
    }
    return Recipe(**{**values, **changes})


def optimizer(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(name="sgd", **changes)


OUT_OF_RANGE: list[tuple[Callable[..., Any], str, Any]] = [
    (RecipeStep, "step.seed", -1),
    (RecipeStep, "step.seed", 2**64),
    (RecipeStep, "step.threads", "2"),
    (RecipeStep, "step.clip_norm", math.nan),
    (ScheduleConfig, "schedule.warmup_epochs", -0.5),
    (ScheduleConfig, "schedule.step_epochs", math.inf),
    (ScheduleConfig, "schedule.final", 1.5),
    (ScheduleConfig, "schedule.gamma", 0),
    (optimizer, "optimizer.layer_decay", 1.5),
    (EmaConfig, "ema.decay", 1.0),
    (recipe, "batch_size", 0),
    (recipe, "epochs", 0),
    (recipe, "microbatches", 0),
    (RunOptions, "--workers", -1),
    (RunOptions, "--checkpoint-every", 0),
    (RunOptions, "--keep", 0),
]


@pytest.mark.parametrize(("make", "key", "value"), OUT_OF_RANGE)
def test_value_out_of_range_is_an_error_with_key_and_value(make: Callable[..., Any], key: str, value: Any) -> None:
    name = key.rpartition(".")[2].strip("-").replace("-", "_")
    with pytest.raises(RecipeError) as caught:
        make(**{name: value})
    assert (caught.value.code, caught.value.value) == ("E_VALUE", f"{key} is {value!r}")
    assert key in str(caught.value.fix)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecipeStep(seed=0, threads=1, clip_norm=1e-9),
        lambda: RecipeStep(seed=2**64 - 1, clip_norm=math.inf),
        lambda: ScheduleConfig(warmup_epochs=0, final=0),
        lambda: ScheduleConfig(final=1),
        lambda: recipe(batch_size=8, microbatches=8, epochs=1),
        lambda: recipe(batch_size=1, microbatches=1),
        lambda: RunOptions(workers=0, checkpoint_every=1, keep=1),
    ],
)
def test_bounds_belong_to_the_range(make: Any) -> None:
    make()


@pytest.mark.parametrize(
    ("make", "field"),
    [(RecipeStep, "reduction"), (ScheduleConfig, "name"), (LearningRateConfig, "rule"), (RunOptions, "device")],
)
def test_unknown_choice_is_an_error_with_the_choices(make: Callable[..., Any], field: str) -> None:
    with pytest.raises(RecipeError, match=f"{field} is 'other'") as caught:
        make(**{field: "other"})
    assert getattr(make(), field) in str(caught.value.expected)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"lr": math.nan}, "optimizer.options.lr is nan"),
        ({"lr": 0.1, "weight_decay": math.inf}, "optimizer.options.weight_decay is inf"),
        ({"betas": [0.9, -math.inf]}, "optimizer.options.betas is [0.9, -inf]"),
        ({"other": math.nan}, "optimizer.options.other is nan"),
    ],
)
def test_options_of_an_optimizer_are_finite(options: dict[str, Any], value: str) -> None:
    with pytest.raises(RecipeError) as caught:
        optimizer(options=options)
    assert (caught.value.value, caught.value.code) == (value, "E_VALUE")
    assert optimizer(options={"lr": 0.1, "betas": [0.9, 1], "name": "inf"}).options["lr"] == 0.1


def test_more_microbatches_than_samples_is_an_error() -> None:
    with pytest.raises(RecipeError, match="batch_size is 4 but there are 8 microbatches") as caught:
        recipe(batch_size=4, microbatches=8)
    assert caught.value.code == "E_BATCH_SIZE"
    assert caught.value.fix == "set batch_size: 8 or more, or microbatches: 4 or fewer"


@pytest.mark.parametrize(
    ("changes", "number"), [({"batch_size": 16}, 8), ({"batch_size": 5}, 5), ({"batch_size": 16, "microbatches": 4}, 4)]
)
def test_auto_is_a_function_of_the_batch_size(changes: dict[str, Any], number: int) -> None:
    resolved = recipe(**changes).with_microbatches()
    assert resolved.microbatch_count == number
    assert dataclasses.replace(resolved, microbatches="auto") == dataclasses.replace(
        recipe(**changes), microbatches="auto"
    )


@pytest.mark.parametrize("name", ["f1", "train_loss"])
def test_best_checkpoint_is_selected_by_a_result_of_the_evaluation(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(metrics=("accuracy", "top5"), best_by=name)
    assert caught.value.code == "E_METRIC"
    for valid in (None, "loss", "loss_tokens", "top5"):
        assert recipe(metrics=("accuracy", "top5"), best_by=valid).best_by == valid


@pytest.mark.parametrize(("cores", "processes", "workers"), [(1, 1, 0), (2, 2, 0), (8, 2, 3), (64, 1, 8), (4, 8, 0)])
def test_default_workers_depend_on_cores_per_process(cores: int, processes: int, workers: int) -> None:
    assert default_workers(cores, processes) == workers


# --- shell patterns ---


NAMES = ["stem.weight", "blocks.0.weight", "blocks.1.weight", "head.bias"]


def match(patterns: list[str]) -> list[str]:
    return match_patterns(NAMES, patterns, key="model.freeze", kind="parameter", example="layer1.*")


def test_pattern_without_a_match_is_an_error_with_similar_names() -> None:
    with pytest.raises(InputError, match=r"model.freeze: 'block.0.weight' matches no parameter") as caught:
        match(["head.*", "block.0.weight"])
    assert caught.value.code == "E_PATTERN"
    assert "blocks.0.weight" in str(caught.value)
