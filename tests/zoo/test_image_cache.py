"""Images from a cache: equal pixels, and entries of changed, unreadable and truncated files."""

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import samestep
from helpers.image_kinds import READ, REFUSED, encoded, noise, write
from helpers.system import here
from samestep.config import DataConfig
from samestep.errors import DataError, RecipeError, SamestepError
from samestep.microbatches import Cursor
from samestep.zoo.image_files import ImageSource, open_cache
from samestep.zoo.images import load_images
from samestep.zoo.sample_cache import SampleCache


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "samestep"


def cached(*files: Path, **options: Any) -> tuple[ImageSource, SampleCache]:
    source = ImageSource(**options)
    cache = open_cache(source, files, DataConfig(name="images", cache="decoded"))
    return source, cache


def pixels(source: ImageSource, path: Path) -> bytes:
    return source(path, str(path)).tobytes()


def replace_unnoticed(path: Path, data: bytes) -> None:
    """Replace the contents of a file of the same size, and keep its time."""
    status = path.stat()
    path.write_bytes(data.ljust(status.st_size, b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def test_pixels_of_all_formats_are_equal(tmp_path: Path) -> None:
    files = [write(tmp_path, name) for name in READ]
    expected = [pixels(ImageSource(), file) for file in files]
    source, cache = cached(*files)
    for _ in range(3):  # built, from the cache, from the cache by a later run
        assert [pixels(source, file) for file in files] == expected
        later, _ = cached(*files)
        assert [pixels(later, file) for file in files] == expected
    assert cache.usage()[0] == len(files)
    assert cache.take_reports() == []


def test_cached_file_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(encoded(noise(), "JPEG"))
    source, _ = cached(file)
    before = pixels(source, file)
    replace_unnoticed(file, b"no image")
    with pytest.raises(DataError):
        pixels(ImageSource(), file)
    assert pixels(source, file) == before
    assert pixels(cached(file)[0], file) == before


def test_changed_file_is_decoded_again(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded(noise(), "PNG"))
    source, cache = cached(file)
    before = pixels(source, file)
    other = Image.fromarray(numpy.asarray(noise())[::-1])
    replace_unnoticed(file, encoded(other, "PNG"))
    os.utime(file, ns=(0, 1))
    assert pixels(source, file) == other.tobytes() != before
    assert cache.usage()[0] == 2


@pytest.mark.parametrize("name", [*REFUSED, "missing"])
def test_unreadable_file_has_the_error_of_a_run_without_cache(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name) if name in REFUSED else tmp_path / "missing.jpg"
    with pytest.raises(SamestepError) as expected:
        pixels(ImageSource(), file)
    source, cache = cached(file)
    for _ in range(2):
        with pytest.raises(SamestepError) as error:
            pixels(source, file)
        assert (error.value.code, error.value.value) == (expected.value.code, expected.value.value)
    assert cache.usage()[0] == 0


def test_damaged_entry_is_decoded_again(tmp_path: Path, cache_folder: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(encoded(noise(), "JPEG"))
    before = pixels(cached(file)[0], file)
    [data] = cache_folder.glob("*/*.data")
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    source, cache = cached(file)
    assert pixels(source, file) == before
    [report] = cache.take_reports()
    assert str(file) in report
    assert pixels(cached(file)[0], file) == before


# --- the fixed resize and the crop without a resize ---------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            values = numpy.random.default_rng(number).integers(0, 256, (160 + number, 200, 3), dtype=numpy.uint8)
            Image.fromarray(values).save(tmp_path / "photos" / name / f"{number}.{'jpg' if number % 2 else 'png'}")
    return tmp_path / "photos"


def samples(photos: Path, kind: str, epoch: int = 0, **options: object) -> list[torch.Tensor]:
    """Return the transformed training images of an epoch, each with its own random state."""
    splits = load_images(str(photos), image_size=32, **options)  # type: ignore[arg-type]
    if kind != "none":
        assert splits.open_cache is not None
        splits.open_cache(DataConfig(name="images", cache=kind))  # type: ignore[arg-type]
    batches = samestep.loader(
        splits.train, len(splits.train), collate_fn=lambda batch: torch.stack([image for image, _ in batch]), seed=1
    )
    result = []
    for _ in range(2):  # built, then from the cache
        batches.cursor = Cursor(epoch)
        result += list(batches)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shorter_side": 40},
        {"shorter_side": 40, "augment": {"scale": None}},
        {"shorter_side": 40, "augment": {"scale": None, "randaugment": 9, "random_erasing": 0.5}},
    ],
)
def test_transformed_images_are_equal(options: dict[str, object], photos: Path) -> None:
    first, second = samples(photos, "none", **options)
    assert torch.equal(first, second)
    assert all(torch.equal(images, first) for images in samples(photos, "decoded", **options))
    assert not torch.equal(samples(photos, "none", epoch=1, **options)[0], first)


def test_crops_without_a_resize_have_the_pixels_of_the_image(photos: Path) -> None:
    """Every crop is a part of the resized image, or its mirror image."""
    crops = samples(photos, "decoded", shorter_side=40, augment={"scale": None})[1]
    assert crops.dtype == torch.uint8
    splits = load_images(str(photos), image_size=32)
    source = ImageSource(shorter_side=40)
    is_mirrored = []
    for number, crop in enumerate(crops):
        file = splits.train.samples[number].source  # type: ignore[attr-defined]
        image = torch.from_numpy(numpy.array(source(file, str(file)))).permute(2, 0, 1)
        assert min(image.shape[1:]) == 40
        parts = image.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32)
        plain, mirrored = ((parts == wanted).flatten(1).all(1).any() for wanted in (crop, crop.flip(2)))
        assert plain or mirrored
        is_mirrored.append(bool(mirrored))
    assert {True, False} == set(is_mirrored)


@pytest.mark.parametrize("options", [{}, {"shorter_side": 40, "augment": {"scale": None}}])
def test_collated_images_are_those_of_torch(options: dict[str, Any], photos: Path) -> None:
    splits = load_images(str(photos), image_size=32, **options)
    images = [splits.train[number] for number in range(3)]
    batch, labels = splits.collate(images)
    expected = torch.stack([image for image, _ in images])
    assert torch.equal(batch, expected)
    assert torch.equal(labels, torch.tensor([label for _, label in images]))
    assert splits.prepare is not None
    (normalized, _), other = splits.prepare((batch, labels)), splits.prepare(expected)
    assert normalized.stride() == other.stride()
    assert torch.equal(normalized, other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shorter_side": 20}, "shorter_side is less than image_size"),
        ({"augment": {"scale": None}}, "shorter_side is not set"),
    ],
)
def test_invalid_options(options: dict[str, object], text: str, photos: Path) -> None:
    with pytest.raises(RecipeError, match=text) as error:
        load_images(str(photos), image_size=32, **options)  # type: ignore[arg-type]
    assert error.value.code == "E_VALUE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits", "data.cache=decoded"), "data 'digits' has no cache"),
        (("images", "data.cache_gb=0", "data.options.path=a"), "data.cache_gb"),
    ],
)
def test_invalid_caches_of_recipes(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("train", *arguments, cwd=tmp_path) == 2
    assert message in capsys.readouterr().err
