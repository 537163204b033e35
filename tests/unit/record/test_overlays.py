"""Pictures of what a model says, over what it saw."""

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from samestep.record.overlays import (
    areas,
    blended,
    class_colours,
    class_map,
    is_overlaid,
    overlay,
    side_by_side,
    write_overlays,
)


def test_class_map_of_one_channel_and_of_several() -> None:
    one = torch.tensor([[[-1.0, 0.0, 0.5]]])
    assert class_map(one).tolist() == [[0, 0, 1]]
    assert class_map(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, 1.0]])).tolist() == [0, 1]


def test_areas_are_shares_of_classes() -> None:
    numbers = numpy.array([[0, 1], [1, 2]])
    assert areas(numbers, ("sky", "road", "car")) == [
        {"class": "sky", "share": 0.25},
        {"class": "road", "share": 0.5},
        {"class": "car", "share": 0.25},
    ]
    assert areas(numpy.array([[0, 1], [0, 0]]), ("foreground",)) == [{"class": "foreground", "share": 0.25}]


def test_background_and_what_is_ignored_stay_as_they_are() -> None:
    image = Image.new("RGB", (4, 4), (40, 80, 120))
    numbers = numpy.array([[0, 1], [-100, 2]])
    pixels = numpy.asarray(blended(image, numbers, is_binary=False)).astype(int)
    assert pixels[0, 0].tolist() == pixels[3, 0].tolist() == [40, 80, 120]
    red, other = (numpy.array(colour) for colour in class_colours(2))
    seen = numpy.array([40, 80, 120])
    assert abs(pixels[0, 3] - (red + seen) / 2).max() <= 1
    assert abs(pixels[3, 3] - (other + seen) / 2).max() <= 1


def test_colours_of_classes_differ_and_do_not_depend_on_their_number() -> None:
    assert len(set(class_colours(30))) == 30
    assert class_colours(30)[:5] == class_colours(5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("places", [(6, 8), (5, 6, 8)])
def test_overlay_shows_input_mask_and_prediction(channels: int, places: tuple[int, ...]) -> None:
    inputs = torch.linspace(-2, 3, channels * 6 * 8 * (places[0] if len(places) == 3 else 1)).view(channels, *places)
    targets, outputs = torch.zeros(1, *places), torch.full((1, *places), -1.0)
    targets[..., :4], outputs[..., 4:] = 1.0, 1.0
    picture = overlay(inputs, targets, outputs)
    assert picture.size == (8 * 3 + 2 * 4, 6)
    seen, asked, said = (numpy.asarray(picture.crop((left, 0, left + 8, 6))).astype(int) for left in (0, 12, 24))
    assert (asked[:, 4:] == seen[:, 4:]).all()
    assert (said[:, :4] == seen[:, :4]).all()
    assert (asked[:, :4, 0] > seen[:, :4, 0]).all(), "foreground is red"
    assert (said[:, 4:, 0] >= seen[:, 4:, 0]).all()
    assert not (said[:, 4:] == seen[:, 4:]).all()


def test_overlay_of_classes(tmp_path: Path) -> None:
    outputs = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 4, (2, 6, 5), generator=torch.Generator().manual_seed(1))
    paths = write_overlays(tmp_path / "overlays", [3, 11], torch.rand(2, 3, 6, 5), targets, outputs)
    assert [path.name for path in paths] == ["sample-000003.png", "sample-000011.png"]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (5 * 3 + 8, 6)


def test_side_by_side_is_as_high_as_the_highest() -> None:
    assert side_by_side([Image.new("RGB", (3, 5)), Image.new("RGB", (4, 2))]).size == (11, 5)


def test_what_has_no_class_for_each_pixel_is_not_overlaid() -> None:
    images = torch.zeros(2, 3, 8, 8)
    assert is_overlaid(images, torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8))
    assert is_overlaid(images, torch.zeros(2, 8, 8), torch.zeros(2, 5, 8, 8))
    assert not is_overlaid(images, torch.zeros(2), torch.zeros(2, 5))
    assert not is_overlaid({"pixels": images}, torch.zeros(2, 8, 8), torch.zeros(2, 5, 8, 8))
    assert not is_overlaid(images, torch.zeros(2, 4, 4), torch.zeros(2, 5, 4, 4))
