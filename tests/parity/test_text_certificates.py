"""Certificates of the recipes for text on one, two and three processes, with a kill in between."""

import csv
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import EXIT_DONE
from system import answer, here

MODEL = ("--set=model.options.width=16", "--set=model.options.heads=2", "--set=model.options.blocks=1")
LANGUAGE = (
    "language",
    "--set=data.options.train_tokens=2000",
    "--set=data.options.evaluation_tokens=300",
    "--set=model.options.dropout=0.1",
    *MODEL,
)


def texts(place: Path, model: str) -> tuple[str, ...]:
    """The recipe for a small table whose rows are of many lengths, one of which cannot be used."""
    path = place / "table.csv"
    rows = [(f"it was {'very ' * (i % 11)}{'good' if i % 2 else 'bad'}, {i}", i % 2) for i in range(70)]
    rows[11] = ("", 1)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    options = (
        f"data.options.path={path}",
        "data.options.longest=48",
        "batch_size=16",
        f"model.name={model}",
        "metrics=[]",
    )
    return ("texts", *(f"--set={option}" for option in (*options, "data.bad_samples=skip")), *MODEL)


def certificate(capsys: pytest.CaptureFixture[str], place: Path, *arguments: object) -> dict[str, Any]:
    code = here("verify", *arguments, "--json", "--out", place, cwd=place)
    said: dict[str, Any] = answer(capsys)
    assert (code, said["holds"], said["findings"]) == (EXIT_DONE, True, [])
    return said


def recipe(name: str, place: Path) -> tuple[str, ...]:
    if name == "language":
        return LANGUAGE
    if name == "transformers:gpt2":
        return (*LANGUAGE, "--set=model.name=transformers:gpt2")
    return texts(place, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "language",
        "transformers:roberta",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("transformers:bert", "transformers:gpt2")),
    ],
)
def test_exact_is_the_same_bit_for_bit_with_a_kill_in_between(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    arguments = ("--processes", "1,2,3", "--steps", "2", "--kill-at", "2", "--resume-on", "2")
    said = certificate(capsys, tmp_path, *recipe(name, tmp_path), *arguments)
    assert [run["processes"] for run in said["comparisons"]] == [
        "2 processes",
        "3 processes",
        *(f"{number}, killed in step 2, then 2" for number in (1, 2, 3)),
    ]
    for run in said["comparisons"]:
        assert set(run["quantities"].values()) <= {"bits", "-"}  # some models have no buffers
        assert run["first_difference"] is None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["language", "transformers:roberta"])
def test_fast_is_the_same_to_rounding_in_float64(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    arguments = ("--processes", "1,3", "--steps", "2", "--reduction", "fast", "--double")
    said = certificate(capsys, tmp_path, *recipe(name, tmp_path), *arguments)
    assert said["level"] == "1e-12 relative"
    for run in said["comparisons"]:
        for quantity in ("order of samples", "inputs as augmented", "targets", "learning rates"):
            assert run["quantities"][quantity] == "bits"
