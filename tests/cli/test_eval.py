"""`samestep eval --report`: the same table and picture on any number of processes."""

import json
from pathlib import Path

import pytest

from helpers.system import answer, here, tree
from samestep.recipes.class_report import class_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, which gets some digits right."""
    place = tmp_path_factory.mktemp("digits")
    sizes = ("epochs=2", "batch_size=128", "microbatches=4", "model.options.width=8")
    assert here("train", "digits", "--name", "a", *sizes, cwd=place) == 0
    return place / "runs" / "a"


@pytest.fixture(scope="module")
def reports(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("reports")
    for processes in (1, 3):
        folder = place / f"new/on-{processes}"
        assert here("eval", digits, "--report", folder, "--processes", processes, cwd=place) == 0
    return [place / f"new/on-{processes}" for processes in (1, 3)]


def test_report_is_the_same_on_any_number_of_processes(reports: list[Path]) -> None:
    for name in ("classes.json", "confusion.png"):
        one, three = ((folder / name).read_bytes() for folder in reports)
        assert one == three, name
        assert len(one) > 1000
    samples = [json.loads((folder / "samples.json").read_bytes()) for folder in reports]
    assert samples[0] == samples[1]
    assert [entry["sample"] for entry in samples[0]] == list(range(16))
    pictures = [tree(folder / "overlays") for folder in reports]
    assert list(pictures[0]) == [f"sample-{number:06}.png" for number in range(16)]
    assert pictures[0] == pictures[1]
    right = sum(entry["class"] == entry["prediction"] for entry in samples[0])
    assert right > 4  # by chance, one or two


def test_report_counts_every_sample_once(reports: list[Path], digits: Path) -> None:
    result = json.loads((reports[0] / "classes.json").read_text(encoding="utf-8"))
    counts = result["confusion"]
    assert sum(map(sum, counts)) == result["samples"] == 360
    assert sum(counts[number][number] for number in range(10)) / 360 == pytest.approx(result["accuracy"])
    rows = class_rows(counts, [row["name"] for row in result["classes"]])
    assert [row.recall for row in rows] == [row["recall"] for row in result["classes"]]
    assert result["balanced_accuracy"] == pytest.approx(sum(row.recall or 0 for row in rows) / 10)
    assert result["checkpoint"].startswith(str(digits))


def test_table_is_printed_and_json_stays_one_object(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("eval", digits, "--report", tmp_path / "r", cwd=tmp_path) == 0
    lines = capfd.readouterr().out.splitlines()
    heads = [line.split()[0] for line in lines if line]
    assert heads[:6] == ["checkpoint", "loss", "samples", "accuracy", "balanced_accuracy", "class"]
    assert heads[6:16] == [str(digit) for digit in range(10)]
    assert any(line.startswith("report ") and "confusion.png" in line for line in lines)
    assert here("eval", digits, "--report", tmp_path / "r", "--json", cwd=tmp_path) == 0
    result = answer(capfd)
    assert (result["samples"], "by_class" in result) == (360, False)


def test_report_that_cannot_be_written_is_refused_before_anything_is_computed(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert here("eval", digits, "--report", tmp_path / "file" / "r", cwd=tmp_path) == 2
    assert "--report" in capfd.readouterr().err
