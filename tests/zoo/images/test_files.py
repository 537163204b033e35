"""Image files: orientation, damage, errors, sizes."""

import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.image_kinds import encoded, noise, write
from samestep.errors import DataError, RunError
from samestep.zoo.images import files
from samestep.zoo.images.files import read_image
from samestep.zoo.images.transforms import MEAN, STD, ImageTransforms


def test_camera_orientation_is_applied(tmp_path: Path) -> None:
    assert read_image(write(tmp_path, "rotated")).size == (20, 40)


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "BMP", "TIFF"])
def test_truncated_image_is_refused(form: str, tmp_path: Path) -> None:
    content, path = encoded(noise(16), form), tmp_path / "cut"
    for length in range(len(content) - 40, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError):
            read_image(path)
    path.write_bytes(content)
    assert read_image(path).size == (16, 16)


@pytest.mark.parametrize("path", ["no-such-file.png", "."])
def test_missing_file_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_image(tmp_path / path)


def test_disk_failure_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's function for opening fails in place of a disk."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.Image, "open", failing)
    with pytest.raises(RunError, match=r"a\.png cannot be read now: Input/output error"):
        read_image(tmp_path / "a.png")


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
