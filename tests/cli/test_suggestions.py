"""Each suggestion of an error about a likely mistake is fed back until the command is accepted."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from samestep.cli.main import parse_arguments
from samestep.cli.models import files_of
from samestep.cli.train import Train
from samestep.errors import InputError, RecipeError, SamestepError
from samestep.recipes.recipe_files import load_recipe, recipe_for, require_paths
from samestep.runs import not_a_run, run_folder

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
# "Here is my folder", names, numbers and forms of other tools.
MISTAKES = [
    "photos",
    "images photos",
    "train photos",
    "train ./photos",
    "train images",
    "train images foto",
    "train images --data photos",
    "train images --data=photos",
    "train images --data-path photos",
    "train images -d photos",
    "train images --dataset photos",
    "train images data=photos",
    "train images data.path=photos",
    "train images dataset=photos",
    "train images --set data.options.path=photos",
    "train images data.options.path=fotos",
    "train image photos",
    "train resnet18",
    "train images photos model=resnet18",
    "train images photos --arch resnet18",
    "train digits photos",
    "train street",
    "train reviews.csv",
    "train book",
    "train digitss",
    "train mine.yml",
    "train digits epochs 5",
    "train digits --epochs 5",
    "train digits epochs=five",
    "train digits epochs=2.5",
    "train digits batch-size=32",
    "train digits precision=fp8",
    "train digits --set epochs=2",
    "train digits optimizer=adam",
    "train digits learning_rate=0.1",
    "train digits epoks=2",
    "train digits precison=bf16",
    "train digits momentun=0.5",
    "digits",
    "tran digits",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with photos, masks, a table, texts and a recipe."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/cat", "photos/dog", "street/images", "street/masks"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "1.png")
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "chapter.txt").write_text("text", encoding="utf-8")
    (tmp_path / "reviews.csv").write_text("text,label\ngood,1\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(RECIPE.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def accept(words: list[str]) -> None:
    """Do all that `samestep train` does before it creates a run."""
    run = parse_arguments(words)
    command = getattr(run, "__self__", None)
    assert isinstance(command, Train)
    require_paths(load_recipe(command.recipe, command.overrides))


def corrected(words: list[str], error: SamestepError) -> list[str]:
    """Return the command after the fix of an error, in place of the words that the error names."""
    fix = error.fix.partition("; ")[0].removeprefix("did you mean ").removesuffix("?")
    fix = fix.replace("FOLDER", "photos")
    suggested = shlex.split(fix.partition(" or ")[0])
    if suggested[0] == "samestep":
        return suggested[1:]
    value = suggested[-1].partition("=")[2]
    candidates = words[1:]
    wrong = [word for word in candidates if is_named(word, error)]
    wrong += [word for word in candidates if is_named(word.partition("=")[0], error)]
    if not wrong:  # the error names a value
        wrong = [word for word in candidates if is_named(word.partition("=")[2], error)]
        suggested = [f"{wrong[0].partition('=')[0]}={suggested[0]}"]
    position = words.index(wrong[-1])
    after = words[position + 1 :]
    if after[:1] == [value]:
        after = after[1:]
    return [*words[:position], *suggested, *after]


def is_named(word: str, error: SamestepError) -> bool:
    return re.search(rf"(?<![\w/]){re.escape(word)}(?![\w:])", error.value) is not None


@pytest.mark.parametrize("command", MISTAKES)
def test_suggestions_lead_to_a_command_that_is_accepted(place: Path, command: str) -> None:
    words = command.split()
    for _ in range(3):
        try:
            accept(words)
        except SamestepError as error:
            assert error.exit_code == 2
            words = corrected(words, error)
        else:
            break
    accept(words)
    assert words != command.split(), "this is no mistake"


FITS = {"photos": "images", "street": "segmentation", "book": "language", "reviews.csv": "texts"}


@pytest.mark.parametrize("path", FITS)
def test_recipe_that_fits_the_data(place: Path, path: str) -> None:
    assert recipe_for(place / path) == FITS[path]


PATHS = {
    ("images", "path=gone"): "there is no folder gone in ",
    ("images", "path=reviews.csv"): "there is no folder reviews.csv in ",
    ("texts", "path=photos"): "there is no file photos in ",
    ("images", "path=photos evaluation_path=gone"): "there is no folder gone in ",
    ("digits", "model.pretrained=gone.pth"): "there is no file gone.pth in ",
    ("digits", "path=photos"): "the data 'digits' need none",
    ("images", "epochs=1"): "data.options.path is missing",
}


@pytest.mark.parametrize(("recipe", "settings"), PATHS)
def test_paths_are_checked_before_ranks_start(place: Path, recipe: str, settings: str) -> None:
    with pytest.raises(RecipeError) as error:
        require_paths(load_recipe(recipe, settings.split()))
    assert PATHS[recipe, settings] in error.value.value


# --- runs ---


def test_run_by_name(place: Path) -> None:
    (place / "runs" / "first").mkdir(parents=True)
    assert run_folder("first") == Path("runs/first")
    assert run_folder("runs/first") == Path("runs/first")
    assert run_folder("gone") == Path("gone")
    (place / "first").mkdir()
    assert run_folder("first") == Path("first")


@pytest.mark.parametrize(
    ("name", "meant"), [("runs/frist", "runs/first"), ("frist", "runs/first"), ("runs/x", "runs/second")]
)
def test_name_of_a_run_that_does_not_exist_suggests_one(place: Path, name: str, meant: str) -> None:
    for number, run in enumerate(("first", "second")):
        (place / "runs" / run).mkdir(parents=True)
        (place / "runs" / run / "recipe.yaml").write_text("", encoding="utf-8")
        os.utime(place / "runs" / run, (number, number))
    assert not_a_run(Path(name)).fix == f"did you mean {meant}?"


def test_without_a_run_a_command_that_makes_one_is_suggested(place: Path, refused: Callable[..., str]) -> None:
    err = refused("resume", "first")
    assert "first is not a run" in err
    accept(shlex.split(err.splitlines()[-1].partition("samestep ")[2]))


# --- files of predict ---


def test_folder_stands_for_its_files(place: Path) -> None:
    (place / "photos" / ".hidden").write_text("", encoding="utf-8")
    assert files_of([Path("photos"), Path("reviews.csv")]) == [
        Path("photos/cat/1.png"),
        Path("photos/dog/1.png"),
        Path("reviews.csv"),
    ]


def test_folder_without_files_is_an_error(place: Path) -> None:
    (place / "empty").mkdir()
    with pytest.raises(InputError, match="empty has no files"):
        files_of([Path("empty")])
    with pytest.raises(InputError, match=r"review\.csv is not a file") as error:
        files_of([Path("review.csv")])
    assert error.value.fix == "did you mean reviews.csv?"
