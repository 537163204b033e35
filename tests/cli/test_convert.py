"""Tests of `samestep convert`: recipes, weights, refusals."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from safetensors.numpy import load_file

from helpers.paddle_files import save_state, save_training, vit_state
from helpers.permissions import without_access
from helpers.system import answer, here, tree
from samestep.recipes.recipe_files import load_recipe

Refused = Callable[..., str]

SMALL: dict[str, Any] = {"DATA": {"BATCH_SIZE": 4}, "TRAIN": {"NUM_EPOCHS": 2, "ACCUM_ITER": 1}, "SAVE_FREQ": 3}


@pytest.fixture
def paddle_yaml(tmp_path: Path) -> Path:
    (tmp_path / "paddle.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    return tmp_path / "paddle.yaml"


def test_recipe(paddle_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("convert", "paddle.yaml", "--devices-meant", 4, "--out", "mine.yaml", cwd=tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "DATA.BATCH_SIZE = 4 -> batch_size" in lines
    assert any(line.startswith("SAVE_FREQ = 3: omitted, ") for line in lines)
    assert lines[-2:] == ["train with: samestep train mine.yaml", "written     mine.yaml"]
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert (recipe.batch_size, recipe.epochs) == (16, 2)
    assert here("convert", "paddle.yaml", "--devices-meant", 4, "--out", "b.yaml", "--json", cwd=tmp_path) == 0
    assert answer(capsys) == {"out": "b.yaml", "keys": lines[:-2]}
    assert (tmp_path / "b.yaml").read_bytes() == (tmp_path / "mine.yaml").read_bytes()
    assert here("convert", "paddle.yaml", "--devices-meant", 1, "--out", "c.yaml", cwd=tmp_path) == 0
    assert load_recipe(str(tmp_path / "c.yaml")).microbatches == 4


@pytest.mark.parametrize("save", [save_state, save_training])
def test_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Callable[..., Path]) -> None:
    state = vit_state()
    save(tmp_path / "vit.pdparams", state)
    assert here("convert", "vit.pdparams", "--out", "vit.safetensors", cwd=tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "classifier.weight -> head.weight" in lines
    assert lines[-1] == "written     vit.safetensors"
    left_out = [line.partition(":")[0] for line in lines if "left out" in line]
    assert left_out == ([] if save is save_state else ["optimizer", "epoch", "scale"])
    written = load_file(tmp_path / "vit.safetensors")
    assert len(written) == len(state)
    assert numpy.array_equal(written["head.weight"], state["classifier.weight"].T)
    assert here("convert", "vit.pdparams", "--out", "b.safetensors", "--json", cwd=tmp_path) == 0
    result = answer(capsys)
    assert result["names"]["blocks.1.attn.proj.bias"] == "encoder.layers.1.attn.out.bias"
    assert result["left_out"] == left_out


def test_refused_input_writes_nothing(refused: Refused, paddle_yaml: Path, tmp_path: Path) -> None:
    save_state(tmp_path / "vit.pdparams", vit_state())
    (tmp_path / "existing.yaml").write_text("", encoding="utf-8")
    out = ("--out", "mine.yaml")
    assert "--devices-meant 8" in refused("convert", "paddle.yaml", *out)
    assert "[E_VALUE]" in refused("convert", "paddle.yaml", *out, "--devices-meant", 0)
    assert "no folder nowhere" in refused("convert", "paddle.yaml", "--out", "nowhere/a.yaml")
    assert "existing.yaml exists" in refused("convert", "paddle.yaml", "--out", "existing.yaml")
    assert "a .safetensors file for a .pdparams file" in refused("convert", "vit.pdparams", *out)
    assert "no.yaml" in refused("convert", "no.yaml", *out, "--devices-meant", 1)
    assert "no.pdparams cannot be read" in refused("convert", "no.pdparams", "--out", "a.safetensors")
    assert "vit.pth" in refused("convert", "vit.pth", "--out", "a.safetensors")


@pytest.mark.parametrize("name", ["paddle.yaml", "vit.pdparams"])
def test_folder_without_permission(
    paddle_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    save_state(tmp_path / "vit.pdparams", vit_state())
    (tmp_path / "out").mkdir(mode=0o500)
    out, options = {"paddle.yaml": ("a.yaml", ("--devices-meant", 4)), "vit.pdparams": ("a.safetensors", ())}[name]
    with without_access():
        assert here("convert", name, *options, "--out", f"out/{out}", cwd=tmp_path) == 2
    assert f"error: out/{out} cannot be written: Permission denied [E_OUTPUT]" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


class Trap:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self._command,)


@pytest.mark.parametrize("command", ["convert", "eval"])
def test_pickle_executes_no_code(refused: Refused, tmp_path: Path, command: str) -> None:
    content = pickle.dumps({**vit_state(), "classifier.bias": Trap(f"touch {tmp_path}/sprung")})
    (tmp_path / "vit.pdparams").write_bytes(content)
    more = {"convert": ("vit.pdparams", "--out", "a.safetensors"), "eval": ("digits", "--pretrained", "vit.pdparams")}
    assert "the file refers to posix.system" in refused(command, *more[command])
    assert sorted(tree(tmp_path)) == ["vit.pdparams"]
