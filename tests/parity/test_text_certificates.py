"""Certificates of the text recipes on one and three processes, also killed and resumed."""

import csv
from pathlib import Path
from typing import Any

import pytest

from helpers.system import answer, here
from samestep.errors import EXIT_DONE

GPT = ("model.options.n_embd=16", "model.options.n_head=2", "model.options.n_layer=1")
SIZES = "{hidden_size: 16, intermediate_size: 64, num_attention_heads: 2, num_hidden_layers: 1}"
GPT2, BERT, ROBERTA = (
    f"transformers:{name}"
    for name in ("GPT2LMHeadModel", "BertForSequenceClassification", "RobertaForSequenceClassification")
)
LANGUAGE = (
    "language",
    "data.options.train_tokens=2000",
    "data.options.evaluation_tokens=300",
    "model.options.dropout=0.1",
)


def text_recipe(root: Path, model: str) -> tuple[str, ...]:
    """Return the arguments of the recipe `texts` for a small table of texts of many lengths, one of them unusable."""
    path = root / "table.csv"
    rows = [(f"it was {'very ' * (i % 11)}{'good' if i % 2 else 'bad'}, {i}", i % 2) for i in range(70)]
    rows[11] = ("", 1)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    options = (
        f"data.options.path={path}",
        "data.options.longest=48",
        "batch_size=16",
        f"model={{name: '{model}', options: {SIZES}}}",
        "metrics=[]",
    )
    return ("texts", *options, "data.bad_samples=skip")


def certificate(capsys: pytest.CaptureFixture[str], root: Path, *arguments: object) -> dict[str, Any]:
    code = here("verify", *arguments, "--json", "--out", root, cwd=root)
    data: dict[str, Any] = answer(capsys)
    assert (code, data["holds"], data["findings"]) == (EXIT_DONE, True, [])
    return data


def recipe(name: str, root: Path) -> tuple[str, ...]:
    if name == "language":
        return (*LANGUAGE, *GPT)
    if name == GPT2:
        return (*LANGUAGE[:-1], *GPT, f"model.name={GPT2}")
    return text_recipe(root, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "language",
        *(pytest.param(name, marks=pytest.mark.long) for name in (ROBERTA, BERT, GPT2)),
    ],
)
def test_exact_reduction_gives_equal_bits_also_after_a_kill(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    arguments = ("--processes", "1,3", "--exact", "--steps", "2", "--kill-at", "2", "--resume-on", "2")
    data = certificate(capsys, tmp_path, *recipe(name, tmp_path), *arguments)
    assert [run["processes"] for run in data["comparisons"]] == [
        "3 processes",
        *(f"{number}, killed in step 2, then 2" for number in (1, 3)),
    ]
    for run in data["comparisons"]:
        assert set(run["quantities"].values()) <= {"bits", "-"}  # some models have no buffers
        assert run["first_difference"] is None
