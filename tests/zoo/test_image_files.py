"""Image files: orientation, conversion to 8-bit RGB, damage, errors, sizes."""

import errno
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.image_kinds import READ, REFUSED, encoded, gray, write
from samestep.errors import DataError, RunError
from samestep.zoo.image_files import read_image
from samestep.zoo.image_transforms import MEAN, STD, ImageTransforms


def test_camera_orientation_is_applied(tmp_path: Path) -> None:
    assert read_image(write(tmp_path, "rotated")).size == (20, 40)


def test_disk_failure_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's function for opening fails in place of a disk."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Image, "open", failing)
    with pytest.raises(RunError, match=r"a\.png cannot be read now: Input/output error") as error:
        read_image(tmp_path / "a.png")
    assert error.value.code == "E_IO"


@given(width=st.integers(1, 300), height=st.integers(1, 300), size=st.integers(1, 64))
def test_images_of_any_size_are_resized(width: int, height: int, size: int) -> None:
    transforms = ImageTransforms(image_size=size, crop_fraction=0.875, interpolation="bilinear", mean=MEAN, std=STD)
    assert transforms.validation()(Image.new("RGB", (width, height))).shape == (3, size, size)


def test_very_long_image_is_center_cropped() -> None:
    """A resized line of 60,000 pixels would have 4 billion."""
    image = Image.new("RGB", (1, 60_000), "white")
    image.paste("black", (0, 0, 1, 20_000))
    transforms = ImageTransforms(
        image_size=224, crop_fraction=1.0, interpolation="bicubic", mean=[0.0] * 3, std=[1.0] * 3
    )
    assert (transforms.validation()(image) == 1).all()


@pytest.mark.parametrize("name", READ)
def test_image_is_read_as_rgb(name: str, tmp_path: Path) -> None:
    image = read_image(write(tmp_path, name))
    assert image.mode == "RGB"
    seen = numpy.asarray(image).reshape(-1, 3)
    assert abs(seen.astype(int) - READ[name][2]).max() <= 3  # of JPEG


@pytest.mark.parametrize("name", REFUSED)
def test_image_without_defined_colors_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    with pytest.raises(DataError, match=REFUSED[name][2]) as error:
        read_image(path)
    assert str(path) in error.value.value


@given(values=st.lists(st.integers(0, 65_535), min_size=64, max_size=64))
def test_sixteen_bits_are_rounded_to_eight(values: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "sixteen.png"
    path.write_bytes(encoded(gray(values, numpy.uint16), "PNG"))
    pixels = numpy.asarray(read_image(path))[..., 0].ravel()
    assert abs(pixels - numpy.asarray(values) / 257).max() <= 0.5


def test_white_of_twelve_bits(tmp_path: Path) -> None:
    """The largest value of a 12-bit TIFF is white; Pillow opens such files as 16-bit images."""
    path = tmp_path / "twelve.tif"
    data = bytearray(encoded(gray([4095] * 64, numpy.uint16), "TIFF"))
    packed = b"\xff" * (64 * 12 // 8)
    at = data.find(numpy.asarray([4095] * 64, dtype=numpy.uint16).tobytes())
    data[at : at + len(packed)] = packed
    tag = data.find((258).to_bytes(2, "little") + (3).to_bytes(2, "little"))
    data[tag + 8 : tag + 10] = (12).to_bytes(2, "little")
    path.write_bytes(data)
    with Image.open(path) as image:
        assert (image.mode, int(numpy.asarray(image).max())) == ("I;16", 4095)
    assert numpy.asarray(read_image(path)).min() == 255
