"""What `samestep eval --report` wrote, as it goes into a page."""

import base64
import json
from io import BytesIO
from pathlib import Path

import numpy
import pytest
from PIL import Image

from samestep.errors import InputError
from samestep.tools.report.pictures import find_reports, read_report


def write(folder: Path, classes: int = 2, **others: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    counts = [[7 if row == column else row for column in range(classes)] for row in range(classes)]
    names = [{"name": f"class {number}"} for number in range(classes)]
    data = {"checkpoint": "last", "step": 3, "loss": 0.5, "accuracy": 0.75, "classes": names, "confusion": counts}
    (folder / "classes.json").write_text(json.dumps({**data, **others}))


def draw(path: Path, side: int) -> None:
    path.parent.mkdir(exist_ok=True)
    noise = numpy.random.default_rng(0).integers(0, 255, (side, side, 3)).astype(numpy.uint8)
    Image.fromarray(noise).save(path)


def opened(uri: str) -> Image.Image:
    kind, _, data = uri.partition(";base64,")
    assert kind.startswith("data:image/")
    return Image.open(BytesIO(base64.b64decode(data)))


def test_report_has_values_rows_and_pictures(tmp_path: Path) -> None:
    write(tmp_path)
    draw(tmp_path / "confusion.png", 40)
    draw(tmp_path / "overlays" / "sample-000001.png", 40)
    found = read_report(tmp_path)
    assert found.values == {"loss": "0.5000", "accuracy": "75.00%"}
    assert [row.name for row in found.rows] == ["class 0", "class 1"]
    assert found.confusion is not None
    assert opened(found.confusion.uri).size == (40, 40) == (found.confusion.width, found.confusion.height)
    assert [picture.name for picture in found.overlays] == ["sample-000001"]


def test_large_picture_is_made_smaller(tmp_path: Path) -> None:
    write(tmp_path)
    draw(tmp_path / "confusion.png", 1500)
    found = read_report(tmp_path).confusion
    assert found is not None
    assert opened(found.uri).size == (1200, 1200) == (found.width, found.height)


def test_of_many_classes_and_overlays_some_are_shown(tmp_path: Path) -> None:
    write(tmp_path, classes=60)
    for number in range(10):
        draw(tmp_path / "overlays" / f"sample-{number:06}.png", 8)
    found = read_report(tmp_path)
    assert (len(found.rows), found.classes) == (40, 60)
    assert found.rows[0].f1 == min(row.f1 or 0.0 for row in found.rows)
    assert (len(found.overlays), found.overlays_in_all) == (8, 10)


def test_picture_that_is_damaged_or_missing_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_report(tmp_path).confusion is None
    (tmp_path / "confusion.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    assert read_report(tmp_path).confusion is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"classes": [1], "confusion": [[1]]}', '{"classes": 1}'])
def test_folder_that_holds_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(InputError, match="samestep eval --report"):
        read_report(tmp_path)
    with pytest.raises(InputError, match="samestep eval --report"):
        read_report(tmp_path / "none")


def test_reports_in_a_run_are_found(tmp_path: Path) -> None:
    write(tmp_path / "evaluation")
    write(tmp_path / "another")
    assert find_reports(tmp_path) == [tmp_path / "another", tmp_path / "evaluation"]
