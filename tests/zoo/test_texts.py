"""Classification of texts from tables: rows, classes, splits, tokenizers, models and runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.system import events, here, weights
from samestep.errors import EXIT_DONE, EXIT_INPUT, DataError
from samestep.zoo.labels import Row, read_table
from samestep.zoo.language import language_task
from samestep.zoo.texts import Texts, collate_texts, load_texts, text_task
from samestep.zoo.tokenizers import ByteTokenizer, read_tokenizer

Pairs = list[tuple[Any, Any]]


def write(path: Path, rows: Pairs, names: tuple[str, str] = ("text", "label")) -> Path:
    """Write a table of two columns in the format of the suffix."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([names, *rows])
    return path


def sentences(count: int = 60) -> Pairs:
    """Return texts of many lengths; the class depends on one word."""
    return [
        (f"it was {'a very ' * (i % 9)}{'good' if i % 2 else 'bad'} film {i}", "yes" if i % 2 else "no")
        for i in range(count)
    ]


# --- rows -------------------------------------------------------------------------------------------------


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=30)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(texts, st.sampled_from(["a", "b", "0"])), min_size=1, max_size=5))
def test_table_formats_give_equal_rows(tmp_path: Path, rows: Pairs) -> None:
    tables = []
    for suffix in (".csv", ".parquet"):
        path = write(tmp_path / f"table{suffix}", rows)
        read = read_table(str(path), "text", "label", "text_column")
        assert all(row.where.startswith(f"{path}, ") for row in read)
        tables.append([(row.text, row.label, row.problem) for row in read])
    assert all(table == tables[0] for table in tables)
    assert [row[0] for row in tables[0]] == [text if text.strip() else "" for text, _ in rows]


@pytest.fixture
def letters(tmp_path: Path) -> str:
    """Tokenizer file of the letters a and b without an unknown token."""
    from tokenizers import Tokenizer, models

    path = tmp_path / "letters.json"
    Tokenizer(models.BPE({"a": 0, "b": 1, "<eos>": 2}, [])).save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", r"(is not text|cannot be read).*0"), (b"QQQ", "gives no tokens"), (b"", "gives no tokens")],
)
def test_file_that_a_tokenizer_cannot_encode(tmp_path: Path, letters: str, content: bytes, message: str) -> None:
    (tmp_path / "z.txt").write_bytes(content)
    for task in (text_task(("x", "y"), tokenizer=letters), language_task((), tokenizer=letters)):
        with pytest.raises(DataError, match=message):
            task.read(tmp_path / "z.txt")


NUMBERS, NOT_FINITE = ("1", "2", "3"), ("nan", "inf", "-3e")


@pytest.mark.parametrize(
    ("classes", "label", "number"),
    [
        *[(("a", "b"), "b", 1), (("a", "b"), "1", 1), (("a", "b"), "01", 1)],
        *[(("1", "0"), "1", 0), (NUMBERS, "3", 2)],  # names take precedence over numbers
        *[(NOT_FINITE, "inf", 1), (NOT_FINITE, "02", 2)],
        *[(("a", "b"), label, None) for label in ("2", "-1", "1_0", "9" * 5000)],
        *[(NUMBERS, "0", None), (NUMBERS, "01", None)],
    ],
)
def test_label_is_a_class_name_or_a_class_number(classes: tuple[str, ...], label: str, number: int | None) -> None:
    data = Texts([Row("r", "text", label)], ByteTokenizer(), classes)
    if number is not None:
        assert data[0][1] == number
        return
    with pytest.raises(DataError, match="is not a class") as error:
        data[0]
    assert error.value.code == "E_CLASSES"


# --- a dataset --------------------------------------------------------------------------------------------


def test_classes_are_the_sorted_labels_or_the_option(tmp_path: Path) -> None:
    named = write(tmp_path / "a.csv", sentences())
    numbered = write(tmp_path / "b.csv", [(f"text {number}", 10 - number % 3 * 4) for number in range(30)])
    assert load_texts(str(named)).classes == ("no", "yes")
    assert load_texts(str(named), classes=["yes", "no"]).classes == ("yes", "no")
    assert load_texts(str(numbered)).classes == ("2", "6", "10")
    for classes in ([False, True], "yes", ["only"]):  # YAML reads [no, yes] as booleans
        with pytest.raises(DataError) as error:
            load_texts(str(named), classes=classes)  # type: ignore[arg-type]
        assert error.value.code == "E_CLASSES"
    with pytest.raises(DataError, match=r"longest is 10\.5"):
        load_texts(str(named), longest=10.5)  # type: ignore[arg-type]


def test_split_keeps_equal_texts_together_and_is_stable(tmp_path: Path) -> None:
    rows = [(f"text {number % 50}", number % 2) for number in range(100)]
    before = load_texts(str(write(tmp_path / "a.csv", rows)), evaluation_fraction=0.3)
    after = load_texts(str(write(tmp_path / "b.csv", [("new", 1), *rows])), evaluation_fraction=0.3)
    one, other = (
        {text_of(splits.evaluation, index) for index in range(len(splits.evaluation))} for splits in (before, after)
    )
    assert other - {"new"} == one
    assert len(before.evaluation) == 2 * len(one)
    assert len(before.train) + len(before.evaluation) == 100


