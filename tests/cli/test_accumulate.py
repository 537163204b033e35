"""`--accumulate` sets the microbatches that each process computes in a step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import here, weights
from samestep.recipes.recipe_files import read_recipe

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]
ONE_EPOCH = ("--set", "epochs=1")


def test_microbatches_are_logged_and_saved_and_the_batch_stays(tmp_path: Path) -> None:
    arguments = ("--processes", 2, "--accumulate", 4, "--name", "a", *ONE_EPOCH, "batch_size=16")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (16, 8)
    assert here("train", RECIPE, "--name", "b", *ONE_EPOCH, "batch_size=16", "microbatches=8", cwd=tmp_path) == 0
    assert weights(tmp_path / "runs" / "a") == weights(tmp_path / "runs" / "b")


def test_effect_is_printed_with_the_samples_of_a_microbatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--accumulate", 3, "--per-device-batch-size", 4, "--name", "a", *ONE_EPOCH)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (12, 3)
    line = "global batch 12 = 3 microbatches of 4 samples: 3 per step on each of 1 process, saved in the recipe"
    assert line in capsys.readouterr().err.splitlines()


def test_invalid_combinations_are_errors(refused: Refused) -> None:
    assert "--accumulate 0" in refused("train", "digits", "--accumulate", 0)
    auto = refused("train", "digits", "--accumulate", 4, "--processes", "auto")
    assert "--accumulate 4 with --processes auto" in auto.splitlines()[0]
    twice = refused("train", "digits", "--accumulate", 4, "--set", "microbatches=4")
    assert "--accumulate 4 and --set microbatches=4" in twice.splitlines()[0]
    assert "[E_BATCH_SIZE]" in refused("train", "digits", "--accumulate", 100)
