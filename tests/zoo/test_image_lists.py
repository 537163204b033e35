"""Images of lists and of saved datasets."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.image_kinds import encoded, plain
from samestep.errors import DataError, InputError
from samestep.zoo.images import LabeledImages, load_hub_images, load_image_list

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
        pairs += [(sample.source.name, sample.label) for sample in part.samples if sample.label is not None]
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
    second = write_list(lists / "b.csv", [*ROWS[:2], ("0.png", "cow")], columns)
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
    with pytest.raises(DataError) as error:
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


# --- saved datasets --------------------------------------------------------------------------------------


def save(folder: Path, splits: Sequence[str], label: str = "classes", bad: dict[int, Any] | None = None) -> str:
    """Save a dataset of red and grey images; `bad` replaces rows."""
    import datasets
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # else the first progress bar starts a thread

    def rows(shift: int) -> dict[str, list[Any]]:
        made = [
            {"image": {"bytes": encoded(plain((9 + n, 9)), "PNG"), "path": None}, "label": (n + shift) % 2}
            for n in range(10)
        ]
        for place, row in (bad or {}).items():
            made[place] = {**made[place], **row}
        names = ["red", "grey"]
        if label == "text":
            made = [{**row, "label": names[row["label"]]} for row in made]
        return {key: [row[key] for row in made] for key in ("image", "label")}

    kinds = {"classes": datasets.ClassLabel(names=["red", "grey"]), "text": datasets.Value("string")}
    kinds["number"] = datasets.Value("float32")
    features = datasets.Features({"image": datasets.Image(), "label": kinds[label]})
    made = {split: datasets.Dataset.from_dict(rows(number), features=features) for number, split in enumerate(splits)}
    whole = datasets.DatasetDict(made) if splits[0] else made[""]
    whole.save_to_disk(str(folder))
    return str(folder)


def test_saved_splits_are_used(tmp_path: Path) -> None:
    splits = load_hub_images(save(tmp_path / "a", ["train", "validation", "test"]), **SMALL)
    assert (splits.classes, len(splits.train), len(splits.evaluation)) == (("red", "grey"), 10, 10)
    assert [splits.train[place][1] for place in range(3)] == [0, 1, 0]
    assert [splits.evaluation[place][1] for place in range(3)] == [1, 0, 1]
    assert splits.train[0][0].shape == (3, 8, 8)
    assert splits.reads_files


def test_missing_split_or_column_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a", ["train", "test"])
    for options in ({}, {"evaluation_split": "test", "image_column": "label"}, {"train_split": "other"}):
        with pytest.raises(DataError) as error:
            load_hub_images(path, **options, **SMALL)
        assert error.value.code == "E_UNREADABLE"
    assert len(load_hub_images(path, evaluation_split="test", **SMALL).evaluation) == 10
    assert len(load_hub_images(path, evaluation_split=None, **SMALL).train) < 10


def test_bad_rows_are_reported(tmp_path: Path) -> None:
    bad = {1: {"image": None}, 2: {"image": {"bytes": b"no image", "path": "x.jpg"}}, 3: {"label": -1}}
    path = save(tmp_path / "a", ["train"], bad=bad)
    train = load_hub_images(path, evaluation_split="train", **SMALL).train
    message = {1: "row 1: no image", 2: r"row 2 \(x\.jpg\) cannot be read", 3: "row 3: its label is not a class"}
    for place, text in message.items():
        with pytest.raises(DataError, match=text):
            train[place]
    assert isinstance(train[0][0], torch.Tensor)


def test_numbers_of_splits_are_those_of_their_own_names(tmp_path: Path) -> None:
    import datasets  # takes seconds to import

    images, splits = [plain(), plain()], {}
    for split, names in (("train", ["cat", "dog"]), ("validation", ["dog", "cat"]), ("test", ["dog", "cat", "owl"])):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        splits[split] = datasets.Dataset.from_dict({"image": images, "label": ["cat", "dog"]}, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "a"))
    loaded = load_hub_images(str(tmp_path / "a"), **SMALL)
    assert [loaded.train[place][1] for place in range(2)] == [0, 1]
    assert [loaded.evaluation[place][1] for place in range(2)] == [0, 1]
    other = load_hub_images(str(tmp_path / "a"), evaluation_split="test", **SMALL)
    assert [other.evaluation[place][1] for place in range(2)] == [0, 1]
