"""Models of checkpoints do not need their initial weights; tasks have the class names of the run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.system import here, weights
from samestep.errors import InputError
from samestep.recipes.recipe_files import DatasetInfo, load_recipe
from samestep.recipes.run import _picture_paths, build_task
from samestep.zoo.digits import DigitsNet

SMALL = ("epochs=2", "model.options.width=8", "batch_size=256")


@pytest.mark.slow
def test_pretrained_file_is_not_needed_after_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "initial.safetensors"
    save_file(DigitsNet(width=8).state_dict(), file)
    overrides = ("--set", *SMALL, f"model.pretrained={file}")
    assert here("train", "digits", "--name", "a", *overrides, cwd=tmp_path) == 0
    file.unlink()
    run = tmp_path / "runs/a"
    before = weights(run)
    assert here("eval", run, cwd=tmp_path) == 0
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == before
    assert here("export", run, cwd=tmp_path) == 0
    assert here("train", "digits", "--name", "b", *overrides, cwd=tmp_path) == 2, "a new run needs the file"


@pytest.mark.parametrize("name", ["image_list", "stream_images"])
def test_task_of_data_with_the_option_classes(name: str) -> None:
    options = "{path: a, evaluation_path: b, classes: [x, y], image_size: 32, decoder: pillow}"
    recipe = load_recipe("images", ("data.name=" + name, "data.options=" + options))
    answer = build_task(recipe, DatasetInfo(("cat", "dog"))).describe(torch.tensor([0.0, 9.0]))
    assert [row["class"] for row in answer["classes"]] == ["dog", "cat"]


def test_pictures_replace_neither_each_other_nor_inputs(tmp_path: Path) -> None:
    left, right, other = (tmp_path / name for name in ("left/7.png", "right/7.png", "left/8.jpg"))
    assert _picture_paths([left, other], tmp_path) == [tmp_path / "7.png", tmp_path / "8.png"]
    for files, out in (([left, right], tmp_path), ([left, other], tmp_path / "left"), ([left, left], tmp_path)):
        with pytest.raises(InputError) as error:
            _picture_paths(files, out)
        assert error.value.code == "E_OUTPUT"


@pytest.mark.timeout(20)  # quadratic time exceeds it
def test_pictures_of_many_files(tmp_path: Path) -> None:
    assert len(_picture_paths([Path(f"images/{number}.jpg") for number in range(8_000)], tmp_path)) == 8_000
