"""Output of `samestep eval --report`, as data of the page."""

import base64
import json
from io import BytesIO
from pathlib import Path

import numpy
import pytest
from PIL import Image

from samestep.errors import InputError
from samestep.tools.report.results import read_class_report


def write(folder: Path, classes: int = 2, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    counts = [[7 if row == column else row for column in range(classes)] for row in range(classes)]
    names = [{"name": f"class {number}"} for number in range(classes)]
    data = {"checkpoint": "last", "step": 3, "loss": 0.5, "accuracy": 0.75, "classes": names, "confusion": counts}
    (folder / "classes.json").write_text(json.dumps({**data, **changes}))


def draw(path: Path, side: int) -> None:
    path.parent.mkdir(exist_ok=True)
    noise = numpy.random.default_rng(0).integers(0, 255, (side, side, 3)).astype(numpy.uint8)
    Image.fromarray(noise).save(path)


def open_uri(uri: str) -> Image.Image:
    kind, _, data = uri.partition(";base64,")
    assert kind.startswith("data:image/")
    return Image.open(BytesIO(base64.b64decode(data)))


def test_report_has_values_rows_and_pictures(tmp_path: Path) -> None:
    write(tmp_path)
    draw(tmp_path / "confusion.png", 40)
    draw(tmp_path / "overlays" / "sample-000001.png", 40)
    report = read_class_report(tmp_path)
    assert report.values == {"loss": "0.5000", "accuracy": "75.00%"}
    assert [row.name for row in report.rows] == ["class 0", "class 1"]
    assert report.confusion is not None
    assert open_uri(report.confusion.uri).size == (40, 40) == (report.confusion.width, report.confusion.height)
    assert [picture.name for picture in report.overlays] == ["sample-000001"]


def test_large_picture_is_scaled_down(tmp_path: Path) -> None:
    write(tmp_path)
    draw(tmp_path / "confusion.png", 1500)
    picture = read_class_report(tmp_path).confusion
    assert picture is not None
    assert open_uri(picture.uri).size == (1200, 1200) == (picture.width, picture.height)


def test_numbers_of_rows_and_overlays_are_limited(tmp_path: Path) -> None:
    write(tmp_path, classes=60)
    for number in range(10):
        draw(tmp_path / "overlays" / f"sample-{number:06}.png", 8)
    report = read_class_report(tmp_path)
    assert (len(report.rows), report.classes) == (40, 60)
    assert report.rows[0].f1 == min(row.f1 or 0.0 for row in report.rows)
    assert (len(report.overlays), report.overlay_count) == (8, 10)


def test_damaged_and_missing_pictures_are_omitted(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_class_report(tmp_path).confusion is None
    (tmp_path / "confusion.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    assert read_class_report(tmp_path).confusion is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"classes": [1], "confusion": [[1]]}', '{"classes": 1}'])
def test_folder_with_other_content(text: str, tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(text)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="cannot be read") as caught:
            read_class_report(folder)
        assert caught.value.code == "E_UNREADABLE"
