"""Certificates of the shipped recipes on up to eight processes, also killed and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.system import answer, here
from samestep.errors import EXIT_DONE
from samestep.recipes.recipe_files import make_recipe, recipe_data

EIGHT = (1, 2, 3, 4, 5, 8)
# Equal bits with every reduction.
EXACT_ALWAYS = ("order of samples", "inputs as augmented", "targets", "learning rates")


def recipe_of(name: str, pictures: Path) -> tuple[str, ...]:
    """Return the arguments of a shipped recipe; small images and a small model keep the run short."""
    if name.startswith("vit"):
        model = [f"model.options.{option}" for option in ("img_size=32", "patch_size=8", "depth=2")]
        settings = (f"data.options.path={pictures}", "data.options.image_size=32", "batch_size=22", "metrics=[]")
        return (name, *settings, *model)
    if name != "images":
        return (name,)
    folder = f"data.options.path={pictures}"
    settings = (folder, "data.options.image_size=64", "batch_size=24", "microbatches=8", "metrics=[]")
    return (name, *settings, "model.name=torchvision:resnet18")


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
        pytest.param("vit_tiny_patch16_224", (1, 2, 3), marks=pytest.mark.long),
    ],
)
def test_exact_reduction_gives_equal_bits_also_after_a_kill(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pictures: Path, name: str, processes: tuple[int, ...]
) -> None:
    recipe = recipe_of(name, pictures)
    counts = ",".join(map(str, processes))
    data = certificate(
        capsys,
        tmp_path,
        *recipe,
        "--processes",
        counts,
        "--exact",
        "--steps",
        "2",
        "--kill-at",
        "2",
        "--resume-on",
        "3",
    )
    assert [run["processes"] for run in data["comparisons"]] == [
        *(f"{number} processes" for number in processes[1:]),
        *(f"{number}, killed in step 2, then 3" for number in processes),
    ]
    for run in data["comparisons"]:
        assert set(run["quantities"].values()) <= {"bits", "-"}  # - : the token model has no buffers
        assert run["first_difference"] is None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["tokens", *(pytest.param(name, marks=pytest.mark.long) for name in ("digits", "images"))]
)
def test_fast_reduction_differs_by_rounding_in_float64(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pictures: Path, name: str
) -> None:
    recipe = recipe_of(name, pictures)
    data = certificate(
        capsys, tmp_path, *recipe, "--processes", "1,3,4", "--steps", "2", "step.reduction=fast", "--double"
    )
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
