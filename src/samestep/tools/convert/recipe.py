"""A recipe from a YAML file of PaddleViT's ViT, with an account of every key."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import RecipeError
from samestep.recipes.parse import make_recipe, read_yaml
from samestep.tools.convert.check import require_convertible, require_kinds
from samestep.tools.convert.keys import DEFAULTS, OLD_NAMES, REASONS, TARGETS

# Models of PaddleViT's ViT that timm has under the same name.
_NAMES = tuple(f"vit_{size}" for size in ("base_patch16_224", "base_patch16_384", "base_patch32_224"))
_NAMES += tuple(f"vit_{size}" for size in ("base_patch32_384", "large_patch16_224", "large_patch16_384"))
_NAMES += ("vit_large_patch32_384",)
_MOST_FILES = 10  # that include one another

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Account:
    """What became of one key.

    Attributes:
        is_given: it is in the file; else the value is PaddleViT's default.
        targets: the keys of the recipe that it decides; none where `why` says why.
    """

    key: str
    value: Any
    is_given: bool
    targets: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        value = f"{self.key} = {self.value}" + ("" if self.is_given else " (PaddleViT's default)")
        return f"{value} -> {', '.join(self.targets)}" if self.targets else f"{value}: left out, {self.why}"


@dataclass(frozen=True)
class ConvertedRecipe:
    """A recipe as plain data, and what became of each key of the file and of each default that decides something."""

    recipe: dict[str, Any]
    accounts: tuple[Account, ...]

    def to_text(self, source: str) -> str:
        """The recipe as YAML, under comments that give the account."""
        head = [f"From {source}, key by key:", *map(str, self.accounts)]
        comments = "".join(f"# {line}\n" for line in head)
        return comments + yaml.safe_dump(self.recipe, sort_keys=False, default_flow_style=None)


def convert_recipe(file: Path, devices: int | None) -> ConvertedRecipe:
    """The recipe that computes what the file says on so many devices.

    Raises:
        RecipeError: the file is not PaddleViT's ViT, or says something that no recipe can; or `devices` is not given.
    """
    said = _given(file, [])
    given = {OLD_NAMES.get(key, key): value for key, value in said.items()}
    values = {**DEFAULTS, **given}
    require_kinds(file, given)
    require_convertible(file, values)
    if devices is None:
        size, steps = values["DATA.BATCH_SIZE"], values["TRAIN.ACCUM_ITER"]
        raise RecipeError(
            f"{file}: DATA.BATCH_SIZE is {size} samples a device, accumulated over {steps} steps",
            rule="batch_size counts the samples behind one update, of all devices together",
            do=f"say how many devices are meant: --devices-meant 8 makes it {size * steps * 8}",
        )
    recipe = _recipe(values, devices)
    make_recipe(recipe, (), origin=str(file))
    return ConvertedRecipe(recipe, tuple(_accounts(said, recipe)))


def _given(file: Path, including: list[Path]) -> dict[str, Any]:
    """The keys of a file, after those of the files that it includes as BASE."""
    if file in including or len(including) >= _MOST_FILES:
        raise RecipeError(f"{file} includes itself through BASE", rule="files end somewhere", do="remove the circle")
    if not file.is_file():
        raise RecipeError(f"there is no file {file}", rule="a YAML file of PaddleViT's", do="look at the path")
    raw = dict(read_yaml(file))
    bases = raw.pop("BASE", None) or []
    given: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        if base:
            given |= _given(file.parent / str(base), [*including, file])
    own = dict(_leaves(raw, ""))
    known = [*DEFAULTS, *OLD_NAMES]
    for key in own:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise RecipeError(
                f"{file}: {key} is not a key of PaddleViT's ViT",
                rule="keys of image_classification/ViT/config.py; other models are not known here",
                do=f"did you mean {close[0]}?" if close else "remove it, if it decides nothing",
            )
    return given | own


def _leaves(raw: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in raw.items():
        if isinstance(value, Mapping):
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", _as_yacs_reads(value)))
    return leaves


def _as_yacs_reads(value: Any) -> Any:
    """Text that is a Python literal, such as a tuple, is that literal in PaddleViT."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _recipe(values: Values, devices: int) -> dict[str, Any]:
    batch_size = values["DATA.BATCH_SIZE"] * values["TRAIN.ACCUM_ITER"] * devices
    warms_up = values["TRAIN.LR_SCHEDULER.NAME"] == "warmupcosine"
    recipe: dict[str, Any] = {
        "data": {"name": "images", "options": _data(values)},
        "model": _model(values),
        "loss": {"name": "cross_entropy", "options": {"label_smoothing": values["TRAIN.SMOOTHING"] or 0.0}},
        "optimizer": _optimizer(values),
        "schedule": {
            "name": "cosine",
            **({"warmup_epochs": values["TRAIN.WARMUP_EPOCHS"]} if warms_up else {}),
            "final": values["TRAIN.END_LR"] / values["TRAIN.BASE_LR"],
        },
        "metrics": ["accuracy", "top5"],
        "batch_size": batch_size,
        "shards": max(devices, 8),
        "epochs": values["TRAIN.NUM_EPOCHS"],
        "step": {
            "seed": values["SEED"],
            "clip_norm": values["TRAIN.GRAD_CLIP"] or None,
            "precision": "fp16" if values["AMP"] else "fp32",
        },
    }
    if values["TRAIN.LINEAR_SCALED_LR"] is not None:
        recipe["learning_rate"] = {"rule": "linear", "base_batch_size": values["TRAIN.LINEAR_SCALED_LR"]}
    if values["TRAIN.MODEL_EMA"]:
        recipe["ema"] = {"decay": values["TRAIN.MODEL_EMA_DECAY"]}
    return recipe


