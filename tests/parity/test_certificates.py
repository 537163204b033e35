"""Certificates of the recipes that ship, on up to eight processes, with a kill in between."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samestep.errors import EXIT_DONE
from system import answer, here

EIGHT = (1, 2, 3, 4, 5, 8)
# Where everything is the same by construction, whatever the reduction.
EXACT_ALWAYS = ("order of samples", "inputs as augmented", "targets", "learning rates")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs of many sizes."""
    root = tmp_path_factory.mktemp("images") / "pictures"
    for number in range(60):
        folder = root / ("dark" if number % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        shade = 40 + number if number % 2 else 150 + number
        Image.effect_noise((40 + number, 70 - number // 2), shade).convert("RGB").save(folder / f"{number:02}.jpg")
    return root


def recipe_of(name: str, pictures: Path) -> tuple[str, ...]:
    """A recipe that ships, with what it needs to be run here: small images, and a net that is quick on them."""
    if name.startswith("vit"):
        sizes = ("data.image_size=32", "model.img_size=32", "model.patch_size=8", "model.depth=2")
        return (name, *(f"--set={each}" for each in (f"data.path={pictures}", "batch_size=22", "metrics=[]", *sizes)))
    if name != "images":
        return (name,)
    settings = ("image_size=64", "batch_size=24", "metrics=[]")
    sets = [f"--set={'data.options.' if key == 'image_size=64' else ''}{key}" for key in settings]
    return (name, f"--set=data.options.path={pictures}", *sets, "--set=model.name=torchvision:resnet18")


def certificate(capsys: pytest.CaptureFixture[str], place: Path, *arguments: object) -> dict[str, Any]:
    code = here("verify", *arguments, "--json", "--out", place, cwd=place)
    said: dict[str, Any] = answer(capsys)
    assert (code, said["holds"], said["findings"]) == (EXIT_DONE, True, [])
    assert json.loads((place / "certificate.json").read_text()).items() <= said.items()
    return said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "processes"),
    [("digits", EIGHT), ("images", (1, 2, 3, 4)), ("tokens", EIGHT), ("vit_tiny_patch16_224", (1, 2, 3))],
)
def test_exact_is_the_same_bit_for_bit_with_a_kill_in_between(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pictures: Path, name: str, processes: tuple[int, ...]
) -> None:
    recipe = recipe_of(name, pictures)
    counts = ",".join(map(str, processes))
    said = certificate(
        capsys, tmp_path, *recipe, "--processes", counts, "--steps", "2", "--kill-at", "2", "--resume-on", "3"
    )
    assert [run["processes"] for run in said["comparisons"]] == [
        *(f"{number} processes" for number in processes[1:]),
        *(f"{number}, killed in step 2, then 3" for number in processes),
    ]
    for run in said["comparisons"]:
        assert set(run["quantities"].values()) <= {"bits", "-"}  # the token model has no buffers
        assert run["first_difference"] is None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["digits", "tokens", pytest.param("images", marks=pytest.mark.long)])
def test_fast_is_the_same_to_rounding_in_float64(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pictures: Path, name: str
) -> None:
    recipe = recipe_of(name, pictures)
    said = certificate(
        capsys, tmp_path, *recipe, "--processes", "1,3,4", "--steps", "2", "--reduction", "fast", "--double"
    )
    assert (said["precision"], said["reduction"], said["level"]) == ("float64", "fast", "1e-12 relative")
    for run in said["comparisons"]:
        for quantity in EXACT_ALWAYS:
            assert run["quantities"][quantity] == "bits"
        gradients = run["quantities"]["gradients"]
        assert gradients == "bits" or float(gradients) <= 1e-12


@pytest.mark.slow
def test_token_recipe_on_four_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = certificate(capsys, tmp_path, "tokens", "--processes", "1,4", "--steps", "2")
    [run] = said["comparisons"]
    assert {name for name, verdict in run["quantities"].items() if verdict != "bits"} == {"buffers"}  # it has none
    page = (tmp_path / "certificate.html").read_text(encoding="utf-8")
    assert "holds: 2 runs computed the same, bit for bit" in page
    assert "http" not in page  # nothing is loaded from anywhere
