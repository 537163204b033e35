"""`--per-device-batch-size` sets the global batch size of a new run, `--accumulate` the microbatches of a process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import events, here, weights
from samestep.errors import EXIT_INPUT
from samestep.recipes.recipe_files import read_recipe

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]
ONE_EPOCH = ("--set", "epochs=1")


def test_global_batch_is_saved_in_the_recipe(tmp_path: Path) -> None:
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "--set", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    recipe = read_recipe(run / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (12, 2)
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == EXIT_INPUT
    settings = ("epochs=1", "batch_size=12", "microbatches=2")
    assert here("train", RECIPE, "--name", "b", "--set", *settings, cwd=tmp_path) == 0
    assert weights(tmp_path / "runs" / "b") == weights(run)
    assert len(events(run, "step")) == 9


@pytest.mark.slow
def test_microbatches_can_be_set_too(tmp_path: Path) -> None:
    arguments = ("--per-device-batch-size", 16, "--name", "a", "--set", "epochs=1", "microbatches=8")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (16, 8)


def test_learning_rate_scales_with_the_global_batch(tmp_path: Path) -> None:
    rule = "learning_rate={rule: linear, base_batch_size: 6}"
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "--set", "epochs=1", rule)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    note, *_ = events(tmp_path / "runs" / "a", "note")
    assert note["text"] == "learning rate 0.02 = 0.01 x 12/6 (linear)"


def test_recipe_has_no_per_device_batch_size(refused: Refused, tmp_path: Path) -> None:
    err = refused("train", "digits", "--set", "per_device_batch_size=32")
    assert "unknown key per_device_batch_size" in err.splitlines()[0]
    assert "did you mean --per-device-batch-size?" in err
    text = RECIPE.read_text(encoding="utf-8").replace("batch_size: 8", "per_device_batch_size: 8")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert "mine.yaml: unknown key per_device_batch_size" in refused("train", "mine.yaml").splitlines()[0]


def test_microbatches_are_logged_and_saved_and_the_batch_stays(tmp_path: Path) -> None:
    arguments = ("--processes", 2, "--accumulate", 4, "--name", "a", *ONE_EPOCH, "batch_size=16")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (16, 8)
    assert here("train", RECIPE, "--name", "b", *ONE_EPOCH, "batch_size=16", "microbatches=8", cwd=tmp_path) == 0
    assert weights(tmp_path / "runs" / "a") == weights(tmp_path / "runs" / "b")


def test_both_options(tmp_path: Path) -> None:
    arguments = ("--accumulate", 3, "--per-device-batch-size", 4, "--name", "a", *ONE_EPOCH)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.microbatches) == (12, 3)


INVALID = {
    "--per-device-batch-size 32 --processes auto": "E_BATCH_SIZE",
    "--per-device-batch-size 32 --processes abc": "E_BATCH_SIZE",
    "--per-device-batch-size 32 --set batch_size=64": "E_BATCH_SIZE",
    "--per-device-batch-size 0": "E_VALUE",
    "--per-device-batch-size 3 --set microbatches=8": "E_BATCH_SIZE",
    "--per-device-batch-size 3 --processes 9 --set microbatches=8": "E_TOO_MANY_RANKS",
    "--accumulate 0": "E_VALUE",
    "--accumulate 4 --processes auto": "E_BATCH_SIZE",
    "--accumulate 4 --set microbatches=4": "E_BATCH_SIZE",
    "--accumulate 100": "E_BATCH_SIZE",
}


@pytest.mark.parametrize("options", INVALID)
def test_invalid_combinations_are_errors(refused: Refused, options: str) -> None:
    assert f"[{INVALID[options]}]" in refused("train", "digits", *options.split()).splitlines()[0]
