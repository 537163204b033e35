"""`--per-device-batch-size` sets the batch size of a new run, `--accumulate` the parts of a batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import events, here
from samestep.recipes.recipe_files import read_recipe

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]
ONE_EPOCH = ("--set", "epochs=1")


def test_batch_is_saved_in_the_recipe(tmp_path: Path) -> None:
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "--set", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    assert read_recipe(run / "recipe.yaml").batch_size == 12
    assert len(events(run, "step")) == 9


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


def test_parts_of_a_batch_have_the_mean_of_the_whole(tmp_path: Path) -> None:
    """Without batch norm, whose statistics are those of a part."""
    losses = []
    for name, options in (("a", ("--accumulate", 3)), ("b", ())):
        settings = ("--set", "epochs=1", "batch_size=32", "data.options.lines=50", "model.options.dropout=0")
        assert here("train", "tokens", *options, "--name", name, *settings, cwd=tmp_path) == 0
        run = tmp_path / "runs" / name
        assert read_recipe(run / "recipe.yaml").accumulate == (3 if options else 1)
        losses.append([event["loss"] for event in events(run, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_both_options(tmp_path: Path) -> None:
    arguments = ("--accumulate", 3, "--per-device-batch-size", 4, "--name", "a", *ONE_EPOCH)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    recipe = read_recipe(tmp_path / "runs" / "a" / "recipe.yaml")
    assert (recipe.batch_size, recipe.accumulate) == (12, 3)


INVALID = {
    "--per-device-batch-size 32 --processes auto": "E_BATCH_SIZE",
    "--per-device-batch-size 32 --processes abc": "E_BATCH_SIZE",
    "--per-device-batch-size 32 --set batch_size=64": "E_BATCH_SIZE",
    "--per-device-batch-size 0": "E_VALUE",
    "--per-device-batch-size 3 --set microbatches=8": "E_BATCH_SIZE",
    "--per-device-batch-size 3 --processes 9 --set microbatches=8": "E_TOO_MANY_RANKS",
    "--accumulate 0": "E_VALUE",
    "--accumulate 4 --set accumulate=4": "E_BATCH_SIZE",
    "--accumulate 100": "E_BATCH_SIZE",
}


@pytest.mark.parametrize("options", INVALID)
def test_invalid_combinations_are_errors(refused: Refused, options: str) -> None:
    assert f"[{INVALID[options]}]" in refused("train", "digits", *options.split()).splitlines()[0]
