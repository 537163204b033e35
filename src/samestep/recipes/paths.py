"""Files that a recipe names, checked before the import of torch; the recipe that fits some data."""

from __future__ import annotations

import shlex
from pathlib import Path

from samestep.config import Recipe
from samestep.config.key_suggestions import nearest_path
from samestep.errors import RecipeError

# Data that need a path: the kind of path, and what is there.
_PATHS = {
    "images": ("folder", "data.options.path is a folder of class folders"),
    "image_list": ("file", "data.options.path is a table"),
    "segmentation": ("folder", "data.options.path has the folders images and masks"),
    "texts": ("file", "data.options.path is a table"),
}
_WITHOUT_PATH = ("digits", "tokens")
_TABLES = (".csv", ".parquet")
_TEXTS = (".txt", ".md", ".py")


def recipe_for(path: Path) -> str:
    """Return the name of the shipped recipe that fits a file or a folder of data."""
    if path.is_file():
        if path.suffix in _TABLES:
            return "texts"
        return "language"
    names = [one.name for one in sorted(path.iterdir())]
    if "masks" in names and "images" in names:
        return "segmentation"
    if any(Path(name).suffix in _TEXTS for name in names):
        return "language"
    return "images"


def train_command(path: Path) -> str:
    """Return the command that trains with some data."""
    return shlex.join(["samestep", "train", recipe_for(path), str(path)])


def require_paths(recipe: Recipe) -> None:
    """Require that the data and the weights of a recipe exist.

    Raises:
        RecipeError: a path is missing, or of another kind, or the data have none.
    """
    name = recipe.data.name
    options = recipe.data.options
    path = options.get("path")
    if name in _WITHOUT_PATH and isinstance(path, str) and Path(path).exists():
        raise RecipeError(
            f"data.options.path is {path}, but the data {name!r} need none",
            expected="a recipe for own data",
            fix=train_command(Path(path)),
            code="E_UNKNOWN_OPTION",
        )
    if name in _PATHS:
        kind, expected = _PATHS[name]
        if path is None:
            fix = f"samestep train {name} {kind.upper()}"
            code = "E_MISSING_KEY"
            raise RecipeError("data.options.path is missing", expected, fix, code=code)
        _require(path, kind, expected)
        _require(options.get("evaluation_path"), kind, expected)
    _require(recipe.model.pretrained, "file", "model.pretrained is a file of weights")


def _require(value: object, kind: str, expected: str) -> None:
    if not isinstance(value, str):
        return
    path = Path(value)
    exists = path.is_file() if kind == "file" else path.is_dir()
    if not exists:
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        near = nearest_path(path)
        fix = "correct the path"
        if near is not None:
            fix = f"did you mean {near}?"
        problem = f"there is no {kind} {path}{place}"
        raise RecipeError(problem, expected, fix, code="E_FILE_MISSING")
