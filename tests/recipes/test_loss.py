"""Losses of a recipe: class weights as a list, and losses of several parts by name."""

from pathlib import Path

import pytest
import torch

from helpers.system import events, here, weights
from samestep.config import Recipe, RunOptions
from samestep.distributed.world import World
from samestep.errors import InputError, RecipeError
from samestep.recipes.bad_samples import complete_epoch
from samestep.recipes.builder import Built, build
from samestep.recipes.predict import evaluated
from samestep.recipes.recipe_files import load_recipe

PARTS = """
from samestep.zoo.losses import cross_entropy


class Parts:
    def __init__(self, sharpness: float = 0.0) -> None:
        self.sharpness = sharpness

    def __call__(self, outputs, targets):
        tokens = cross_entropy(outputs, targets)
        size = (outputs**2).mean()
        return {"loss": tokens + self.sharpness * size, "tokens": tokens, "size": size}


parts = Parts(0.1)
"""
SMALL = ("data.options.lines=50", "model.options.width=16", "batch_size=16", "epochs=1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of losses."""
    (tmp_path / "parts_beside.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tokens", [*SMALL, *overrides])


def built(world: World, *overrides: str) -> Built:
    return build(recipe(*overrides), RunOptions(workers=0), world)


def test_class_weights_are_a_list_in_a_recipe(alone: World) -> None:
    heavy = [1.0 + number for number in range(29)]
    made = built(alone, f"loss.options.weight={heavy}", "loss.options.label_smoothing=0.1")
    value = evaluated(made, [])["loss"]
    made.driver.model.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in complete_epoch(made.evaluation):
            inputs, targets = batch.data
            outputs, weight = made.driver.model(inputs), torch.tensor(heavy, dtype=torch.float64)
            loss = torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(outputs.double(), targets)
            share = float(weight[targets[targets != -100]].sum())
            total, count = total + float(loss) * share, count + share
    assert value == pytest.approx(total / count, rel=1e-5)


def test_class_weights_of_another_number_of_classes_are_refused(alone: World) -> None:
    made = built(alone, "loss.options.weight=[1, 2]")
    with pytest.raises(InputError, match="for all 29 classes") as error:
        made.driver.step(next(iter(made.train)))
    assert error.value.code == "E_SHAPE"


def test_options_go_to_a_class_of_losses_and_nowhere_else(place: Path, alone: World) -> None:
    built(alone, "loss.name=parts_beside:Parts", "loss.options.sharpness=0.2")
    with pytest.raises(RecipeError, match=r"loss\.options\.sharp is not an option"):
        built(alone, "loss.name=parts_beside:Parts", "loss.options.sharp=0.2")
    with pytest.raises(RecipeError, match=r"loss\.options\.sharpness is not an option"):
        built(alone, "loss.name=parts_beside:parts", "loss.options.sharpness=0.2")


@pytest.mark.slow
def test_a_recipe_with_parts_gives_the_same_bits_and_shows_losses_as_losses(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("loss.name=parts_beside:parts", "step.reduction=exact", *SMALL)
    runs = []
    for processes in (1, 3):
        arguments = ("tokens", "--processes", processes, "--name", f"on-{processes}")
        assert here("train", *arguments, *settings, cwd=place) == 0
        runs.append(place / "runs" / f"on-{processes}")
    assert weights(runs[0]) == weights(runs[1])
    (last,) = events(runs[0], "evaluation")
    assert last["loss"] == pytest.approx(last["loss_tokens"] + 0.1 * last["loss_size"], rel=1e-6)
    printed = capsys.readouterr()
    assert f"loss_tokens  {last['loss_tokens']:.4f}" in f"{printed.out} {printed.err}"
    assert here("eval", runs[0], cwd=place) == 0
    assert f"loss_size    {last['loss_size']:.4f}" in capsys.readouterr().out


def test_losses_of_torch_have_the_count_of_the_shipped_one(alone: World) -> None:
    """Class weights as integers and padding, written as in a PyTorch script."""
    heavy = f"loss.options.weight={[1 + number for number in range(29)]}"
    values = []
    for name in ("cross_entropy", "torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"):
        made = built(alone, f"loss.name={name}", heavy, "loss.options.ignore_index=-100")
        values.append(evaluated(made, [])["loss"])
    assert values[0] == values[1] == values[2]
