"""`samestep convert`: recipes from YAML files of PaddleViT's ViT, DeiT and Swin.

The keys of these files are in `paddle_keys.yaml`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from samestep.config.key_suggestions import did_you_mean
from samestep.errors import RecipeError
from samestep.recipes.recipe_files import make_recipe, read_yaml

_TABLE = yaml.safe_load(Path(__file__).with_name("paddle_keys.yaml").read_text(encoding="utf-8"))
AUGMENT: str = _TABLE["reasons"]["augment"]["reason"]
_TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
_COMPATIBLE: Mapping[type, tuple[type, ...]] = {float: (int, float), list: (list, tuple)}

Values = Mapping[str, Any]


class Key(NamedTuple):
    """One key of a model family."""

    default: Any = None
    to: tuple[str, ...] = ()  # recipe keys that the key sets
    reason: str = ""  # reason why it sets none
    type: str = ""  # type of a key without a default


class Family(NamedTuple):
    """A model family of PaddleViT."""

    model: str  # model of timm for other names
    names: list[str]  # models with the same name in timm
    augment: Values  # random crop and flip
    keys: Mapping[str, Key]
    old_names: Mapping[str, str]  # keys of older files
    required: Values  # values of keys that nothing in a recipe corresponds to


def _read_family(fields: dict[str, Any]) -> Family:
    defaults = fields.pop("defaults", {})
    without = fields.pop("without", ())
    entries = (_TABLE["keys"] | fields.pop("keys", {})).items()
    keys = {name: Key(**entry) for name, entry in entries if name not in without}
    keys |= {name: keys[name]._replace(default=default) for name, default in defaults.items()}
    return Family(**{"required": {}, "keys": keys, **fields})


FAMILIES = {name: _read_family(dict(fields)) for name, fields in _TABLE["families"].items()}


class ConvertedKey(NamedTuple):
    """Value of one key, with recipe keys or the reason for the omission."""

    key: str
    value: Any
    is_default: bool  # the file does not have the key; the value is PaddleViT's default
    targets: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        value = f"{self.key} = {self.value}"
        if self.is_default:
            value = f"{value} (PaddleViT's default)"
        if self.targets:
            return f"{value} -> {', '.join(self.targets)}"
        return f"{value}: omitted, {self.reason}"


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
    raw = dict(_leaves(read_yaml(file)))
    if any(raw.pop("BASE", None) or ()):
        problem = f"{file} includes other files by BASE"
        raise _refused(problem, "all keys in one file", "copy the keys into the file")
    kind = str(raw.get("MODEL.TYPE", "ViT"))
    name = str(raw.get("MODEL.NAME", "")).lower()
    if kind.lower() not in FAMILIES or "distilled" in name:
        problem = f"{file}: MODEL.TYPE is {kind}, MODEL.NAME is {name}"
        families = f"{', '.join(FAMILIES)}, without distillation"
        raise _refused(problem, families, "write a recipe")
    family = FAMILIES[kind.lower()]
    known = [*family.keys, *family.old_names]
    for key in raw:
        if key not in known:
            fix = did_you_mean(key, known, "remove the key if it has no effect")
            raise _refused(
                f"{file}: {key} is not a key of the model's family in PaddleViT",
                "keys of config.py in the family's folder; other models are not supported",
                fix,
            )
    renamed = {family.old_names.get(key, key): value for key, value in raw.items()}
    _require_types(file, renamed, family)
    values = {name: key.default for name, key in family.keys.items()} | renamed
    _require_convertible(file, values, family)
    # After the checks: the fix has a batch size, computed from the values.
    if devices is None:
        size = values["DATA.BATCH_SIZE"]
        steps = values["TRAIN.ACCUM_ITER"]
        raise RecipeError(
            f"{file}: DATA.BATCH_SIZE is {size} samples per device, accumulated over {steps} steps",
            expected="a number of devices; batch_size counts the samples of one update on all "
            "devices",
            fix=f"for example --devices-meant 8, for a batch_size of {size * steps * 8}",
            code="E_BATCH_SIZE",
        )
    settings = _settings(values, devices, family)
    recipe: dict[str, Any] = {}
    for target, value in settings.items():
        *parents, name = target.split(".")
        node = recipe
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = list(value) if isinstance(value, tuple) else value
    # For its errors: only a valid recipe is written.
    make_recipe(recipe, (), origin=str(file))
    return ConvertedRecipe(recipe, tuple(_converted_keys(raw, settings, family)))


def _refused(
    problem: str, expected: str, fix: str = "change the value, or write a new recipe"
) -> RecipeError:
    return RecipeError(problem, expected, fix, code="E_UNREADABLE")


def _leaves(raw: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
            continue
        try:  # text is a Python literal if possible, such as a tuple, as in yacs
            yield f"{prefix}{key}", ast.literal_eval(value)
        except (ValueError, SyntaxError):
            yield f"{prefix}{key}", value


def _require_types(file: Path, values: Values, family: Family) -> None:
    for name, value in values.items():
        key = family.keys[name]
        kind = _TYPES.get(key.type) if key.default is None else type(key.default)
        is_unset = value is None and (key.default is None or name == "TRAIN.GRAD_CLIP")
        if kind is None or is_unset:
            continue
        # For `isinstance`, a bool is an int.
        is_wrong_bool = isinstance(value, bool) and kind is not bool
        if is_wrong_bool or not isinstance(value, _COMPATIBLE.get(kind, kind)):
            problem = f"{file}: {name} is {value!r}"
            raise _refused(problem, f"{kind.__name__}, as in config.py", "correct the file")


def _require_convertible(file: Path, values: Values, family: Family) -> None:
    rate = values["TRAIN.BASE_LR"]
    end = values["TRAIN.END_LR"]
    dim = values["MODEL.EMBED_DIM"]
    head_size = values.get("MODEL.ATTN_HEAD_SIZE")
    is_head_size = head_size is None or head_size * values["MODEL.NUM_HEADS"] == dim
    has_cosine = values["TRAIN.LR_SCHEDULER.NAME"] in ("warmupcosine", "cosine")
    has_optimizer = values["TRAIN.OPTIMIZER.NAME"] in ("AdamW", "SGD")
    has_decay = not values["TRAIN.MODEL_EMA"] or values["TRAIN.MODEL_EMA_DECAY"] is not None
    rules = {
        "DATA.IMAGE_CHANNELS": (values["DATA.IMAGE_CHANNELS"] == 3, "3 channels"),
        "MODEL.ATTN_HEAD_SIZE": (is_head_size, "MODEL.EMBED_DIM / MODEL.NUM_HEADS, or none"),
        "TRAIN.LR_SCHEDULER.NAME": (has_cosine, "warmupcosine or cosine"),
        "TRAIN.OPTIMIZER.NAME": (has_optimizer, "AdamW or SGD"),
        "TRAIN.BASE_LR": (rate > 0, "above 0"),
        "TRAIN.END_LR": (0 <= end <= rate, f"between 0 and TRAIN.BASE_LR, {rate}"),
        "TRAIN.MODEL_EMA_DECAY": (has_decay, "a number with TRAIN.MODEL_EMA"),
        **{key: (values[key] == value, str(value)) for key, value in family.required.items()},
    }
    for key, (is_valid, expected) in rules.items():
        if not is_valid:
            raise _refused(f"{file}: {key} is {values.get(key)}", expected)


def _settings(values: Values, devices: int, family: Family) -> dict[str, Any]:
    """Return the values of recipe keys, which one key or several keys of the file set."""
    flat: dict[str, Any] = {}
    for name, key in family.keys.items():
        if values[name] is not None:
            flat |= dict.fromkeys(key.to, values[name])
    model = values["MODEL.NAME"] if values["MODEL.NAME"] in family.names else family.model
    batch_size = values["DATA.BATCH_SIZE"] * values["TRAIN.ACCUM_ITER"] * devices
    flat |= {
        "data.name": "images",
        "data.options.interpolation": "bicubic",
        "data.options.augment": dict(family.augment),
        "model.name": f"timm:{model}",
        "loss.name": "cross_entropy",
        "loss.options.label_smoothing": values["TRAIN.SMOOTHING"] or 0.0,
        "optimizer.name": values["TRAIN.OPTIMIZER.NAME"].lower(),
        "schedule.name": "cosine",
        "schedule.warmup_epochs": values["TRAIN.WARMUP_EPOCHS"],
        "schedule.final": values["TRAIN.END_LR"] / values["TRAIN.BASE_LR"],
        "metrics": ["accuracy", "top5"],
        "batch_size": batch_size,
        # At least one for each device of the original run.
        "microbatches": min(batch_size, max(devices, 8)),
        "step.clip_norm": values["TRAIN.GRAD_CLIP"] or None,
        "step.precision": "fp16" if values["AMP"] else "fp32",
    }
    if values["DATA.DATA_PATH"] is not None:
        root = Path(values["DATA.DATA_PATH"])
        flat["data.options.path"] = str(root / "train")
        flat["data.options.evaluation_path"] = str(root / "val")
        if (root / "train_list.txt").is_file():
            flat["data.name"] = "image_list"
            flat["data.options.path"] = str(root / "train_list.txt")
            flat["data.options.evaluation_path"] = str(root / "val_list.txt")
    if values["MODEL.MLP_DIM"] is not None:
        flat["model.options.mlp_ratio"] = values["MODEL.MLP_DIM"] / values["MODEL.EMBED_DIM"]
    if values["MODEL.PRETRAINED"] is not None:
        weights = values["MODEL.PRETRAINED"].removesuffix(".pdparams")
        flat["model.pretrained"] = f"{weights}.pdparams"
    if values["TRAIN.LINEAR_SCALED_LR"] is not None:
        flat["learning_rate.rule"] = "linear"
    unused = {"ema", "optimizer.options.momentum"}
    if flat["optimizer.name"] == "sgd":
        unused = {"ema", "optimizer.options.betas", "optimizer.options.eps"}
    if not values["TRAIN.MODEL_EMA"]:
        unused.add("ema.decay")
    if values["TRAIN.LR_SCHEDULER.NAME"] == "cosine":
        unused.add("schedule.warmup_epochs")
    return {target: value for target, value in flat.items() if target not in unused}


def _converted_keys(raw: Values, settings: Values, family: Family) -> Iterator[ConvertedKey]:
    """Yield keys of the file, then defaults that set something or would augment images."""
    keys = family.keys
    is_set = {*settings, *(target.rpartition(".")[0] for target in settings)}
    targets = {name: tuple(one for one in key.to if one in is_set) for name, key in keys.items()}
    for old, value in raw.items():
        name = family.old_names.get(old, old)
        reason = keys[name].reason or "no effect with the other keys"
        yield ConvertedKey(old, value, False, targets[name], reason)
    present = {family.old_names.get(key, key) for key in raw}
    for name, key in keys.items():
        has_effect = targets[name] or key.reason == AUGMENT
        if name not in present and key.default is not None and has_effect:
            yield ConvertedKey(name, key.default, True, targets[name], key.reason)
