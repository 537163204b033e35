"""Images of lists."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.image_kinds import encoded, plain
from samestep.errors import DataError, InputError
from samestep.zoo.images import LabeledImages, load_image_list

ROWS = [(f"{number}.png", ("dog", "cat", "owl")[number % 3]) for number in range(12)]
SMALL: dict[str, Any] = {"image_size": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve images."""
    for name, _ in ROWS:
        (tmp_path / name).write_bytes(encoded(plain(), "PNG"))
    return tmp_path


def write_list(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str] = ("path", "label")) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(path)


def entries(splits: Any) -> list[tuple[str, int]]:
    """Return file name and label of all entries of both splits."""
    pairs = []
    for part in (splits.train, splits.evaluation):
        assert isinstance(part, LabeledImages)
        pairs += [(sample.source.name, sample.label) for sample in part.samples if isinstance(sample.label, int)]
    return sorted(pairs)


def test_lists_of_paddlevit(folder: Path) -> None:
    """Class numbers are numbers: as text, 10 would come before 2."""
    rows = [(f"{number}.png", number) for number in range(12)]
    (folder / "my images").mkdir()
    (folder / "0.png").rename(folder / "my images" / "0.png")
    lines = [f"{'my images/' * (not number)}{name} {number}\n" for name, number in rows]
    (folder / "train_list.txt").write_text("".join(lines) + "\n", encoding="utf-8")
    (folder / "val_list.txt").write_text("1.png\t11\n2.png\n", encoding="utf-8")
    lists = {"path": str(folder / "train_list.txt"), "evaluation_path": str(folder / "val_list.txt")}
    splits = load_image_list(**lists, **SMALL)
    assert splits.classes == tuple(map(str, range(12)))
    assert entries(splits) == sorted([*rows, ("1.png", 11)])
    assert [target for _, target in map(splits.train.__getitem__, (0, 10))] == [0, 10]
    with pytest.raises(DataError, match=r"val_list\.txt, line 2: no label"):
        splits.evaluation[1]


def test_damaged_class_numbers_are_bad_samples(folder: Path) -> None:
    text = "".join(f"{number}.png {number % 2}\n" for number in range(10)) + f"10.png {'9' * 5000}\n11.png 99999999\n"
    (folder / "list.txt").write_text(text, encoding="utf-8")
    splits = load_image_list(str(folder / "list.txt"), evaluation_path=str(folder / "list.txt"), **SMALL)
    assert splits.classes == ("0", "1")
    for number in (10, 11):
        with pytest.raises(DataError) as error:
            splits.train[number]
        assert error.value.code == "E_CLASSES"


def test_entries_of_a_list(folder: Path) -> None:
    splits = load_image_list(write_list(folder / "list.csv", ROWS), **SMALL)
    assert splits.classes == ("cat", "dog", "owl")
    assert entries(splits) == sorted((name, splits.classes.index(label)) for name, label in ROWS)
    assert 3 <= len(splits.evaluation) <= 5
    image, label = splits.train[0]
    assert (image.shape, type(label)) == ((3, 8, 8), int)


def test_columns_root_and_validation_list(folder: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    columns = ("file", "what")
    first = write_list(lists / "a.csv", ROWS, columns)
    second = write_list(lists / "b.csv", [ROWS[0], ("1.png", "cat "), ("0.png", "cow")], columns)
    options: dict[str, Any] = {"path_column": "file", "label_column": "what", "image_root": str(folder), **SMALL}
    splits = load_image_list(first, evaluation_path=second, **options)
    assert (len(splits.train), len(splits.evaluation)) == (12, 3)
    assert splits.evaluation[1][1] == splits.classes.index("cat")
    with pytest.raises(DataError, match=r"b\.csv, line 4: the label 'cow' is not a class"):
        splits.evaluation[2]


def test_classes_option_defines_the_classes(folder: Path) -> None:
    path = write_list(folder / "list.csv", ROWS)
    splits = load_image_list(path, classes=["owl", "dog"], evaluation_path=path, **SMALL)
    assert splits.classes == ("owl", "dog")
    assert splits.train[0][1] == 1
    with pytest.raises(DataError, match=r"list\.csv, line 3: the label 'cat' is not a class"):
        splits.train[1]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.csv", "file,label\n0.png,cat\n", "E_UNKNOWN_NAME"),
        ("a.csv", "path,label\n0.png,cat\n1.png,cat\n", "E_CLASSES"),
        ("a.txt", "0.png\n1.png\n", "E_UNKNOWN_NAME"),
        ("a.csv", "path,label\n", "E_UNREADABLE"),
        ("a.csv", 'path,label\n"0.png,cat\n', "E_UNREADABLE"),
        ("a.csv", b"path,label\n\xff\xfe,cat\n", "E_UNREADABLE"),
        ("a.parquet", "nothing", "E_UNREADABLE"),
        ("a.xlsx", "", "E_UNREADABLE"),
        ("missing.csv", None, "E_FILE_MISSING"),
    ],
)
def test_invalid_list_is_refused(name: str, text: str | bytes | None, code: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        load_image_list(str(tmp_path / name))
    assert error.value.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"classes": ["a"]}, "E_CLASSES"),
        ({"classes": [True, False]}, "E_CLASSES"),
        ({"classes": ["a", "a "]}, "E_CLASSES"),
        ({"image_size": 0}, "E_VALUE"),
        ({"interpolation": "cubic"}, "E_VALUE"),
        ({"std": [1, 0, 1]}, "E_VALUE"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str, folder: Path) -> None:
    with pytest.raises(InputError) as error:
        load_image_list(write_list(folder / "list.csv", ROWS), **options)
    assert error.value.code == code
