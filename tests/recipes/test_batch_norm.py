"""Recipes of models with batch norm: the number of microbatches of `auto`, and batches with one sample."""

from pathlib import Path

import pytest

from helpers.system import events, here
from samestep.errors import EXIT_DONE, EXIT_INPUT
from samestep.recipes.recipe_files import read_recipe

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"  # 102 samples, and a model with batch norm
AUTO = ("microbatches=auto", "batch_size=16", "epochs=1")


def train(folder: Path, name: str, *settings: str, processes: object = 1) -> tuple[int, Path]:
    code = here("train", RECIPE, "--name", name, "--processes", processes, "--set", *AUTO, *settings, cwd=folder)
    return code, folder / "runs" / name


def notes(run: Path) -> str:
    return "\n".join(event["text"] for event in events(run, "note"))


def test_auto_is_resolved_before_ranks_start(tmp_path: Path) -> None:
    code, run = train(tmp_path, "a", processes=2)
    assert code == EXIT_DONE
    assert read_recipe(run / "recipe.yaml").microbatches == 8
    assert notes(run) == ""
    assert here("eval", run, cwd=tmp_path) == EXIT_DONE


def test_more_processes_are_refused_with_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = train(tmp_path, "a", "microbatches=2", processes=3)
    err = capsys.readouterr().err
    assert (code, run.exists()) == (EXIT_INPUT, False)
    assert "[E_TOO_MANY_RANKS]" in err
    for way_out in ("--processes 2;", "microbatches=3 or more"):
        assert way_out in err


@pytest.mark.parametrize(
    ("settings", "steps", "note"),
    [
        (("data.options.samples=33",), 2, "the last batch of an epoch has 1 sample"),
        pytest.param(("data.options.samples=34",), 3, "", marks=pytest.mark.slow),
        pytest.param(("data.options.samples=34", "data.drop_last=true"), 2, "", marks=pytest.mark.slow),
    ],
)
def test_last_batch(tmp_path: Path, settings: tuple[str, ...], steps: int, note: str) -> None:
    code, run = train(tmp_path, "a", *settings)
    assert code == EXIT_DONE
    assert len(events(run, "step")) == steps
    assert notes(run).startswith(note)
    assert bool(notes(run)) == bool(note)
