"""Images and masks: pairs, mask values, joint transforms and bad files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.mask_data import draw_images
from samestep.errors import DataError, InputError
from samestep.zoo.masks import IGNORED, MaskCode, read_mask
from samestep.zoo.segmentation import MaskedImages, MaskTransforms, load_segmentation, segmentation_task


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("cells") / "cells", 25)


def names(files: object) -> set[str]:
    assert isinstance(files, MaskedImages)
    return {pair.name for pair in files._pairs}


# --- pairs -----------------------------------------------------------------------------------------------


def test_files_without_a_partner_are_listed(cells: Path, tmp_path: Path) -> None:
    root = shutil.copytree(cells, tmp_path / "cells")
    (root / "masks" / "003.png").unlink()
    (root / "images" / "007.jpg").unlink()
    with pytest.raises(DataError, match="2 without a partner") as error:
        load_segmentation(str(root))
    assert error.value.code == "E_MASK"
    assert f"{root / 'images' / '003.jpg'}, {root / 'masks' / '007.png'}" in error.value.value


def test_names_with_subfolders_and_suffixes(tmp_path: Path) -> None:
    root = draw_images(tmp_path / "cells", 6)
    for folder, suffix in (("images", ""), ("masks", "_mask")):
        (root / folder / "left").mkdir()
        for number, path in enumerate(sorted((root / folder).glob("*.*"))):
            path.rename(root / folder / ("left" if number % 2 else "") / f"{path.stem}{suffix}{path.suffix.upper()}")
    (root / "images" / ".DS_Store").touch()
    (root / "masks" / "notes.txt").touch()
    splits = load_segmentation(str(root), mask_suffix="_mask")
    assert names(splits.train) | names(splits.evaluation) == {"000", "002", "004", "left/001", "left/003", "left/005"}


def test_two_files_of_one_name_are_refused(cells: Path, tmp_path: Path) -> None:
    root = shutil.copytree(cells, tmp_path / "cells")
    shutil.copy(root / "images" / "000.jpg", root / "images" / "000.png")
    with pytest.raises(DataError, match="have the same name"):
        load_segmentation(str(root))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere"}, "there is no folder"),
        ({"path": ".", "evaluation_fraction": 1.0}, "evaluation_fraction is 1.0"),
        ({"path": ".", "fit": "squeeze"}, "fit is 'squeeze'"),
        ({"path": ".", "flips": "vertical"}, "flips is 'vertical'"),
        ({"path": ".", "scale": [0.5]}, "options.scale"),
        ({"path": ".", "image_size": 0}, "image_size is 0"),
        ({"path": ".", "image_size": [32]}, "options.image_size"),
        ({"path": ".", "classes": ["one"]}, "at least two different names"),
        ({"path": ".", "classes": ["a", "a"]}, "at least two different names"),
        ({"path": ".", "classes": ["a", "b"], "mask_values": [0]}, "one value for each of 2 classes"),
        ({"path": ".", "mask_values": [0, 10**30]}, "mask_values"),
        ({"path": ".", "mask_values": [0, 0]}, "twice"),
        ({"path": ".", "mask_values": [0, 1], "ignore_values": [[0, 0, 0]]}, "both numbers and colors"),
        ({"path": ".", "mask_values": [[0, 0, 0], 255]}, "mask_values"),
    ],
)
def test_invalid_options_are_refused(
    cells: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(cells)
    with pytest.raises(InputError) as error:
        load_segmentation(**options)
    assert message in str(error.value)


# --- values ----------------------------------------------------------------------------------------------


def saved(path: Path, values: Any, mode: str | None = None) -> Path:
    image = Image.fromarray(numpy.asarray(values))
    (image.convert(mode) if mode else image).save(path)
    return path


HALF = numpy.array([[0, 0, 1, 1]] * 3, numpy.uint8)


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        (HALF, None),
        (HALF * 255, None),
        (HALF * 255, "1"),
        (HALF.astype(numpy.uint16), None),
        (HALF * 255, "RGB"),
        (HALF * 255, "RGBA"),
        (HALF * 255, "LA"),
    ],
)
def test_binary_mask_formats(tmp_path: Path, values: Any, mode: str | None) -> None:
    mask = read_mask(saved(tmp_path / "mask.png", values, mode), MaskCode())
    assert mask.tolist() == HALF.tolist()


def test_palettes_are_indices_or_colors(tmp_path: Path) -> None:
    image = Image.new("P", (4, 3))
    image.putdata((HALF * 2).flatten().tolist())
    image.putpalette([0, 0, 0, 9, 9, 9, 255, 0, 0])
    image.save(tmp_path / "mask.png")
    by_number = MaskCode(["sky", "road", "car"])
    assert read_mask(tmp_path / "mask.png", by_number).tolist() == (HALF * 2).tolist()
    by_color = MaskCode(["sky", "car"], [[0, 0, 0], [255, 0, 0]])
    assert read_mask(tmp_path / "mask.png", by_color).tolist() == HALF.tolist()


def test_ignored_values_are_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "mask.png", numpy.array([[0, 1, 255]], numpy.uint8))
    assert read_mask(path, MaskCode(["a", "b"], ignore_values=[255])).tolist() == [[0, 1, IGNORED]]
    assert read_mask(path, MaskCode(mask_values=[0, 1], ignore_values=[255])).tolist() == [[0, 1, IGNORED]]


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ([[0, 7]], MaskCode(), "has the unknown value 7 (1 such pixels"),
        ([[0, 3]], MaskCode(["a", "b", "c"]), "has the unknown value 3"),
        ([[0, 3]], MaskCode(["a", "b"], [0, 255]), "mask values 0, 255"),
    ],
)
def test_unknown_values_are_refused(tmp_path: Path, values: list[list[int]], code: MaskCode, message: str) -> None:
    path = saved(tmp_path / "mask.png", numpy.array(values, numpy.uint8))
    with pytest.raises(DataError) as error:
        read_mask(path, code)
    assert str(path) in error.value.value
    assert message in str(error.value)


@given(st.data())
def test_code_maps_values_to_classes(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=9, unique=True))
    code = MaskCode([f"class {number}" for number in range(len(values))], values)
    expected = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=30))
    pixels = numpy.array([values[number] for number in expected])
    assert code.numbers(pixels, "").tolist() == expected


# --- one size --------------------------------------------------------------------------------------------


def striped(width: int, height: int) -> tuple[Image.Image, Any]:
    """Return an image and a mask of random rectangles; the image is white for mask values of 1."""
    random = numpy.random.default_rng(width * height)
    small = random.integers(0, 2, (height // 8 + 1, width // 8 + 1))
    mask = numpy.kron(small, numpy.ones((8, 8), int))[:height, :width].astype(numpy.int16)
    image = Image.fromarray((mask * 255).astype(numpy.uint8)).convert("RGB")
    return image, mask


@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    fit=st.sampled_from(["resize", "crop"]),
    augment=st.sampled_from([None, ("both", (1.0, 1.0)), ("horizontal", (0.4, 0.9))]),
    seed=st.integers(0, 50),
)
def test_image_and_mask_move_together(width: int, height: int, fit: Any, augment: Any, seed: int) -> None:
    image, mask = striped(width, height)
    transforms = MaskTransforms((48, 40), fit, *(augment or ()))
    transform = transforms.validation() if augment is None else transforms.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pixels, numbers = transform(image, mask)
    assert pixels.shape == (3, 48, 40)
    assert numbers.shape == (48, 40)
    bright = pixels[0] > 0
    counted = numbers != IGNORED
    assert counted.any()
    agree = (bright == (numbers == 1))[counted].float().mean()
    assert agree == 1.0 if fit == "crop" else agree > 0.8
    if fit == "crop":
        assert int(counted.sum()) == min(width, 40) * min(height, 48)
        assert not bright[~counted].any()


def test_targets_of_binary_and_class_masks(cells: Path, tmp_path: Path) -> None:
    image, target = load_segmentation(str(cells), image_size=[32, 48]).evaluation[0]
    assert (image.shape, target.shape, target.dtype) == ((3, 32, 48), (1, 32, 48), torch.float32)
    assert set(target.unique().tolist()) == {0.0, 1.0}
    several = draw_images(tmp_path / "several", 6, classes=2)
    splits = load_segmentation(str(several), classes=["ground", "small", "large"], image_size=32)
    assert splits.classes == ("ground", "small", "large")
    _, target = splits.evaluation[0]
    assert (target.shape, target.dtype) == ((32, 32), torch.int64)
    assert set(target.unique().tolist()) <= {0, 1, 2}


# --- task --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_task_segments_an_image_as_evaluation_does(cells: Path, fit: Any) -> None:
    splits = load_segmentation(str(cells), image_size=32, fit=fit)
    assert isinstance(splits.evaluation, MaskedImages)
    pair = splits.evaluation._pairs[0]
    task = segmentation_task(splits.classes, image_size=32, fit=fit)
    assert torch.equal(task.read(pair.image), splits.evaluation[0][0])
    outputs = torch.full((1, 32, 32), -1.0)
    outputs[:, :, 16:] = 1.0
    assert task.describe(outputs) == {"areas": [{"class": "foreground", "share": 0.5}]}
    assert task.picture is not None
    picture = task.picture(pair.image, outputs)
    with Image.open(pair.image) as image:
        assert picture.size == ((32, 32) if fit == "crop" else image.size)


# --- bad files -------------------------------------------------------------------------------------------


def float_mask(image: Path, mask: Path) -> None:
    saved(mask.with_suffix(".tiff"), numpy.full((36, 40), 0.5, numpy.float32))
    mask.unlink()


COLORS = numpy.random.default_rng(0).integers(0, 255, (36, 40, 3)).astype(numpy.uint8)
BAD: dict[str, Callable[[Path, Path], Any]] = {  # functions of an image and its mask
    "mask of another size": lambda image, mask: Image.new("L", (9, 9)).save(mask),
    "truncated image": lambda image, mask: image.write_bytes(image.read_bytes()[:200]),
    "truncated mask": lambda image, mask: mask.write_bytes(mask.read_bytes()[:60]),
    "empty image": lambda image, mask: image.write_bytes(b""),
    "label outside": lambda image, mask: saved(mask, numpy.full((36, 40), 9, numpy.uint8)),
    "floating-point mask": float_mask,
    "colored mask": lambda image, mask: saved(mask, COLORS),
}


def sample_of(root: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sample of a pair of either split."""
    splits = load_segmentation(str(root), image_size=32)
    for part in (splits.train, splits.evaluation):
        assert isinstance(part, MaskedImages)
        for number, pair in enumerate(part._pairs):
            if pair.name == name:
                return part[number]
    raise AssertionError(name)


@pytest.mark.parametrize("kind", BAD)
def test_bad_pair_is_reported(cells: Path, tmp_path: Path, kind: str) -> None:
    root = shutil.copytree(cells, tmp_path / "cells")
    BAD[kind](root / "images" / "004.jpg", root / "masks" / "004.png")
    with pytest.raises(DataError, match=r"004\."):
        sample_of(root, "004")
