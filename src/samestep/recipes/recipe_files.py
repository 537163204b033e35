"""Recipes as YAML files, with settings and validation; files of data that recipes name.

Also the refusal of another recipe at a resumption, and facts of datasets in the run directory.

A recipe that cannot be read or is invalid raises `RecipeError`. The error of an unknown key or an
invalid value names the key or value that was probably meant.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from samestep.checkpoint.contents import validator_of
from samestep.checkpoint.durable_files import write_atomically
from samestep.config import Recipe
from samestep.config.key_suggestions import did_you_mean, nearest_path
from samestep.config.validation import require_path
from samestep.distributed.disk_operations import read_small
from samestep.distributed.env import expand_path
from samestep.errors import CheckpointError, InputError, RecipeError
from samestep.recipes.overrides import apply_setting, expand_paths
from samestep.recipes.recipe_errors import explained

_NOT_SET = object()
_DATASET_FILE = "data.json"
# Beginnings of names of models of torchvision, which are not recipes.
_MODELS = ("resnet", "resnext", "vgg", "convnext", "densenet", "efficientnet", "mobilenet", "swin")
# Data that need a path: the kind of path, and what is there.
_PATHS: dict[str, tuple[Literal["file", "folder"], str]] = {
    "images": ("folder", "data.options.path is a folder of class folders"),
    "image_list": ("file", "data.options.path is a table"),
    "segmentation": ("folder", "data.options.path has the folders images and masks"),
    "texts": ("file", "data.options.path is a table"),
}
_WITHOUT_PATH = ("digits", "tokens")
_TABLES = (".csv", ".parquet")
_TEXTS = (".txt", ".md", ".py")
_RECIPE_BYTES = 1 << 20  # YAML is slow to read


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "shipped").glob("*.yaml"))}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a shipped recipe or the recipe of a YAML file, with `key=value` overrides."""
    return make_recipe(read_yaml(_recipe_file(name)), overrides, origin=name)


def _recipe_file(name: str) -> Path:
    """Return the file of a shipped recipe or of a path."""
    shipped = shipped_recipes()
    path = shipped.get(name, Path(expand_path(name)))
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(
            f"there is no recipe {name!r}",
            expected=f"one of {', '.join(shipped)}, or a file that ends in .yaml",
            fix=_fix_of_recipe(name, path),
            code="E_UNKNOWN_NAME",
        )
    if not path.is_file():
        problem = f"{name} is not a file" if path.exists() else f"there is no file {name}"
        near = nearest_path(path)
        fix = "correct the path" if near is None else f"did you mean {near}?"
        raise RecipeError(problem, "a YAML file", fix, code="E_FILE_MISSING")
    return path


def _fix_of_recipe(name: str, path: Path) -> str:
    """Return the fix of an unknown recipe: a script, data, a model, a run or a similar name."""
    if path.suffix == ".py" and path.is_file():
        return f"samestep run {name}"
    if (path / "recipe.yaml").is_file():
        return f"samestep resume {name}"
    if path.exists():
        return train_command(path)
    if name.startswith(_MODELS):
        return f"samestep train images FOLDER model.name={name}"
    shipped = shipped_recipes()
    return did_you_mean(name, shipped, f"samestep train {next(iter(shipped))}", "samestep train ")


def make_recipe(raw: Mapping[str, Any], overrides: Sequence[str], *, origin: str) -> Recipe:
    """Return the validated recipe of plain data with overrides; errors name its `origin`."""
    try:
        # A copy, which settings change; only values of JSON survive it.
        data = json.loads(json.dumps(raw))
    except (TypeError, ValueError) as error:  # ValueError: a YAML alias that contains itself
        raise RecipeError(
            f"{origin}: {error}",
            expected="numbers, text, true/false, null, lists and mappings",
            fix="quote the value",
            code="E_VALUE",
        ) from error
    before = json.loads(json.dumps(data))
    # Before validation, so that a setting can supply a missing key.
    settings = dict(apply_setting(data, setting) for setting in overrides)
    expand_paths(data)
    try:
        # Strict validation of JSON accepts lists for tuples, but no other conversions.
        recipe: Recipe = validator_of(Recipe).validate_json(json.dumps(data), strict=True)
        return recipe
    except ValidationError as error:
        raise explained(error.errors(), origin, before, settings) from error


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as plain data, with all defaults."""
    # By way of JSON: tuples become lists, as in the files with which recipes are compared.
    data: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return data


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe to a file that `read_recipe` reads."""
    from samestep.recipes.yaml_text import to_yaml  # a package of the extra `recipes`

    write_atomically(path, to_yaml(recipe_data(recipe)))


