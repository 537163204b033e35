"""Overlays of segmentation targets and predictions."""

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from samestep.zoo.overlays import class_map, overlay, owner_of_classes, write_pictures


def test_class_map_of_one_channel_and_of_several() -> None:
    one = torch.tensor([[[-1.0, 0.0, 0.5]]])
    assert class_map(one).tolist() == [[0, 0, 1]]
    assert class_map(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, 1.0]])).tolist() == [0, 1]


@pytest.mark.parametrize("channels", [1, 3])
def test_overlay_shows_input_mask_and_prediction(channels: int) -> None:
    inputs = torch.linspace(-2, 3, channels * 6 * 8).view(channels, 6, 8)
    targets, outputs = torch.zeros(1, 6, 8), torch.full((1, 6, 8), -1.0)
    targets[..., :4], outputs[..., 4:] = 1.0, 1.0
    image = overlay(inputs, targets, outputs)
    assert image.size == (8 * 3 + 2 * 4, 6)
    plain, expected, predicted = (numpy.asarray(image.crop((left, 0, left + 8, 6))).astype(int) for left in (0, 12, 24))
    assert (expected[:, 4:] == plain[:, 4:]).all()
    assert (predicted[:, :4] == plain[:, :4]).all()
    assert (expected[:, :4, 0] > plain[:, :4, 0]).all(), "foreground is red"
    assert (predicted[:, 4:, 0] >= plain[:, 4:, 0]).all()
    assert not (predicted[:, 4:] == plain[:, 4:]).all()


def test_overlay_of_classes(tmp_path: Path) -> None:
    outputs = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 4, (2, 6, 5), generator=torch.Generator().manual_seed(1))
    pictures = map(overlay, torch.rand(2, 3, 6, 5), targets, outputs)
    write_pictures(tmp_path / "overlays", [3, 11], pictures)
    paths = sorted((tmp_path / "overlays").iterdir())
    assert [path.name for path in paths] == ["sample-000003.png", "sample-000011.png"]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (5 * 3 + 8, 6)


def test_pixels_or_images_have_classes() -> None:
    images = torch.zeros(2, 3, 8, 8)
    assert owner_of_classes(images, torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8)) == "pixel"
    assert owner_of_classes(images, torch.zeros(2, 8, 8), torch.zeros(2, 5, 8, 8)) == "pixel"
    assert owner_of_classes(images, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5)) == "image"
    assert owner_of_classes(images, torch.zeros(2), torch.zeros(2, 5)) is None
    assert owner_of_classes({"pixels": images}, torch.zeros(2, 8, 8), torch.zeros(2, 5, 8, 8)) is None
    assert owner_of_classes(images, torch.zeros(2, 4, 4), torch.zeros(2, 5, 4, 4)) is None
