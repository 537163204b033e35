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


def test_global_batch_is_logged_and_saved_in_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "--set", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    line = "global batch 12 = 6 per device x 2 processes, in 2 microbatches, saved in the recipe"
    assert capsys.readouterr().err.splitlines()[0] == line
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


def test_one_process_counts_as_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--per-device-batch-size", 51, "--name", "a", "--set", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    assert "global batch 51 = 51 per device x 1 process," in capsys.readouterr().err


def test_json_is_the_only_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--per-device-batch-size", 51, "--name", "a", "--json", "--set", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    output = capsys.readouterr()
    assert (output.err, output.out.count("\n")) == ("", 1)


def test_learning_rate_scales_with_the_global_batch(tmp_path: Path) -> None:
    rule = "learning_rate={rule: linear, base_batch_size: 6}"
    arguments = ("--processes", 2, "--per-device-batch-size", 6, "--name", "a", "--set", "epochs=1", rule)
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    note, *_ = events(tmp_path / "runs" / "a", "note")
    assert note["text"] == "learning rate 0.02 = 0.01 x 12/6 (linear)"


def test_number_of_processes_is_required(refused: Refused) -> None:
    err = refused("train", "digits", "--per-device-batch-size", 32, "--processes", "auto")
    assert "--per-device-batch-size 32 with --processes auto" in err.splitlines()[0]
    assert "--set batch_size=64" in err
    assert "--processes abc" in refused("train", "digits", "--per-device-batch-size", 32, "--processes", "abc")


def test_two_options_for_the_batch_size_are_an_error(refused: Refused) -> None:
    chosen = ("--per-device-batch-size", 32, "--set", "epochs=1", "batch_size=64")
    assert "--set batch_size=64" in refused("train", "digits", *chosen).splitlines()[0]


def test_batch_size_and_microbatches_are_validated(refused: Refused) -> None:
    assert "--per-device-batch-size 0" in refused("train", "digits", "--per-device-batch-size", 0)
    few = ("--per-device-batch-size", 3, "--set", "microbatches=8")
    assert "batch_size is 3 but there are 8 microbatches" in refused("train", "digits", *few)
    err = refused("train", "digits", *few, "--processes", 9)
    assert "9 ranks share the data" in err


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