def read_recipe(path: Path) -> Recipe:
    """Return the recipe of a file that `write_recipe` has written.

    Raises:
        RecipeError: the file is damaged, or has fewer keys than a resolved recipe.
    """
    raw = read_yaml(path)
    recipe = make_recipe(raw, (), origin=str(path))
    missing = sorted(recipe_data(recipe).keys() - raw.keys())
    if missing:
        raise RecipeError(
            f"{path} has no {missing[0]}",
            expected="a resolved recipe with all keys",
            fix="restore the file",
            code="E_UNREADABLE",
        )
    return recipe


def update_recipe(path: Path, recipe: Recipe) -> None:
    """Write epochs and early stop of `recipe` to the file of a run; replace a damaged file."""
    try:
        saved = read_recipe(path)
    except RecipeError:
        saved = None
    if saved is None or (saved.epochs, saved.stop) != (recipe.epochs, recipe.stop):
        write_recipe(replace(saved or recipe, epochs=recipe.epochs, stop=recipe.stop), path)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the differences of two recipes in plain data, one line per key."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before = old.get(key, _NOT_SET)
        after = new.get(key, _NOT_SET)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            texts = [
                "(not set)" if value is _NOT_SET else json.dumps(value) for value in (before, after)
            ]
            lines.append(f"{prefix}{key}: {' -> '.join(texts)}")
    return lines


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping of a YAML file."""
    from samestep.recipes.yaml_text import YAMLError, from_yaml  # a package of the extra `recipes`

    try:
        raw = from_yaml(read_small(path, _RECIPE_BYTES).decode())
    except (YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}",
            expected="YAML in UTF-8",
            fix="correct the line of the error",
            code="E_UNREADABLE",
        ) from error
    if not isinstance(raw, Mapping):
        raise RecipeError(
            f"{path} contains a {type(raw).__name__}", "a mapping", "write key: value lines"
        )
    return raw


# --- recipe of a run that is resumed ---


def require_recipe_of_checkpoint(recipe: Recipe, before: Recipe, checkpoint: Path) -> None:
    """Require that a run is resumed with the recipe of its checkpoint, but for some keys."""
    # A run can be resumed with another strategy, and with more epochs or another early stop: steps
    # before the checkpoint do not depend on them.
    free = {"strategy": None, "epochs": None, "stop": None}
    _require_equal(
        {**recipe_data(before), **free},
        {**recipe_data(recipe), **free},
        "the recipe differs from the recipe of the checkpoint",
        "undo the change, or start a new run from these weights: samestep train ... "
        f"model.pretrained={checkpoint}/model.safetensors",
    )


def require_recipe_of_run(recipe: Recipe, before: Recipe, run: Path) -> None:
    """Require that a run that `samestep train --or-resume` continues has the command's recipe."""
    if recipe.microbatches == "auto":  # the recipe of a run has the number that `auto` was
        recipe = replace(recipe, microbatches=before.microbatches)
    _require_equal(
        recipe_data(before),
        recipe_data(recipe),
        f"the recipe differs from the recipe of the run {run}",
        "another --name for a new run, or undo the change",
    )


def _require_equal(before: dict[str, Any], now: dict[str, Any], message: str, fix: str) -> None:
    changes = differences(before, now)
    if changes:
        problem = "\n    ".join([f"{message}:", *changes])
        expected = "the same recipe for all steps of a run"
        raise CheckpointError(problem, expected, fix, code="E_RESUME_CHANGED")


# --- facts of datasets ---


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of a dataset that a trained model needs."""

    classes: Sequence[str]  # class names by number
    # Options of the model that follow from the data.
    model_options: Mapping[str, Any] = field(default_factory=dict)


def write_dataset_info(info: DatasetInfo, run: Path) -> None:
    """Write the facts to a run directory."""
    write_atomically(run / _DATASET_FILE, json.dumps(asdict(info), indent=1))


def read_dataset_info(run: Path) -> DatasetInfo:
    """Return the facts of a run directory; raise `InputError` if the file is missing or damaged."""
    path = run / _DATASET_FILE
    try:
        data = json.loads(read_small(path))
        return DatasetInfo(tuple(data["classes"]), dict(data["model_options"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}",
            expected="the class names and model options of the run",
            fix="run samestep resume RUN with access to the data, which writes the file",
            code="E_UNREADABLE",
        ) from error


# --- data and files of a recipe -----------------------------------------------------------------


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
        for one in (path, options.get("evaluation_path")):
            if isinstance(one, str):
                require_path(Path(one), kind, expected)
    if recipe.model.pretrained is not None:
        path = Path(recipe.model.pretrained)
        require_path(path, "file", "model.pretrained is a file of weights")
