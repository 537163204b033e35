"""Per-class precision, recall and F1, compared with torchmetrics, as a table and as a plot."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samestep.recipes.class_report import class_rows, draw_confusion, table_lines

COUNTS = [[8, 2, 0], [1, 9, 0], [0, 0, 0]]
NAMES = ["cat", "dog", "owl"]


def test_rows_of_known_counts() -> None:
    cat, dog, owl = class_rows(COUNTS, NAMES)
    assert (cat.name, cat.count, cat.predicted) == ("cat", 10, 9)
    assert (cat.precision, cat.recall, cat.f1) == (8 / 9, 0.8, 16 / 19)
    assert (dog.precision, dog.recall) == (9 / 11, 0.9)
    assert (owl.precision, owl.recall, owl.f1, owl.count) == (None, None, None, 0)


@settings(max_examples=30)
@given(st.integers(2, 5), st.data())
def test_rows_agree_with_scikit_learn(classes: int, data: st.DataObject) -> None:
    from sklearn.metrics import precision_recall_fscore_support  # slow to import

    number = st.integers(0, classes - 1)
    pairs = data.draw(st.lists(st.tuples(number, number), min_size=1, max_size=30))
    targets, predictions = zip(*pairs, strict=True)
    counts = [[pairs.count((target, prediction)) for prediction in range(classes)] for target in range(classes)]
    rows = class_rows(counts, [str(name) for name in range(classes)])
    scores = precision_recall_fscore_support(targets, predictions, labels=range(classes), zero_division=0)
    for name, expected in zip(("precision", "recall", "f1", "count"), scores, strict=True):
        assert [getattr(row, name) or 0.0 for row in rows] == pytest.approx(expected.tolist())


def test_table_of_many_classes_shows_the_lowest_f1() -> None:
    counts = numpy.diag([10] * 100)
    counts[70, 70], counts[70, 3] = 1, 9
    lines = table_lines(class_rows(counts.tolist(), [f"class {number} " + "x" * 50 for number in range(100)]))
    assert lines[1].startswith("class 70 xxx")
    assert lines[2].startswith("class 3 xxx")
    assert len(lines) == 42
    assert lines[-1] == "these are the 40 of 100 classes with the lowest F1"


@pytest.mark.parametrize("classes", [2, 30, 100])
def test_plot_shows_the_matrix(classes: int, tmp_path: Path) -> None:
    """The diagonal is dark, other cells are bright; names may have any characters."""
    names = [f"$1 {{}} \N{CJK UNIFIED IDEOGRAPH-72AC} {number}" for number in range(classes)]
    draw_confusion(numpy.diag([7] * classes).tolist(), names, tmp_path / "a.png")
    draw_confusion(numpy.diag([7] * classes).tolist(), names, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        pixels = numpy.asarray(image.convert("RGB")).astype(int)
    dark = pixels[..., 2] - pixels[..., 0] > 60
    rows, columns = numpy.nonzero(dark)
    assert numpy.corrcoef(rows, columns)[0, 1] > 0.7
