"""Decoders of image files, and crops at reduced scale."""

from io import BytesIO
from typing import Any

import numpy
import pytest
import torch
from PIL import Image, ImageFilter
from simplejpeg import decode_jpeg

from helpers.image_kinds import encoded, noise
from samestep.zoo.image_files import SCALES, EncodedImage, image_reader, read_image
from samestep.zoo.image_transforms import MEAN, STD, ImageTransforms, image_transforms
from samestep.zoo.images import load_images

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
