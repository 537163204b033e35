"""Certificates of the shipped recipes on up to eight processes, also killed and resumed."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.small_recipes import IMAGES
from helpers.system import answer, here
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import make_recipe, recipe_data

EIGHT = (1, 2, 3, 4, 5, 8)
# Equal bits with every reduction.
EXACT_ALWAYS = ("order of samples", "inputs as augmented", "targets", "learning rates")
GPT2, BERT, ROBERTA = (
    f"transformers:{name}"
    for name in ("GPT2LMHeadModel", "BertForSequenceClassification", "RobertaForSequenceClassification")
)
LANGUAGE = (
    "language",
    "data.options.train_tokens=2000",
    "data.options.evaluation_tokens=300",
    *(f"model.options.{option}" for option in ("n_embd=16", "n_head=2", "n_layer=1")),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of texts of many lengths, one of them unusable."""
    path = tmp_path_factory.mktemp("texts") / "table.csv"
    rows = [(f"it was {'very ' * (i % 11)}{'good' if i % 2 else 'bad'}, {i}", i % 2) for i in range(70)]
    rows[11] = ("", 1)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


@pytest.fixture
def recipe(name: str, pictures: Path, table: Path) -> tuple[str, ...]:
    """Arguments of a shipped recipe; small inputs and a small model keep the run short."""
    if name == "language":
        return (*LANGUAGE, "model.options.dropout=0.1")
    if name == GPT2:
        return (*LANGUAGE, f"model.name={GPT2}")
    if name in (BERT, ROBERTA):
        sizes = "{hidden_size: 16, intermediate_size: 64, num_attention_heads: 2, num_hidden_layers: 1}"
        data = (f"data.options.path={table}", "data.options.longest=48", "data.bad_samples=skip", "batch_size=16")
        return ("texts", *data, f"model={{name: '{name}', options: {sizes}}}", "metrics=[]")
    path = f"data.options.path={pictures}"
    if name.startswith("vit"):
        model = [f"model.options.{option}" for option in ("img_size=32", "patch_size=8", "depth=2")]
        return (name, path, "data.options.image_size=32", "batch_size=22", "metrics=[]", *model)
    return (name, path, *IMAGES) if name == "images" else (name,)


def certificate(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> dict[str, Any]:
    code = here("verify", *arguments, "--json", "--out", folder, cwd=folder)
    data: dict[str, Any] = answer(capsys)
    assert (code, data["holds"], data["findings"]) == (EXIT_DONE, True, [])
    assert json.loads((folder / "certificate.json").read_text()).items() <= data.items()
    assert recipe_data(make_recipe(data["recipe"], (), origin="certificate")) == data["recipe"]
    return data


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("digits", (1, 8)),
        pytest.param("images", (1, 2, 3, 4), marks=pytest.mark.long),
        pytest.param("tokens", EIGHT, marks=pytest.mark.long),
        *(
            pytest.param(name, (1, 2, 3), marks=pytest.mark.long)
            for name in ("vit_tiny_patch16_224", ROBERTA, BERT, GPT2)
        ),
        ("language", (1, 3)),
    ],
)
def test_exact_reduction_gives_equal_bits_also_after_a_kill(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: tuple[str, ...], processes: tuple[int, ...]
) -> None:
    counts = ",".join(map(str, processes))
    options = ("--exact", "--steps", 2, "--kill-at", 2, "--resume-on", 3)
    data = certificate(capsys, tmp_path, *recipe, "--processes", counts, *options)
    assert [run["processes"] for run in data["comparisons"]] == [
        *(f"{number} processes" for number in processes[1:]),
        *(f"{number}, killed in step 2, then 3" for number in processes),
    ]
    for run in data["comparisons"]:
        assert set(run["quantities"].values()) <= {"bits", "-"}  # - : some models have no buffers
        assert run["first_difference"] is None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["tokens", *(pytest.param(name, marks=pytest.mark.long) for name in ("digits", "images"))]
)
def test_fast_reduction_differs_by_rounding_in_float64(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: tuple[str, ...]
) -> None:
    options = ("--processes", "1,3,4", "--steps", 2, "step.reduction=fast", "--double")
    data = certificate(capsys, tmp_path, *recipe, *options)
    assert (data["double"], data["level"], data["modules"][0]["reduction"]) == (True, "rounding", "fast")
    for run in data["comparisons"]:
        for quantity in EXACT_ALWAYS:
            assert run["quantities"][quantity] == "bits"
        gradients = run["quantities"]["gradients"]
        assert gradients == "bits" or float(gradients) <= 1e-12


@pytest.mark.slow
def test_token_recipe_on_four_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = certificate(capsys, tmp_path, "tokens", "--processes", "1,4", "--steps", "2", "--exact")
    [run] = data["comparisons"]
    absent = {"buffers", "written files"}  # the model has none, and the recipe writes none in a trial
    assert {name for name, verdict in run["quantities"].items() if verdict != "bits"} == absent
    page = (tmp_path / "certificate.html").read_text(encoding="utf-8")
    assert "holds: 2 runs computed the same, bit for bit" in page
    assert "http" not in page  # the page is self-contained
