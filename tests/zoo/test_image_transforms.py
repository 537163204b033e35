"""Augmentation by name, mixing within microbatches, and predictions of a trained model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.image_kinds import encoded, noise
from helpers.system import events, here, weights
from samestep.errors import RecipeError
from samestep.zoo.image_transforms import Augment, ImageTransforms
from samestep.zoo.images import image_task, load_images
from samestep.zoo.losses import cross_entropy
from samestep.zoo.options import validated


def made(options: dict[str, Any], seed: int) -> torch.Tensor:
    """One training image."""
    transform = validated(ImageTransforms, {"image_size": 16, "augment": options}).train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transform(noise())


STILL: dict[str, Any] = {"scale": [1.0, 1.0], "flip": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {"randaugment": 9},
        {"random_erasing": 1.0},
        {"flip": 1.0},
        {"scale": [0.1, 0.2]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_changes_images_by_the_seeded_generators_alone(options: dict[str, Any]) -> None:
    found = [made({**STILL, **options}, seed) for seed in range(8)]
    again = [made({**STILL, **options}, seed) for seed in range(8)]
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    still = made(STILL, 0)
    assert all(image.shape == (3, 16, 16) and type(image) is torch.Tensor for image in found)
    assert any(not torch.equal(image, still) for image in found)
    assert all(torch.equal(made(STILL, seed), still) for seed in range(3)), "without it, nothing changes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"randaugmnt": 9}, "did you mean data.options.augment.randaugment?"),
        ({"randaugment": 31}, "randaugment is 31"),
        ({"randaugment": True}, "randaugment is True"),
        ({"scale": [0.5, 0.1]}, "scale is"),
        ({"scale": 0.5}, "scale is 0.5"),
        ({"cutmix_alpha": float("inf")}, "cutmix_alpha is inf"),
        ("mixup", "data.options.augment is 'mixup'"),
    ],
)
def test_invalid_option_is_refused(options: Any, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        validated(ImageTransforms, {"augment": options})
    assert message in str(error.value)


# --- mixing ----------------------------------------------------------------------------------------------


def microbatch(size: int) -> list[tuple[torch.Tensor, int]]:
    """Return constant images; image `i` has the value `i` and the class `i`."""
    return [(torch.full((3, 8, 8), float(number)), number) for number in range(size)]


def mixed(size: int, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    mix = Augment(**options).collate(5)  # type: ignore[arg-type]
    assert mix is not None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        images, targets = mix(microbatch(size))
    return images, targets


@pytest.mark.parametrize("name", ["mixup_alpha", "cutmix_alpha"])
def test_targets_are_mixed_like_images(name: str) -> None:
    images, targets = mixed(4, **{name: 1.0})
    assert targets.shape == (4, 5)
    assert targets.sum(dim=1).tolist() == pytest.approx([1.0] * 4)
    # Images are constant, so the mean of an image is the mean of its targets.
    expected = (targets * torch.arange(5.0)).sum(dim=1)
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), expected)
    assert not torch.equal(images, torch.stack([image for image, _ in microbatch(4)]))


def test_loss_of_smoothed_mixed_targets_equals_torch() -> None:
    _, targets = mixed(4, mixup_alpha=0.5)
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(logits, targets, label_smoothing=0.1)
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
    torch.testing.assert_close(loss, expected)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images") / "pictures"
    for name in ("one", "two"):
        (root / name).mkdir(parents=True)
        for number in range(12):
            (root / name / f"{number}.png").write_bytes(encoded(noise(9 + number), "PNG"))
    return root


@pytest.mark.slow
def test_all_augmentations_give_equal_weights_on_one_and_three_processes(pictures: Path, tmp_path: Path) -> None:
    """Training has mixed targets, evaluation has class numbers."""
    overrides = (
        f"data.options.path={pictures}",
        "data.options.image_size=32",
        "data.options.augment={randaugment: 9, random_erasing: 0.5}",
        "data.options.augment.mixup_alpha=0.2",
        "data.options.augment.cutmix_alpha=1",
        "loss.options.label_smoothing=0.1",
        "model={name: squeezenet1_1}",
        "metrics=[accuracy, top5]",
        "batch_size=8",
        "microbatches=4",
        "epochs=1",
    )
    runs = []
    for processes, workers in ((1, 0), (3, 1)):
        name = f"on-{processes}"
        arguments = ("--name", name, "--processes", processes, "--workers", workers, *overrides)
        assert here("train", "images", *arguments, cwd=tmp_path) == 0
        runs.append(tmp_path / "runs" / name)
    assert weights(runs[0]) == weights(runs[1])
    (event,) = events(runs[1], "evaluation")
    assert event["top5"] == 1.0
    assert event["loss"] == events(runs[0], "evaluation")[0]["loss"]


# --- the task --------------------------------------------------------------------------------------------


def test_task_classifies_an_image_as_evaluation_does(pictures: Path) -> None:
    splits = load_images(str(pictures), image_size=24, mean=[0.5] * 3, std=[0.5] * 3, crop_fraction=1.0)
    task = image_task(splits.classes, image_size=24, mean=[0.5] * 3, std=[0.5] * 3, crop_fraction=1.0)
    path, *_ = splits.evaluation.samples[0]  # type: ignore[attr-defined]
    assert torch.equal(task.read(path), splits.evaluation[0][0])
    answer = task.describe(torch.tensor([0.0, 2.0]))
    assert [entry["class"] for entry in answer["classes"]] == ["two", "one"]
    assert answer["classes"][0]["probability"] == pytest.approx(0.8807970779778823)
    many = image_task([str(number) for number in range(9)]).describe(torch.arange(9.0)[None])
    assert [entry["class"] for entry in many["classes"]] == list("87654")
