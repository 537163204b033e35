"""The recipe for images and masks, trained on files that are made here."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mask_data import draw_images
from samestep.config import Part
from samestep.errors import EXIT_DONE, EXIT_INPUT, DataError, RecipeError
from samestep.recipes.masks.foreground import with_foreground_weight
from samestep.recipes.masks.segmentation import load_segmentation
from samestep.recipes.masks.unet import unet, unet_3d, unet_resnet34, unet_resnet101, unet_small, unet_vgg16
from samestep.runtime.world import World
from system import Running, answer, events, here, state_of, steps_saved, tree, weights

SMALL = (
    "data.options.image_size=32",
    "model.name=unet_small",
    "model.options.width=4",
    "batch_size=8",
    "shards=4",
    "epochs=2",
)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 pairs, of which 21 are trained on: an epoch's last batch has 5."""
    return draw_images(tmp_path_factory.mktemp("cells") / "cells", 25)


def arguments(data: Path, *overrides: str) -> tuple[str, ...]:
    return ("segmentation", "--set", f"data.options.path={data}", *SMALL, *overrides)


def train(data: Path, place: Path, name: str, processes: int, *overrides: str) -> Path:
    """Train in a folder; the run."""
    chosen = ("--name", name, "--processes", processes, "--workers", 0)
    assert here("train", *chosen, *arguments(data, *overrides), cwd=place) == EXIT_DONE
    return place / "runs" / name


def told(run: Path) -> list[dict[str, Any]]:
    """What a run's evaluations found, and what it left out."""
    ignored = ("time", "samples_per_second")
    found = [*events(run, "note"), *events(run, "evaluation"), *events(run, "skipped")]
    return [{key: value for key, value in event.items() if key not in ignored} for event in found]


# --- training --------------------------------------------------------------------------------------------


