"""Tests of saved settings: found for the same recipe and machine, and for no other."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from samestep.config import Recipe
from samestep.recipes.recipe_files import load_recipe
from samestep.tools.tune.settings import (
    Setting,
    TunedSetting,
    TuneTarget,
    find_setting,
    grid,
    has_tunings,
    machine_key,
    write_tuning,
)

MACHINE = {"processor": "a processor", "cores": 2, "gpus": []}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", [])


def save(runs: Path, target: TuneTarget, **choice: Any) -> Path:
    folder = target.folder(runs)
    folder.mkdir(parents=True)
    return write_tuning(folder, {"place": asdict(target), "choice": {"workers": 3, "prefetch": 4, **choice}})


def test_saved_setting_is_found(tmp_path: Path, recipe: Recipe) -> None:
    target = TuneTarget.of("digits", recipe, 2, MACHINE)
    assert not has_tunings(tmp_path)
    path = save(tmp_path, target)
    assert has_tunings(tmp_path)
    assert find_setting(tmp_path, target) == (TunedSetting(3, 4, str(path)), [])
    assert [file.name for file in path.parent.iterdir()] == ["tune.json"]


def test_keys_without_effect_on_the_time_of_a_step_are_ignored(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, TuneTarget.of("digits", recipe, 2, MACHINE))
    other = replace(recipe, epochs=recipe.epochs + 1, step=replace(recipe.step, seed=7))
    setting, messages = find_setting(tmp_path, TuneTarget.of(None, other, 2, MACHINE))  # `resume` has no name
    assert setting is not None
    assert not messages


def test_other_machine_or_number_of_processes_has_no_setting(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, TuneTarget.of("digits", recipe, 2, MACHINE))
    assert find_setting(tmp_path, TuneTarget.of("digits", recipe, 4, MACHINE)) == (None, [])
    assert find_setting(tmp_path, TuneTarget.of("digits", recipe, 2, {**MACHINE, "cores": 8})) == (None, [])


def test_setting_of_another_recipe_is_reported_and_ignored(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, TuneTarget.of("digits", recipe, 2, MACHINE))
    other = replace(recipe, batch_size=2 * recipe.batch_size)
    setting, messages = find_setting(tmp_path, TuneTarget.of("digits", other, 2, MACHINE))
    assert setting is None
    assert f"batch_size: {recipe.batch_size} -> {other.batch_size}" in messages[0]
    # Files of both recipes can exist at the same time.
    save(tmp_path, TuneTarget.of("digits", other, 2, MACHINE), workers=1)
    setting, _ = find_setting(tmp_path, TuneTarget.of("digits", other, 2, MACHINE))
    assert setting is not None
    assert setting.workers == 1


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
def test_damaged_file_is_reported_and_ignored(tmp_path: Path, recipe: Recipe, text: str) -> None:
    target = TuneTarget.of("digits", recipe, 2, MACHINE)
    path = save(tmp_path, target)
    data = json.loads(text) if text else None
    if isinstance(data, dict) and "choice" in data and "place" not in data:
        text = json.dumps({"place": asdict(target), **data})
    path.write_text(text, encoding="utf-8")
    setting, [message] = find_setting(tmp_path, target)
    assert setting is None
    assert message.startswith(f"{path} is ignored: it cannot be read")


def test_machine_key_is_stable() -> None:
    key = machine_key("cpu")
    assert key["gpus"] == []
    assert key["cores"] >= 1
    assert key["processor"]
    assert key == machine_key("cpu")


def test_grid_has_one_setting_without_workers() -> None:
    assert grid([2, 0, 2], [4, 2]) == [Setting(0), Setting(2, 2), Setting(2, 4)]
    assert grid([1], [2]) == [Setting(1, 2)]
    assert str(Setting(1, 4)) == "1 worker, prefetch 4"
