"""`samestep predict` and `samestep export` need a run, and not the data that it was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers.system import flip_bit, here
from samestep.cli.launch_options import call_in_worker
from samestep.cli.run_plans import plan_from_checkpoint
from samestep.launcher.launch import RankError
from samestep.recipes.builder import TASKS
from samestep.recipes.recipe_files import read_dataset_info
from samestep.zoo.digits import DigitsNet, load_digits

SMALL = ("epochs=3", "model.options.width=8", "batch_size=128")
MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights, and two pictures."""
    place = tmp_path_factory.mktemp("predict")
    assert here("train", "digits", "--name", "a", *SMALL, "ema.decay=0.9", cwd=place) == 0
    images = load_digits(shift=0).train
    for number in (3, 7):
        scan = next(image for image, label in map(images.__getitem__, range(len(images))) if label == number)
        pixels = (scan[0].numpy() * 255).round().astype(numpy.uint8)
        Image.fromarray(pixels).resize((80, 80)).save(place / f"{number}.png")
    return place


def results_of(capsys: pytest.CaptureFixture[str], *arguments: object, cwd: Path) -> list[dict[str, Any]]:
    """Return the JSON lines that a command prints."""
    assert here(*arguments, "--json", cwd=cwd) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def model_of(place: Path, tensors: dict[str, torch.Tensor]) -> DigitsNet:
    model = DigitsNet(width=8)
    model.load_state_dict(tensors)
    return model.eval()


def test_answers_are_those_of_the_averaged_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = results_of(capsys, "predict", "runs/a", "3.png", "7.png", "--checkpoint", "last", cwd=place)
    assert (first["file"], second["file"]) == ("3.png", "7.png")
    checkpoint = place / "runs/a/checkpoints/last"
    model = model_of(place, load_file(checkpoint / MODEL) | load_file(checkpoint / "average.safetensors"))
    with Image.open(place / "3.png") as image:
        pixels = torch.from_numpy(numpy.array(image.resize((8, 8), Image.Resampling.BOX)))[None, None].float() / 255
    with torch.no_grad():
        expected = model(pixels)[0].double().softmax(dim=0)
    for entry in first["classes"]:
        assert entry["probability"] == pytest.approx(float(expected[int(entry["class"])]), rel=1e-6)
    probabilities = [entry["probability"] for entry in first["classes"]]
    assert probabilities == sorted(probabilities, reverse=True)


def test_options_between_run_and_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of(
        capsys, "predict", "runs/a", "--checkpoint", "last", "3.png", "--device", "cpu", "7.png", cwd=place
    )
    assert [result["file"] for result in found] == ["3.png", "7.png"]
    assert here("predict", "runs/a", "--checkpiont", "last", "3.png", cwd=place) == 2
    assert "[E_UNKNOWN_OPTION]" in capsys.readouterr().err


def test_answers_as_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("predict", "runs/a", "3.png", cwd=place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3.png"
    assert all(line.endswith("%") for line in lines[1:])
    assert len(lines) == 4


def test_the_data_is_not_needed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the folder that the run was made in."""
    shutil.copytree(place / "runs/a", tmp_path / "elsewhere", symlinks=True)
    assert here("predict", tmp_path / "elsewhere", place / "3.png", cwd=tmp_path) == 0


@pytest.mark.parametrize("kind", ["safetensors", "torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exported_file_computes_the_same(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out = tmp_path / "model.file"
    (found,) = results_of(capsys, "export", "runs/a", "--format", kind, "--like", "3.png", "--out", out, cwd=place)
    assert (found["path"], found["format"]) == (str(out), kind)
    assert out.is_file()
    if kind == "safetensors":
        tensors = load_file(out)
        assert set(tensors) == set(DigitsNet(width=8).state_dict()), "names are the model's own"
        model_of(place, tensors)
        return
    assert 0 <= found["difference"] < 1e-5
    assert here("export", "runs/a", "--format", kind, "--like", "3.png", "--out", out, cwd=place) == 2
    assert "[E_OUTPUT]" in capsys.readouterr().err


def test_exported_program_accepts_any_batch_size(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    assert here("export", "runs/a", "--format", "torch", "--like", "3.png", "--out", out, cwd=place) == 0
    program = torch.export.load(out).module()
    assert program(torch.rand(5, 1, 8, 8)).shape == (5, 10)


def test_file_that_cannot_be_written(place: Path, tmp_path: Path) -> None:
    plan, out = plan_from_checkpoint(place / "runs/a", "last", [], trust=False), tmp_path / "missing" / "x.safetensors"
    model = (plan.recipe, read_dataset_info(place / "runs/a"), plan.checkpoint)
    with pytest.raises(RankError, match=r"x\.safetensors: no safetensors file: .*\[E_EXPORT\]"):
        call_in_worker("samestep.tools.export", "export", *model, "safetensors", out, None)


WRONG = {
    "predict runs/a": "E_OPTION_CONFLICT",
    "predict runs/a none.png": "E_FILE_MISSING",
    "predict runs/a --prompt x": "E_OPTION_CONFLICT",
    "predict runs/a 3.png --prompt x": "E_OPTION_CONFLICT",
    "predict runs/a 3.png --out pictures": "E_OPTION_CONFLICT",
    "predict runs/a runs/a/recipe.yaml": "E_UNREADABLE",
    "predict runs/none 3.png": "E_NOT_A_RUN",
    "export runs/a --out nofolder/x.safetensors": "E_OUTPUT",
    "export runs/a --format torch": "E_OPTION_CONFLICT",
    "export runs/a --out model.onnx": "E_OPTION_CONFLICT",
    "export runs/a --format torch --like none.png": "E_FILE_MISSING",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_an_error(arguments: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert here(*arguments.split(), cwd=place) == 2
    assert f"[{WRONG[arguments]}]" in capsys.readouterr().err.splitlines()[0]
    assert sorted(place.rglob("*")) == before


def test_a_damaged_checkpoint_answers_nothing(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "runs/a", run, symlinks=True)
    flip_bit(run / "checkpoints/best" / MODEL, 9001)
    assert here("predict", run, place / "3.png", cwd=place) == 2
    assert MODEL in capsys.readouterr().err


def test_every_task_is_of_data_that_exists() -> None:
    from samestep.recipes.builder import DATA

    assert set(TASKS) <= set(DATA)
