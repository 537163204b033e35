"""Image files: orientation, conversion to 8-bit RGB, damage, errors, sizes."""

import errno
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from simplejpeg import decode_jpeg

from helpers.image_kinds import READ, REFUSED, encoded, gray, noise, write
from samestep.errors import DataError, RunError
from samestep.zoo.image_files import SCALES, EncodedImage, image_reader, read_image
from samestep.zoo.image_transforms import MEAN, STD, ImageTransforms, image_transforms
from samestep.zoo.images import load_images


def test_camera_orientation_is_applied(tmp_path: Path) -> None:
    assert read_image(write(tmp_path, "rotated")).size == (20, 40)


def test_disk_failure_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's function for opening fails in place of a disk."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Image, "open", failing)
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


ORIENTATION = 0x0112
read_encoded = image_reader("simplejpeg")


def views(size: int, interpolation: str = "bilinear", **augment: Any) -> list[ImageTransforms]:
    """Return the transforms of Pillow and of simplejpeg."""
    options = {"image_size": size, "interpolation": interpolation, "augment": augment}
    return [image_transforms({**options, "decoder": decoder}, load_images) for decoder in ("pillow", "simplejpeg")]


def smooth(width: int, height: int) -> Image.Image:
    """Return an image without details, which is nearly equal after any kind of resizing."""
    small = noise().resize((8, 8))
    return small.resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(3))


def oriented(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, "JPEG", exif=exif, quality=95)


def rgb(data: bytes) -> torch.Tensor:
    """Return the image of Pillow as `(3, height, width)`."""
    return torch.from_numpy(numpy.array(read_image(BytesIO(data), "image"))).permute(2, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 75},
        {"quality": 95, "subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"progressive": True},
        {"keep_rgb": True},
        {"restart_marker_blocks": 2},
    ],
    ids=str,
)
def test_pixels_of_jpeg_files_are_those_of_pillow(options: dict[str, Any]) -> None:
    for size in (1, 17, 40):
        data = encoded(noise(size), "JPEG", **options)
        assert torch.equal(read_encoded(BytesIO(data), "image").pixels(), rgb(data))


@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied_at_every_scale(orientation: int) -> None:
    data = oriented(smooth(160, 96), orientation)
    image = read_encoded(BytesIO(data), "image")
    full = image.pixels()
    assert (image.height, image.width) == tuple(full.shape[1:])
    assert torch.equal(full, rgb(data))
    for scale in SCALES:
        areas = torch.nn.functional.avg_pool2d(full.float(), scale)
        assert abs(image.pixels(scale) - areas).mean() < 1.5


def crop_of(transforms: ImageTransforms, data: bytes, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a normalized training image, and the state of the generator afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        image = transforms.train()(transforms.reader()(BytesIO(data), "image"))
        return transforms.normalize(image), torch.get_rng_state()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("augment", [{}, {"randaugment": 9, "random_erasing": 1.0}], ids=str)
def test_training_images_of_both_decoders_have_the_same_random_numbers(
    augment: dict[str, Any], interpolation: str
) -> None:
    data = encoded(smooth(640, 400), "JPEG", quality=95)  # large for 32 pixels: most crops have a reduced scale
    for seed in range(12):
        (one, after), (other, after_other) = (
            crop_of(transforms, data, seed) for transforms in views(32, interpolation, **augment)
        )
        assert torch.equal(after, after_other)
        assert one.shape == other.shape == (3, 32, 32)
        difference = (abs(one - other) * torch.tensor(STD).view(3, 1, 1)).mean()
        assert difference < (0.05 if "randaugment" in augment else 0.01)  # of a range of 1


@pytest.mark.parametrize("size", [(500, 375), (90, 700), (1, 40), (30, 30)], ids=str)
def test_validation_images_of_both_decoders_are_close(size: tuple[int, int]) -> None:
    data = encoded(smooth(*size), "JPEG", quality=95)
    for pixels in (24, 224):
        one, other = (
            transforms.normalize(transforms.validation()(transforms.reader()(BytesIO(data), "image")))
            for transforms in views(pixels)
        )
        assert one.shape == other.shape == (3, pixels, pixels)
        assert (abs(one - other) * torch.tensor(STD).view(3, 1, 1)).mean() < 0.01


@pytest.mark.parametrize(("side", "scale"), [(224, 1), (447, 1), (448, 2), (1000, 4), (1792, 8), (4000, 8)])
def test_scale_leaves_at_least_the_pixels_of_the_output(side: int, scale: int) -> None:
    scales = []

    class Recorded(EncodedImage):
        def pixels(self, scale: int = 1) -> torch.Tensor:
            scales.append(scale)
            return super().pixels(scale)

    image = Recorded(decode_jpeg, BytesIO(encoded(Image.new("RGB", (side, side)), "JPEG")), "image")
    result = views(224, scale=[1.0, 1.0])[1].train()(image)
    assert scales == [scale]
    assert (result.shape, result.dtype) == ((3, 224, 224), torch.uint8)


def test_normalization_of_bytes_is_that_of_floats() -> None:
    transforms = views(8)[1]
    pixels = torch.arange(2 * 3 * 64).to(torch.uint8).reshape(2, 3, 8, 8)
    images, labels = transforms.normalize([pixels, torch.tensor([1, 2])])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(images, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert labels.tolist() == [1, 2]
    assert transforms.normalize(images) is images