def test_three_processes_give_the_bits_of_one(cells: Path, tmp_path: Path) -> None:
    one, three = (train(cells, tmp_path, f"on-{processes}", processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert weights(one, "best") == weights(three, "best")
    assert told(one) == told(three)
    [note] = events(one, "note")
    assert note["text"].startswith("foreground weight ")
    assert [event["samples"] for event in events(one, "evaluation")] == [4, 4]
    for event in events(one, "evaluation"):
        assert event["iou"] == pytest.approx(event["dice"] / (2 - event["dice"]), rel=1e-12)
    assert [event["lr"] for event in events(one, "step")] == [1e-3] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.name=dice_plus", "data.options.fit=crop", "step.batch_norm=sync", "schedule.step_epochs=1"),
        pytest.param(
            ("model.name=unet_resnet34", "model.options={}", "data.options.image_size=64", "epochs=1"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_losses_and_models_give_the_same_bits(cells: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    one, three = (train(cells, tmp_path, f"on-{processes}", processes, *overrides) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert told(one) == told(three)
    if "schedule.step_epochs=1" in overrides:
        assert [event["lr"] for event in events(one, "step")] == pytest.approx([1e-3] * 3 + [1e-4] * 3)


@pytest.mark.slow
def test_several_classes_with_a_border_that_is_ignored(tmp_path: Path) -> None:
    data = draw_images(tmp_path / "several", 16, classes=3)
    overrides = (
        "data.options.classes=[ground, small, large]",
        "data.options.ignore_values=[3]",
        "loss={name: cross_entropy}",
        "metrics=[dice, iou, accuracy]",
    )
    one, four = (train(data, tmp_path, f"on-{processes}", processes, *overrides) for processes in (1, 4))
    assert weights(one) == weights(four)
    assert told(one) == told(four)
    for processes in (1, 3):
        chosen = ("--processes", processes, "--workers", 0, "--report", f"report-{processes}")
        assert here("eval", one, *chosen, cwd=tmp_path) == EXIT_DONE
    pictures = tree(tmp_path / "report-1" / "overlays")
    assert list(pictures) == [f"sample-{number:06}.png" for number in range(3)]
    assert pictures == tree(tmp_path / "report-3" / "overlays")
    said = json.loads((tmp_path / "report-1" / "classes.json").read_text(encoding="utf-8"))
    assert said["dice"] == events(one, "evaluation")[-1 if said["step"] == 4 else 0]["dice"]
    assert sum(sum(row) for row in said["confusion"]) < 3 * 32 * 32, "the border does not count"


@pytest.mark.slow
def test_killed_and_resumed_on_another_number_of_processes_gives_the_same_bits(cells: Path, tmp_path: Path) -> None:
    whole = train(cells, tmp_path, "whole", 1, "epochs=12")
    run = tmp_path / "runs" / "killed"
    chosen = ("--name", "killed", "--processes", 2, "--workers", 0, "--checkpoint-every", 1)
    with Running("train", *chosen, *arguments(cells, "epochs=12"), cwd=tmp_path) as running:
        running.until(lambda: any(step >= 4 for step in steps_saved(run)), "the fourth step")
        running.kill(signal.SIGKILL)
        running.wait(10)
    assert state_of(run)["step"] < 3 * 12
    assert here("resume", run, "--processes", 3, "--workers", 0, cwd=tmp_path) == EXIT_DONE
    assert weights(run) == weights(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_certificate_with_a_kill_in_between(capsys: pytest.CaptureFixture[str], cells: Path, tmp_path: Path) -> None:
    chosen = ("--processes", "1,2,3", "--steps", "2", "--kill-at", "2", "--resume-on", "3", "--json", "--out", tmp_path)
    code = here("verify", *chosen, *arguments(cells), cwd=tmp_path)
    said = answer(capsys)
    assert (code, said["holds"], said["findings"]) == (EXIT_DONE, True, [])
    for run in said["comparisons"]:
        assert set(run["quantities"].values()) == {"bits"}


@pytest.mark.slow
def test_learns_to_find_discs(cells: Path, tmp_path: Path) -> None:
    run = train(cells, tmp_path, "long", 1, "epochs=25", "model.options.width=8", "optimizer.options.lr=0.005")
    assert max(event["dice"] for event in events(run, "evaluation")) > 0.8


# --- bad files -------------------------------------------------------------------------------------------


def spoiled(cells: Path, place: Path) -> Path:
    """The pairs with a cut image and a mask that is none, both trained on, and a cut mask in evaluation."""
    root = shutil.copytree(cells, place / "spoiled")
    splits = load_segmentation(str(root))
    trained, evaluated = splits.train._pairs, splits.evaluation._pairs  # type: ignore[attr-defined]
    trained[3].image.write_bytes(trained[3].image.read_bytes()[:300])
    shutil.copy(trained[5].image, trained[5].mask)
    evaluated[1].mask.write_bytes(evaluated[1].mask.read_bytes()[:60])
    return root


@pytest.mark.slow
def test_bad_files_are_left_out_alike_on_any_number_of_processes(cells: Path, tmp_path: Path) -> None:
    root = spoiled(cells, tmp_path)
    skip = ("data.bad_samples=skip", "epochs=1")
    one, three = (train(root, tmp_path, f"on-{processes}", processes, *skip) for processes in (1, 3))
    assert weights(one) == weights(three)
    assert told(one) == told(three)
    assert [event["samples"] for event in events(one, "evaluation")] == [3]
    assert [(event["split"], event["count"]) for event in events(one, "skipped")] == [
        ("training", 2),
        ("evaluation", 1),
    ]
    [note] = events(one, "note")
    assert note["text"].endswith(" % of the masks that are trained on is foreground; 1 of them cannot be used")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_bad_files_stop_the_run_alike_on_any_number_of_processes(
    capfd: pytest.CaptureFixture[str], cells: Path, tmp_path: Path, processes: int
) -> None:
    root = spoiled(cells, tmp_path)
    chosen = ("--name", "a", "--processes", processes, "--workers", 0)
    assert here("train", *chosen, *arguments(root), cwd=tmp_path) == EXIT_INPUT
    said = capfd.readouterr().err
    bad = load_segmentation(str(root)).train._pairs[5].mask  # type: ignore[attr-defined]
    assert f"error: {bad} cannot be read as a mask" in said or f"error: {bad} has the value" in said


# --- foreground ------------------------------------------------------------------------------------------


def test_foreground_weight_is_that_of_all_masks_that_are_trained_on(cells: Path, alone: World) -> None:
    splits = load_segmentation(str(cells))
    loss = Part(name="bce_with_logits", options={"foreground_weight": "from_masks"})
    weighted, [note] = with_foreground_weight(loss, splits, "stop", alone)
    counts = [splits.foreground_of(index) for index in range(21)]  # type: ignore[misc]
    background, foreground = (sum(column) for column in zip(*counts, strict=True))
    assert weighted.options["foreground_weight"] == background / foreground
    assert loss.options == {"foreground_weight": "from_masks"}
    assert note.startswith(f"foreground weight {background / foreground:.6g}: ")


def test_foreground_weight_that_is_given_needs_no_masks(cells: Path, alone: World) -> None:
    loss = Part(name="bce_with_logits", options={"foreground_weight": 3.0})
    assert with_foreground_weight(loss, load_segmentation(str(cells)), "stop", alone) == (loss, ())


def test_foreground_weight_without_foreground_or_binary_masks_is_refused(tmp_path: Path, alone: World) -> None:
    loss = Part(name="bce_with_logits", options={"foreground_weight": "from_masks"})
    data = draw_images(tmp_path / "several", 4, classes=2)
    with pytest.raises(RecipeError, match="no binary masks"):
        with_foreground_weight(loss, load_segmentation(str(data), classes=["a", "b", "c"]), "stop", alone)
    with pytest.raises(DataError, match="no foreground"):
        with_foreground_weight(
            loss, load_segmentation(str(data), mask_values=[0, 5], ignore_values=[1, 2]), "stop", alone
        )


# --- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [unet_vgg16, unet_resnet34, unet_resnet101], ids=["vgg16", "resnet34", "resnet101"])
def test_u_nets_use_every_parameter_and_give_the_same_gradients_twice(build: Any) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = build(num_classes=2), torch.randn(1, 3, 64, 96)
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            model.zero_grad()
            outputs = model(images)
            outputs.sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(before)
    assert outputs.shape == (1, 2, 64, 96)
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("sides", [(64, 100), (32, 64), (1, 1)])
def test_u_nets_say_which_sides_they_take(sides: tuple[int, int]) -> None:
    with pytest.raises(RecipeError, match=f"images of {sides[0]} x {sides[1]} pixels") as error:
        unet(1, encoder="resnet18")(torch.zeros(1, 3, *sides))
    assert "multiples of 32, from 64 on" in str(error.value)


def test_unknown_encoder_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'resnet43'") as error:
        unet(encoder="resnet43")
    assert error.value.do == "did you mean resnet34?"


@pytest.mark.parametrize("sides", [(1, 1), (17, 30), (32, 8)])
def test_small_u_net_takes_any_size(sides: tuple[int, int]) -> None:
    assert unet_small(5, width=4)(torch.zeros(1, 3, *sides)).shape == (1, 5, *sides)


@pytest.mark.parametrize("sides", [(1, 1, 1), (9, 17, 8)])
def test_small_u_net_takes_volumes_of_any_size(sides: tuple[int, int, int]) -> None:
    model = unet_3d(1, width=4, levels=2, dropout=0.1)
    outputs = model(torch.zeros(1, 1, *sides))
    assert outputs.shape == (1, 1, *sides)
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
