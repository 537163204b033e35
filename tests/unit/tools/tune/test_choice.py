"""What was chosen is found again where it was chosen, and nowhere else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.config import Recipe
from samestep.recipes.parse import load_recipe
from samestep.tools.tune.choice import Place, find, is_any, machine, write
from samestep.tools.tune.setting import Choice

HERE = {"processor": "a processor", "cores": 2, "gpus": []}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])


def keep(runs: Path, place: Place, **choice: Any) -> Path:
    folder = place.folder(runs)
    folder.mkdir(parents=True)
    return write(folder, {"place": place.as_data(), "choice": {"workers": 3, "prefetch": 4, **choice}})


def test_it_is_found_again(tmp_path: Path, recipe: Recipe) -> None:
    place = Place.of("digits", recipe, 2, HERE)
    assert not is_any(tmp_path)
    path = keep(tmp_path, place)
    assert is_any(tmp_path)
    assert find(tmp_path, place) == (Choice(3, 4, str(path)), [])
    assert [each.name for each in path.parent.iterdir()] == ["tune.json"]


def test_what_does_not_change_the_time_of_a_step_does_not_matter(tmp_path: Path, recipe: Recipe) -> None:
    keep(tmp_path, Place.of("digits", recipe, 2, HERE))
    other = replace(recipe, epochs=recipe.epochs + 1, step=replace(recipe.step, seed=7))
    found, told = find(tmp_path, Place.of(None, other, 2, HERE))  # as by resume, which knows no name
    assert found is not None
    assert not told


def test_another_machine_or_number_of_processes_has_none(tmp_path: Path, recipe: Recipe) -> None:
    keep(tmp_path, Place.of("digits", recipe, 2, HERE))
    assert find(tmp_path, Place.of("digits", recipe, 4, HERE)) == (None, [])
    assert find(tmp_path, Place.of("digits", recipe, 2, {**HERE, "cores": 8})) == (None, [])


def test_one_of_another_recipe_is_told_and_not_used(tmp_path: Path, recipe: Recipe) -> None:
    keep(tmp_path, Place.of("digits", recipe, 2, HERE))
    other = replace(recipe, batch_size=2 * recipe.batch_size)
    found, told = find(tmp_path, Place.of("digits", other, 2, HERE))
    assert found is None
    assert f"batch_size: {recipe.batch_size} -> {other.batch_size}" in told[0]
    # Both can be kept, and each is found.
    keep(tmp_path, Place.of("digits", other, 2, HERE), workers=1)
    found, _ = find(tmp_path, Place.of("digits", other, 2, HERE))
    assert found is not None
    assert found.workers == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"choice": 3}',
        '{"place": {}, "choice": {"workers": 1, "prefetch": 2}}',
        '{"choice": {"workers": -1, "prefetch": 2}}',
        '{"choice": {"workers": "8", "prefetch": 2}}',
        '{"choice": {"workers": true, "prefetch": 2}}',
        '{"choice": {"workers": 1, "prefetch": 0}}',
    ],
)
def test_one_that_is_broken_is_told_and_not_used(tmp_path: Path, recipe: Recipe, text: str) -> None:
    place = Place.of("digits", recipe, 2, HERE)
    path = keep(tmp_path, place)
    said = json.loads(text) if text else None
    if isinstance(said, dict) and "choice" in said and "place" not in said:
        text = json.dumps({"place": place.as_data(), **said})
    path.write_text(text, encoding="utf-8")
    found, told = find(tmp_path, place)
    assert found is None
    assert told[0].startswith(f"{path} is not used: it cannot be read")
    assert len(told) == 1


def test_a_machine_is_told_by_what_decides_how_long_things_take() -> None:
    here = machine("cpu")
    assert here["gpus"] == []
    assert here["cores"] >= 1
    assert here["processor"]
    assert here == machine("cpu")
