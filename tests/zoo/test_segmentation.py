"""Recipe `segmentation` on generated files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.mask_data import draw_images, logged
from helpers.system import events, here, tree, weights
from samestep.config import RunOptions
from samestep.errors import EXIT_DONE, RecipeError
from samestep.launcher.launch import launch
from samestep.recipes.builder import MODELS, find
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.run import evaluate
from samestep.zoo.models import UNet, unet_resnet34, unet_resnet101, unet_vgg16
from samestep.zoo.options import call
from samestep.zoo.segmentation import load_segmentation

SMALL = (
    "data.options.image_size=32",
    "model.name=unet_small",
    "model.options.width=4",
    "batch_size=8",
    "microbatches=4",
    "step.reduction=exact",
    "epochs=2",
)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 25 pairs; 21 are for training, and the last batch of an epoch has 5."""
    return draw_images(tmp_path_factory.mktemp("cells") / "cells", 25)


def arguments(data: Path, *overrides: str) -> tuple[str, ...]:
    return ("segmentation", f"data.options.path={data}", *SMALL, *overrides)


def train(data: Path, place: Path, name: str, processes: int, *overrides: str) -> Path:
    """Train, and return the run directory."""
    options = ("--name", name, "--processes", processes, "--workers", 0)
    assert here("train", *options, *arguments(data, *overrides), cwd=place) == EXIT_DONE
    return place / "runs" / name


# --- training --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_equal_on_one_and_three_processes(cells: Path, tmp_path: Path) -> None:
    one, three = (train(cells, tmp_path, f"on-{processes}", processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert weights(one, "best") == weights(three, "best")
    assert logged(one) == logged(three)
    assert [event["samples"] for event in events(one, "evaluation")] == [4, 4]
    for event in events(one, "evaluation"):
        assert event["iou"] == pytest.approx(event["dice"] / (2 - event["dice"]), rel=1e-12)
    assert [event["lr"] for event in events(one, "step")] == [1e-3] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.name=bce_with_logits", "data.options.fit=crop", "schedule.step_epochs=1"),
        pytest.param(
            ("model.name=unet_resnet34", "model.options={}", "data.options.image_size=64", "epochs=1"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_losses_and_models_give_equal_weights(cells: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    one, three = (train(cells, tmp_path, f"on-{processes}", processes, *overrides) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert logged(one) == logged(three)
    if "schedule.step_epochs=1" in overrides:
        assert [event["lr"] for event in events(one, "step")] == pytest.approx([1e-3] * 3 + [1e-4] * 3)


# --- bad files -------------------------------------------------------------------------------------------


def spoiled(cells: Path, place: Path) -> Path:
    """Copy the pairs, with two bad training pairs and one bad validation mask."""
    root = shutil.copytree(cells, place / "spoiled")
    splits = load_segmentation(str(root))
    training, validation = splits.train._pairs, splits.evaluation._pairs  # type: ignore[attr-defined]
    training[3].image.write_bytes(training[3].image.read_bytes()[:300])
    shutil.copy(training[5].image, training[5].mask)
    validation[1].mask.write_bytes(validation[1].mask.read_bytes()[:60])
    return root


@pytest.mark.slow
def test_bad_files_are_skipped(cells: Path, tmp_path: Path) -> None:
    root = spoiled(cells, tmp_path)
    skip = ("data.bad_samples=skip", "epochs=1")
    one, three = (train(root, tmp_path, f"on-{processes}", processes, *skip) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert logged(one) == logged(three)
    assert [event["samples"] for event in events(one, "evaluation")] == [3]
    assert [(event["split"], event["count"]) for event in events(one, "skipped")] == [
        ("training", 2),
        ("evaluation", 1),
    ]


@pytest.mark.slow
def test_overlays_have_the_positions_of_their_samples(cells: Path, tmp_path: Path) -> None:
    """The pictures cover several batches, and those of an earlier evaluation are removed."""
    file = tmp_path / "model.safetensors"
    save_file(UNet(1, width=4).state_dict(), file)
    data = draw_images(tmp_path / "data", 20)
    overrides = (f"data.options.path={cells}", f"data.options.evaluation_path={data}", "data.bad_samples=skip")
    recipe = load_recipe("segmentation", [*SMALL, *overrides])
    reports = {}
    for processes, bad in ((1, None), (1, 2), (3, 2)):
        if bad is not None:
            (data / "images" / f"{bad:03}.jpg").write_bytes(b"")
        folder = tmp_path / f"report-{bad}" / "overlays"
        options = RunOptions(device="cpu", workers=0)
        launch(evaluate, recipe, options, file, folder.parent, processes=processes)
        reports[processes, bad] = tree(folder)
        (folder / "sample-000099.png").touch()
    complete = reports[1, None]
    assert list(complete) == [f"sample-{number:06}.png" for number in range(16)]
    del complete["sample-000002.png"]
    assert complete == reports[1, 2] == reports[3, 2]


# --- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(unet_vgg16, marks=pytest.mark.long, id="vgg16"),
        pytest.param(unet_resnet34, id="resnet34"),
        pytest.param(unet_resnet101, marks=pytest.mark.long, id="resnet101"),
    ],
)
def test_unets_are_deterministic_and_use_every_parameter(build: Any) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = build(num_classes=2), torch.randn(1, 3, 64, 96)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            model.zero_grad()
            outputs = model(images)
            outputs.sum().backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(before)
    assert outputs.shape == (1, 2, 64, 96)
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_models_of_the_library_by_name() -> None:
    model = find("segmentation_models_pytorch:FPN", MODELS, "model")(num_classes=2, encoder_name="resnet18")
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 2, 64, 64)
    for name, options, message in (
        ("FPNN", {}, "did you mean segmentation_models_pytorch:FPN?"),
        ("FPN", {"encoder_weights": "imagenet"}, "encoder_weights is 'imagenet'"),
        ("FPN", {"encoder_name": "resnet43"}, "Wrong encoder name"),
    ):
        with pytest.raises(RecipeError) as error:
            builder = find(f"segmentation_models_pytorch:{name}", MODELS, "model")
            call(builder, {"num_classes": 2, **options}, where="model.options")
        assert message in str(error.value)


@pytest.mark.parametrize("sides", [(1, 1), (17, 30), (32, 8)])
def test_small_unet_takes_any_size(sides: tuple[int, int]) -> None:
    assert UNet(5, width=4)(torch.zeros(1, 3, *sides)).shape == (1, 5, *sides)