def _data(values: Values) -> dict[str, Any]:
    options = {
        "image_size": values["DATA.IMAGE_SIZE"],
        "crop_fraction": values["DATA.CROP_PCT"],
        "interpolation": "bicubic",
        "mean": list(values["DATA.IMAGENET_MEAN"]),
        "std": list(values["DATA.IMAGENET_STD"]),
        "augment": {"scale": [0.05, 1.0], "flip": 0.0},  # all that PaddleViT's ViT does
    }
    root = values["DATA.DATA_PATH"]
    if root is None:
        return options
    return {"path": str(Path(root) / "train"), "evaluation_path": str(Path(root) / "val"), **options}


def _model(values: Values) -> dict[str, Any]:
    name = values["MODEL.NAME"]
    ratio = values["MODEL.MLP_RATIO"]
    if values["MODEL.MLP_DIM"] is not None:
        ratio = values["MODEL.MLP_DIM"] / values["MODEL.EMBED_DIM"]
    options = {
        "img_size": values["DATA.IMAGE_SIZE"],
        "patch_size": values["MODEL.PATCH_SIZE"],
        "embed_dim": values["MODEL.EMBED_DIM"],
        "depth": values["MODEL.DEPTH"],
        "num_heads": values["MODEL.NUM_HEADS"],
        "mlp_ratio": ratio,
        "qkv_bias": values["MODEL.QKV_BIAS"],
        "pos_drop_rate": values["MODEL.DROPOUT"],
        "proj_drop_rate": values["MODEL.DROPOUT"],
        "attn_drop_rate": values["MODEL.ATTENTION_DROPOUT"],
        "drop_path_rate": values["MODEL.DROPPATH"],
    }
    if values["MODEL.NUM_CLASSES"] is not None:
        options["num_classes"] = values["MODEL.NUM_CLASSES"]
    model = {"name": f"timm:{name if name in _NAMES else 'vit_base_patch16_224'}", "options": options}
    if values["MODEL.PRETRAINED"]:
        file = str(values["MODEL.PRETRAINED"])
        model["pretrained"] = file if file.endswith(".pdparams") else f"{file}.pdparams"
    return model


def _optimizer(values: Values) -> dict[str, Any]:
    options = {"lr": values["TRAIN.BASE_LR"], "weight_decay": values["TRAIN.WEIGHT_DECAY"]}
    if values["TRAIN.OPTIMIZER.NAME"] == "SGD":
        return {"name": "sgd", "options": {**options, "momentum": values["TRAIN.OPTIMIZER.MOMENTUM"]}}
    betas = list(values["TRAIN.OPTIMIZER.BETAS"])
    return {"name": "adamw", "options": {**options, "betas": betas, "eps": values["TRAIN.OPTIMIZER.EPS"]}}


def _accounts(said: Values, recipe: Values) -> list[Account]:
    """Every key of the file, then every default that decides something."""
    accounts, given = [], {OLD_NAMES.get(key, key) for key in said}
    for key, value in said.items():
        name = OLD_NAMES.get(key, key)
        targets = tuple(target for target in TARGETS.get(name, ()) if _has(recipe, target))
        why = "" if targets else REASONS.get(name, "nothing follows from it together with the other keys")
        accounts.append(Account(key, value, True, targets, why))
    for key, every in TARGETS.items():
        targets = tuple(target for target in every if _has(recipe, target))
        if key not in given and DEFAULTS[key] is not None and targets:
            accounts.append(Account(key, DEFAULTS[key], False, targets))
    return accounts


def _has(recipe: Values, target: str) -> bool:
    place: Any = recipe
    for part in target.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return False
        place = place[part]
    return True