def text_of(data: Any, index: int) -> str:
    return ByteTokenizer().decode(data[index][0].tolist())


def test_attention_mask_excludes_padding() -> None:
    inputs, labels = collate_texts([(torch.tensor([5, 6, 7]), 1), (torch.tensor([8]), 0)], padding=257)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 257, 257]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert labels.tolist() == [1, 0]


# --- models and tokenizers of files -----------------------------------------------------------------------


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer can be read"):
        read_tokenizer(str(tmp_path))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer can be read"):
        read_tokenizer(str(tmp_path / "broken.json"))


# --- runs -------------------------------------------------------------------------------------------------


TINY = (
    "data.options.longest=48",
    "optimizer.options.lr=1e-3",
    "batch_size=16",
    "microbatches=4",
    "epochs=2",
    "metrics=[]",
)
BAG = ("model.name=helpers.bag_of_tokens:Bag",)


def train(place: Path, processes: int, *overrides: str, name: str) -> dict[str, Any]:
    sets = [*TINY, *overrides]
    assert here("train", "texts", "--processes", processes, "--name", name, *sets, cwd=place) == EXIT_DONE
    run = place / "runs" / name
    slow = ("time", "samples_per_second", "data_seconds")
    logged = [event for kind in ("step", "evaluation", "skipped") for event in events(run, kind)]
    return {
        "weights": weights(run),
        "events": [{key: value for key, value in event.items() if key not in slow} for event in logged],
    }


@pytest.mark.slow
def test_weights_are_equal_on_one_and_three_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", sentences())
    small = (*BAG, "batch_size=4")  # several batches in a window that is sorted by length
    grouped, not_grouped = (
        [train(tmp_path, n, f"data.options.path={path}", *small, *more, name=f"{n}{'-'.join(more)}") for n in (1, 3)]
        for more in ((), ("data.options.group_by_length=false",))
    )
    assert grouped[0] == grouped[1]
    assert not_grouped[0] == not_grouped[1]
    assert grouped[0]["weights"] != not_grouped[0]["weights"]


def test_unusable_rows_stop_the_run_or_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sentences()
    rows[7], rows[20], rows[21] = ("", "yes"), ("what is this", "maybe"), (rows[21][0], "")
    path = write(tmp_path / "a.csv", rows)
    options = (f"data.options.path={path}", "data.options.classes=['no', 'yes']", *BAG)
    for processes in (1, 4):
        sets = [*TINY, *options]
        code = here("train", "texts", "--processes", processes, "--name", f"stop-{processes}", *sets, cwd=tmp_path)
        assert code == EXIT_INPUT
        assert f"{path}, line " in capsys.readouterr().err
    one, four = (train(tmp_path, n, *options, "data.bad_samples=skip", name=f"skip-{n}") for n in (1, 4))
    assert one == four
    left_out = {text for event in one["events"] if event["event"] == "skipped" for text in event["samples"]}
    assert left_out == {
        f"{path}, line 9: no text or path, but ''",
        f"{path}, line 22: the label 'maybe' is not a class",
        f"{path}, line 23: no label",
    }


@pytest.mark.slow
def test_report_shows_texts_with_predictions(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [(f"<b>{text}</b>", label) for text, label in sentences()])
    train(tmp_path, 1, f"data.options.path={path}", *BAG, "epochs=1", name="a")
    folder = tmp_path / "runs/a/evaluation"
    assert here("eval", "a", "--report", folder, "--processes", 2, cwd=tmp_path) == EXIT_DONE
    samples = json.loads((folder / "samples.json").read_text())
    validation = load_texts(str(path), longest=48).evaluation
    assert len(samples) == min(16, len(validation))  # type: ignore[arg-type]
    assert all(sample["prediction"] in ("no", "yes") for sample in samples)
    assert all(("good" in sample["text"]) is (sample["class"] == "yes") for sample in samples)
    assert here("report", "a", cwd=tmp_path) == EXIT_DONE
    page = (tmp_path / "runs/a/report.html").read_text()
    assert page.count("<blockquote>&lt;b&gt;it was") == len(samples)


def test_task_classifies_a_text(tmp_path: Path) -> None:
    task = text_task(("no", "yes"), longest=20)
    (tmp_path / "a.txt").write_text("a good film\n")
    inputs = task.read(tmp_path / "a.txt")
    assert inputs["input_ids"].tolist() == [256, *b"a good film", 256]
    assert inputs["attention_mask"].tolist() == [1] * 13
    classes = task.describe(torch.tensor([[0.0, 1.0]]))["classes"]
    assert [entry["class"] for entry in classes] == ["yes", "no"]
    assert classes[0]["probability"] == pytest.approx(0.731, abs=1e-3)
    for content in (b" \n", b"\xff"):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError):
            task.read(tmp_path / "a.txt")
