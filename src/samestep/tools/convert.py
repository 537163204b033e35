"""Conversion of PaddleViT: YAML files of ViT, DeiT and Swin to recipes, .pdparams files of ViT to safetensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from samestep.config.validation import require
from samestep.errors import RecipeError
from samestep.recipes.recipe_files import make_recipe, read_yaml
from samestep.tools.convert_keys import AUGMENT, DISTILLED_NAMES, FAMILIES, NUMBER, Family

_MAX_INCLUDES = 10
_LIST = (list, tuple)
_COMPATIBLE_TYPES: Mapping[type, tuple[type, ...]] = {float: NUMBER, list: _LIST, tuple: _LIST}

Values = Mapping[str, Any]


class ConvertedKey(NamedTuple):
    """Value of one key, with recipe keys or the reason for the omission."""

    key: str
    value: Any
    is_default: bool  # the file does not have the key; the value is PaddleViT's default
    targets: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        value = f"{self.key} = {self.value}" + (" (PaddleViT's default)" if self.is_default else "")
        return f"{value} -> {', '.join(self.targets)}" if self.targets else f"{value}: omitted, {self.reason}"


@dataclass(frozen=True)
class ConvertedRecipe:
    """Recipe as plain data, with every key of the file and every default that sets something."""

    recipe: dict[str, Any]
    keys: tuple[ConvertedKey, ...]

    def to_text(self, source: str) -> str:
        """Return the recipe as YAML, with one comment per key."""
        lines = [f"From {source}, key by key:", *map(str, self.keys)]
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(self.recipe, sort_keys=False, default_flow_style=None)


def convert_recipe(file: Path, devices: int | None) -> ConvertedRecipe:
    """Convert a YAML file for a number of devices.

    Raises:
        RecipeError: the file is of another model, has no equivalent recipe, or `devices` is None.
    """
    raw = _read_keys(file, [])
    family = _family(file, raw)
    _require_known(file, raw, family)
    renamed = {family.old_names.get(key, key): value for key, value in raw.items()}
    values = {name: key.default for name, key in family.keys.items()} | renamed
    _require_types(file, renamed, family)
    _require_convertible(file, values, family)
    if devices is None:
        size, steps = values["DATA.BATCH_SIZE"], values["TRAIN.ACCUM_ITER"]
        raise RecipeError(
            f"{file}: DATA.BATCH_SIZE is {size} samples per device, accumulated over {steps} steps",
            expected="a number of devices; batch_size counts the samples of one update on all devices",
            fix=f"for example --devices-meant 8, for a batch_size of {size * steps * 8}",
            code="E_BATCH_SIZE",
        )
    recipe = _recipe(values, devices, family)
    make_recipe(recipe, (), origin=str(file))
    return ConvertedRecipe(recipe, tuple(_converted_keys(raw, recipe, family)))


def _read_keys(file: Path, including: list[Path]) -> dict[str, Any]:
    """Return the keys of a file, merged over those of the files in its BASE."""
    is_cycle = file in including or len(including) >= _MAX_INCLUDES
    require(not is_cycle, f"{file} includes itself through BASE", "no cycles", "remove the cycle", code="E_PADDLE_FILE")
    expected = "a YAML file of PaddleViT"
    require(file.is_file(), f"there is no file {file}", expected, "check the path", code="E_FILE_MISSING")
    raw = dict(read_yaml(file))
    bases = raw.pop("BASE", None) or []
    keys: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        if base:
            keys |= _read_keys(file.parent / str(base), [*including, file])
    return keys | dict(_leaves(raw))


def _family(file: Path, keys: Values) -> Family:
    kind, name = str(keys.get("MODEL.TYPE", "ViT")), str(keys.get("MODEL.NAME", "")).lower()
    expected = f"{', '.join(FAMILIES)}, without distillation; files of other models are not converted"
    fix = "write a recipe with a model of timm, torchvision or your own"
    require(kind.lower() in FAMILIES, f"{file}: MODEL.TYPE is {kind}", expected, fix, code="E_PADDLE_FILE")
    fix = f"samestep train images --set model.name=timm:{name}, with the other values of the file"
    require(name not in DISTILLED_NAMES, f"{file}: MODEL.NAME is {name}", expected, fix, code="E_PADDLE_FILE")
    return FAMILIES[kind.lower()]


def _require_known(file: Path, keys: Values, family: Family) -> None:
    known = [*family.keys, *family.old_names]
    for key in keys:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise RecipeError(
                f"{file}: {key} is not a key of the model's family in PaddleViT",
                expected="keys of config.py in the family's folder; other models are not supported",
                fix=f"did you mean {close[0]}?" if close else "remove the key if it has no effect",
                code="E_UNKNOWN_KEY",
            )


def _leaves(raw: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _parse_literal(value)


def _parse_literal(value: Any) -> Any:
    """Parse text as a Python literal if possible, such as a tuple, as yacs does."""
    with suppress(ValueError, SyntaxError):  # ValueError for values that are not text
        return ast.literal_eval(value)
    return value


def _require_types(file: Path, values: Values, family: Family) -> None:
    for key, value in values.items():
        default, types = family.keys[key].default, family.keys[key].types
        if default is not None:
            types = _COMPATIBLE_TYPES.get(type(default), (type(default),))
        elif not types:
            continue
        is_unset = value is None and (default is None or key == "TRAIN.GRAD_CLIP")
        is_valid = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
        require(
            is_unset or is_valid,
            f"{file}: {key} is {value!r}",
            f"{' or '.join(type_.__name__ for type_ in types)}, as in PaddleViT's config.py",
            "correct the file",
            code="E_PADDLE_FILE",
        )


def _require_convertible(file: Path, values: Values, family: Family) -> None:
    rate, heads, dim = values["TRAIN.BASE_LR"], values["MODEL.NUM_HEADS"], values["MODEL.EMBED_DIM"]
    head_size, decay = values.get("MODEL.ATTN_HEAD_SIZE"), values["TRAIN.MODEL_EMA_DECAY"]
    schedule, optimizer = values["TRAIN.LR_SCHEDULER.NAME"], values["TRAIN.OPTIMIZER.NAME"]
    rules = {
        "DATA.IMAGE_CHANNELS": (values["DATA.IMAGE_CHANNELS"] == 3, "3 channels"),
        "MODEL.ATTN_HEAD_SIZE": (
            head_size is None or head_size * heads == dim,
            "MODEL.EMBED_DIM / MODEL.NUM_HEADS, or none",
        ),
        "TRAIN.LR_SCHEDULER.NAME": (schedule in ("warmupcosine", "cosine"), "warmupcosine or cosine"),
        "TRAIN.OPTIMIZER.NAME": (optimizer in ("AdamW", "SGD"), "AdamW or SGD"),
        "TRAIN.BASE_LR": (rate > 0, "above 0"),
        "TRAIN.END_LR": (0 <= values["TRAIN.END_LR"] <= rate, f"between 0 and TRAIN.BASE_LR, {rate}"),
        "TRAIN.MODEL_EMA_DECAY": (not values["TRAIN.MODEL_EMA"] or decay is not None, "a number with TRAIN.MODEL_EMA"),
        **{key: (values[key] == value, str(value)) for key, value in family.required.items()},
    }
    fix = "change the value in the file, or write a new recipe"
    for key, (is_valid, expected) in rules.items():
        require(is_valid, f"{file}: {key} is {values.get(key)}", expected, fix, code="E_PADDLE_FILE")


def _recipe(values: Values, devices: int, family: Family) -> dict[str, Any]:
    batch_size = values["DATA.BATCH_SIZE"] * values["TRAIN.ACCUM_ITER"] * devices
    warms_up = values["TRAIN.LR_SCHEDULER.NAME"] == "warmupcosine"
    recipe: dict[str, Any] = {
        "data": _data(values, family),
        "model": _model(values, family),
        "loss": {"name": "cross_entropy", "options": {"label_smoothing": values["TRAIN.SMOOTHING"] or 0.0}},
        "optimizer": _optimizer(values),
        "schedule": {
            "name": "cosine",
            **({"warmup_epochs": values["TRAIN.WARMUP_EPOCHS"]} if warms_up else {}),
            "final": values["TRAIN.END_LR"] / values["TRAIN.BASE_LR"],
        },
        "metrics": ["accuracy", "top5"],
        "batch_size": batch_size,
        "microbatches": min(batch_size, max(devices, 8)),
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


def _data(values: Values, family: Family) -> dict[str, Any]:
    options = {
        "image_size": values["DATA.IMAGE_SIZE"],
        "crop_fraction": values["DATA.CROP_PCT"],
        "interpolation": "bicubic",
        "mean": list(values["DATA.IMAGENET_MEAN"]),
        "std": list(values["DATA.IMAGENET_STD"]),
        "augment": dict(family.crop),
    }
    root = values["DATA.DATA_PATH"]
    if root is None:
        return {"name": "images", "options": options}
    has_lists = Path(root, "train_list.txt").is_file()
    train, validation = ("train_list.txt", "val_list.txt") if has_lists else ("train", "val")
    options |= {"path": str(Path(root, train)), "evaluation_path": str(Path(root, validation))}
    return {"name": "image_list" if has_lists else "images", "options": options}


def _model(values: Values, family: Family) -> dict[str, Any]:
    name, prefix = values["MODEL.NAME"], "model.options."
    options = {
        target.removeprefix(prefix): values[key]
        for key, description in family.keys.items()
        for target in description.targets
        if target.startswith(prefix) and values[key] is not None
    }
    if values["MODEL.MLP_DIM"] is not None:
        options["mlp_ratio"] = values["MODEL.MLP_DIM"] / values["MODEL.EMBED_DIM"]
    model = {"name": f"timm:{name if name in family.names else family.model}", "options": options}
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


def _converted_keys(raw: Values, recipe: Values, family: Family) -> Iterator[ConvertedKey]:
    """Yield every key of the file, then every default that sets something or would augment images."""
    keys = family.keys
    targets = {name: tuple(target for target in key.targets if _contains(recipe, target)) for name, key in keys.items()}
    for old, value in raw.items():
        name = family.old_names.get(old, old)
        reason = keys[name].reason or "no effect with the other keys"
        yield ConvertedKey(old, value, False, targets[name], reason)
    present = {family.old_names.get(key, key) for key in raw}
    for name, key in keys.items():
        if name not in present and key.default is not None and (targets[name] or key.reason == AUGMENT):
            yield ConvertedKey(name, key.default, True, targets[name], key.reason)


def _contains(recipe: Values, target: str) -> bool:
    node: Any = recipe
    for part in target.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
