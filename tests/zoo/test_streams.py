"""Streams of recipes: samples of all formats and columns, and errors that name files and options."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from samestep.errors import DataError, InputError
from samestep.zoo.image_files import read_image
from samestep.zoo.image_transforms import MEAN, STD, ImageTransforms
from samestep.zoo.images import load_stream_images

PIXELS = numpy.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=numpy.uint8)
CLASSES = ["cat", "dog", "bird"]


def encoded(kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.fromarray(PIXELS).save(file, kind)
    return file.getvalue()


def write(folder: Path, *samples: Any) -> str:
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(samples)), folder / "0.parquet")
    return str(folder)


def load(path: str, **options: Any) -> Any:
    return load_stream_images(path, evaluation_path=path, classes=CLASSES, image_size=32, **options)


@pytest.mark.parametrize(
    ("label", "number"),
    [
        *[("cat", 0), ("dog\n", 1), (b"dog", 1), ("bird", 2)],
        *[(1, 1), (b"1\n", 1), ("0", 0), ("02", 2), (b"002", 2), ("2\n", 2)],
    ],
)
def test_labels_are_names_or_numbers(tmp_path: Path, label: object, number: int) -> None:
    splits = load(write(tmp_path / "photos", {"image": encoded(), "label": label}))
    assert splits.evaluation[0][1] == number
    assert splits.classes == ("cat", "dog", "bird")


NUMBERS, NOT_FINITE = ["1", "2", "3"], ["nan", "inf", "-3e"]


@pytest.mark.parametrize(
    ("classes", "label", "number"),
    [
        *[(NUMBERS, 0, 0), (NUMBERS, 1, 1), (NUMBERS, "1", 0), (NUMBERS, b"3", 2)],
        *[(10, 7, 7), (10, b"7\n", 7)],
        *[(NOT_FINITE, "inf", 1), (NOT_FINITE, "02", 2)],
    ],
)
def test_integers_are_class_numbers_and_texts_are_names(
    tmp_path: Path, classes: Any, label: object, number: int
) -> None:
    path = write(tmp_path / "photos", {"image": encoded(), "label": label})
    splits = load_stream_images(path, evaluation_path=path, classes=classes, image_size=32)
    assert splits.evaluation[0][1] == number


@pytest.mark.parametrize(
    ("classes", "label"),
    [
        (NUMBERS, 3),
        (NUMBERS, "0"),
        (NUMBERS, "01"),
        (3, "03"),
        (CLASSES, -1),
        (CLASSES, "-1"),
        (CLASSES, "1_0"),
        (CLASSES, "9" * 5000),
    ],
)
def test_number_that_is_no_class_is_refused(tmp_path: Path, classes: Any, label: object) -> None:
    path = write(tmp_path / "photos", {"image": encoded(), "label": label})
    with pytest.raises(DataError) as error:
        load_stream_images(path, evaluation_path=path, classes=classes, image_size=32).evaluation[0]
    assert error.value.code == "E_CLASSES"


def test_images_are_those_of_other_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "photos", {"image": encoded("JPEG"), "label": 1})
    splits = load(path)
    transforms = ImageTransforms(32, 0.875, "bilinear", MEAN, STD)
    (tmp_path / "one.jpg").write_bytes(encoded("JPEG"))
    expected = transforms.validation()(read_image(tmp_path / "one.jpg"))
    assert torch.equal(splits.evaluation[0][0], expected)


def test_other_columns(tmp_path: Path) -> None:
    rows = {"photo": [{"bytes": encoded(), "path": "a"}], "kind": ["dog"], "other": [1]}
    (tmp_path / "table").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "table/a.parquet")
    image, label = load(str(tmp_path / "table"), image_column="photo", label_column="kind").evaluation[0]
    assert (image.shape, label) == ((3, 32, 32), 1)
    with pytest.raises(DataError, match=r"no (column|label)|no encoded") as missing:
        load(str(tmp_path / "table"), label_column="kind")
    assert missing.value.code == "E_UNKNOWN_NAME"


SAMPLES: Mapping[str, tuple[dict[str, Any], str]] = {
    "label": ({"image": encoded(), "label": "fish"}, "E_CLASSES"),
    "number": ({"image": encoded(), "label": 3}, "E_CLASSES"),
    "fraction": ({"image": encoded(), "label": 0.5}, "E_CLASSES"),
    "image": ({"image": encoded()[:100], "label": 1}, "E_UNREADABLE"),
    "text": ({"image": "a.png", "label": 1}, "E_UNKNOWN_NAME"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_unusable_sample_is_named(tmp_path: Path, name: str) -> None:
    sample, code = SAMPLES[name]
    splits = load(write(tmp_path / "photos", sample))
    with pytest.raises(InputError, match=r"photos/0\.parquet, sample 0") as failed:
        splits.train[0]
    assert failed.value.code == code


@pytest.mark.parametrize(("options", "code"), [({"window": 0}, "E_VALUE"), ({"path": "missing"}, "E_FILE_MISSING")])
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    path = write(tmp_path / "photos", {"image": encoded(), "label": 1})
    with pytest.raises(InputError) as failed:
        load(**{"path": path, **options})
    assert failed.value.code == code


@pytest.mark.parametrize("classes", [1, True, "cat", ["cat"], ["cat", "cat"], None])
def test_classes_are_names_or_their_number(classes: Any) -> None:
    with pytest.raises(InputError) as failed:
        load_stream_images("photos", evaluation_path="photos", classes=classes)
    assert failed.value.code == "E_CLASSES"
