"""Conversion of PaddleViT's ViT: YAML files to recipes, .pdparams files to safetensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors.torch import save_file

from samestep.config.validation import require
from samestep.errors import RecipeError
from samestep.recipes.recipe_files import make_recipe, read_yaml
from samestep.zoo.paddle import Converted, read_pdparams

# Models of PaddleViT's ViT with the same name in timm.
_NAMES = (
    *("vit_base_patch16_224", "vit_base_patch16_384", "vit_base_patch32_224", "vit_base_patch32_384"),
    *("vit_large_patch16_224", "vit_large_patch16_384", "vit_large_patch32_384"),
)
# Other models of PaddleViT with the same name in timm; their files are not converted.
OTHER_MODELS = (
    *(f"swin_{size}_224" for size in ("tiny_patch4_window7", "small_patch4_window7", "base_patch4_window7")),
    *("swin_large_patch4_window7_224", "swin_base_patch4_window12_384", "swin_large_patch4_window12_384"),
    *(f"deit_{size}_patch16_224" for size in ("tiny", "small", "base", "base_distilled")),
    *("deit_base_patch16_384", "deit_base_distilled_patch16_384"),
)
_MAX_INCLUDES = 10
_NUMBER, _INTEGER, _LIST = (int, float), (int,), (list, tuple)
_COMPATIBLE_TYPES: Mapping[type, tuple[type, ...]] = {float: _NUMBER, list: _LIST, tuple: _LIST}
# Keys of older files.
OLD_NAMES: Mapping[str, str] = {
    "MODEL.TRANS.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    "MODEL.TRANS.NUM_LAYERS": "MODEL.DEPTH",
    **{
        f"MODEL.TRANS.{name}": f"MODEL.{name}"
        for name in (
            "PATCH_SIZE",
            "EMBED_DIM",
            "MLP_RATIO",
            "MLP_DIM",
            "NUM_HEADS",
            "ATTN_HEAD_SIZE",
            "DEPTH",
            "QKV_BIAS",
        )
    },
}


class Key(NamedTuple):
    """One key of PaddleViT's ViT.

    Attributes:
        default: default of image_classification/ViT/config.py at commit 6368afe; None for keys of other commits, which
            are off by default.
        targets: recipe keys that the key sets.
        reason: reason why a key has no targets.
        types: types of a key whose default is None and which sets something.
    """

    default: Any
    targets: tuple[str, ...] = ()
    reason: str = ""
    types: tuple[type, ...] = ()


_AUGMENT = Key(None, reason="range and random draws differ from torchvision's; set data.options.augment")
_MACHINE = "specific to the machine; results do not depend on it"
_SCHEDULE = Key(None, reason="not used by warmupcosine and cosine")
_AUGMENT_KEYS = (
    *("COLOR_JITTER", "AUTO_AUGMENT", "RAND_AUGMENT", "RAND_AUGMENT_LAYERS", "RAND_AUGMENT_MAGNITUDE"),
    *("MIXUP_ALPHA", "MIXUP_PROB", "MIXUP_SWITCH_PROB", "MIXUP_MODE", "CUTMIX_ALPHA", "CUTMIX_MINMAX"),
    *("RANDOM_ERASE_PROB", "RANDOM_ERASE_MODE", "RANDOM_ERASE_COUNT", "RANDOM_ERASE_SPLIT"),
)
KEYS: Mapping[str, Key] = {
    "DATA.BATCH_SIZE": Key(256, ("batch_size",)),
    "TRAIN.ACCUM_ITER": Key(2, ("batch_size",)),
    # PaddleViT: /dataset/imagenet/
    "DATA.DATA_PATH": Key(None, ("data.options.path", "data.options.evaluation_path"), types=(str,)),
    "DATA.IMAGE_SIZE": Key(224, ("data.options.image_size", "model.options.img_size")),
    "DATA.CROP_PCT": Key(0.875, ("data.options.crop_fraction",)),
    "DATA.IMAGENET_MEAN": Key([0.5, 0.5, 0.5], ("data.options.mean",)),
    "DATA.IMAGENET_STD": Key([0.5, 0.5, 0.5], ("data.options.std",)),
    "MODEL.NAME": Key("ViT", ("model.name",)),
    "MODEL.PRETRAINED": Key(None, ("model.pretrained",), types=(str,)),
    # PaddleViT: 1000; here the number of classes of the dataset
    "MODEL.NUM_CLASSES": Key(None, ("model.options.num_classes",), types=_INTEGER),
    "MODEL.DROPOUT": Key(0.1, ("model.options.pos_drop_rate", "model.options.proj_drop_rate")),
    "MODEL.DROPPATH": Key(0.1, ("model.options.drop_path_rate",)),
    "MODEL.ATTENTION_DROPOUT": Key(0.1, ("model.options.attn_drop_rate",)),
    "MODEL.PATCH_SIZE": Key(32, ("model.options.patch_size",)),
    "MODEL.EMBED_DIM": Key(768, ("model.options.embed_dim",)),
    "MODEL.MLP_RATIO": Key(4.0, ("model.options.mlp_ratio",)),
    "MODEL.MLP_DIM": Key(None, ("model.options.mlp_ratio",), types=_INTEGER),
    "MODEL.NUM_HEADS": Key(12, ("model.options.num_heads",)),
    "MODEL.DEPTH": Key(12, ("model.options.depth",)),
    "MODEL.QKV_BIAS": Key(True, ("model.options.qkv_bias",)),
    "TRAIN.NUM_EPOCHS": Key(300, ("epochs",)),
    "TRAIN.WARMUP_EPOCHS": Key(3, ("schedule.warmup_epochs",)),
    "TRAIN.LR_SCHEDULER.NAME": Key("warmupcosine", ("schedule.name", "schedule.warmup_epochs")),
    "TRAIN.BASE_LR": Key(0.001, ("optimizer.options.lr", "schedule.final")),
    "TRAIN.END_LR": Key(5e-4, ("schedule.final",)),
    "TRAIN.LINEAR_SCALED_LR": Key(None, ("learning_rate.rule", "learning_rate.base_batch_size"), types=_INTEGER),
    "TRAIN.WEIGHT_DECAY": Key(0.05, ("optimizer.options.weight_decay",)),
    "TRAIN.GRAD_CLIP": Key(1.0, ("step.clip_norm",)),
    "TRAIN.OPTIMIZER.NAME": Key("AdamW", ("optimizer.name",)),
    "TRAIN.OPTIMIZER.EPS": Key(1e-8, ("optimizer.options.eps",)),
    "TRAIN.OPTIMIZER.BETAS": Key((0.9, 0.999), ("optimizer.options.betas",)),
    "TRAIN.OPTIMIZER.MOMENTUM": Key(0.9, ("optimizer.options.momentum",)),
    "TRAIN.SMOOTHING": Key(None, ("loss.options.label_smoothing",), types=_NUMBER),
    "TRAIN.MODEL_EMA": Key(None, ("ema",), types=(bool,)),
    "TRAIN.MODEL_EMA_DECAY": Key(None, ("ema.decay",), types=_NUMBER),
    "SEED": Key(0, ("step.seed",)),
    "AMP": Key(False, ("step.precision",)),
    "DATA.BATCH_SIZE_EVAL": Key(8, reason="every sample is evaluated once; the result does not depend on a batch size"),
    "DATA.DATASET": Key("imagenet2012", reason="the dataset is a folder of images per class: data.options.path"),
    "DATA.IMAGE_CHANNELS": Key(3, reason="images are read as RGB, three channels"),
    "DATA.NUM_WORKERS": Key(2, reason=f"--workers; {_MACHINE}"),
    "MODEL.TYPE": Key("ViT", reason="the model is timm's ViT"),
    "MODEL.RESUME": Key(None, reason="Paddle's optimizer state cannot be read; for its weights: model.pretrained"),
    "MODEL.ATTN_HEAD_SIZE": Key(None, reason="timm's head size is embed_dim / num_heads", types=_INTEGER),
    "TRAIN.LAST_EPOCH": Key(0, reason="a run continues from its checkpoint: samestep resume"),
    "TRAIN.WARMUP_START_LR": Key(
        1e-6, reason="the warm-up of n steps starts at 1/n of the learning rate and increases every step"
    ),
    **dict.fromkeys((f"TRAIN.LR_SCHEDULER.{name}" for name in ("MILESTONES", "DECAY_EPOCHS", "DECAY_RATE")), _SCHEDULE),
    "TRAIN.MODEL_EMA_FORCE_CPU": Key(None, reason=_MACHINE),
    "LOCAL_RANK": Key(None, reason=_MACHINE),
    **dict.fromkeys((f"TRAIN.{name}" for name in _AUGMENT_KEYS), _AUGMENT),
    "SAVE": Key(None, reason="--runs and --name"),
    "TAG": Key(None, reason="--name"),
    "SAVE_FREQ": Key(None, reason="one checkpoint per epoch; --checkpoint-every for more, --keep for their number"),
    "REPORT_FREQ": Key(None, reason="every step is in events.jsonl"),
    "VALIDATE_FREQ": Key(None, reason="one evaluation per epoch"),
    "EVAL": Key(None, reason="samestep eval instead of samestep train"),
    "NGPUS": Key(None, reason=f"--processes; {_MACHINE}"),
}

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


def convert_weights(file: Path, out: Path) -> Converted:
    """Write the weights of a `.pdparams` file to `out` with timm's names, and return them.

    Raises:
        DataError: the file contains anything but the arrays of a ViT.
    """
    converted = read_pdparams(file)
    save_file(converted.tensors, out)
    return converted


def convert_recipe(file: Path, devices: int | None) -> ConvertedRecipe:
    """Convert a YAML file for a number of devices.

    Raises:
        RecipeError: the file is not for PaddleViT's ViT, has no equivalent recipe, or `devices` is None.
    """
    raw = _read_keys(file, [])
    renamed = {OLD_NAMES.get(key, key): value for key, value in raw.items()}
    values = {name: key.default for name, key in KEYS.items()} | renamed
    _require_types(file, renamed)
    _require_convertible(file, values)
    if devices is None:
        size, steps = values["DATA.BATCH_SIZE"], values["TRAIN.ACCUM_ITER"]
        raise RecipeError(
            f"{file}: DATA.BATCH_SIZE is {size} samples per device, accumulated over {steps} steps",
            expected="a number of devices; batch_size counts the samples of one update on all devices",
            fix=f"for example --devices-meant 8, for a batch_size of {size * steps * 8}",
            code="E_BATCH_SIZE",
        )
    recipe = _recipe(values, devices)
    make_recipe(recipe, (), origin=str(file))
    return ConvertedRecipe(recipe, tuple(_converted_keys(raw, recipe)))


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
    own = dict(_leaves(raw))
    _require_vit(file, own)
    known = [*KEYS, *OLD_NAMES]
    for key in own:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise RecipeError(
                f"{file}: {key} is not a key of PaddleViT's ViT",
                expected="keys of image_classification/ViT/config.py; other models are not supported",
                fix=f"did you mean {close[0]}?" if close else "remove the key if it has no effect",
                code="E_UNKNOWN_KEY",
            )
    return keys | own


def _require_vit(file: Path, keys: Values) -> None:
    kind, name = str(keys.get("MODEL.TYPE", "ViT")), str(keys.get("MODEL.NAME", "")).lower()
    same = f"samestep train images --set model.name=timm:{name}, with the other values of the file"
    fix = same if name in OTHER_MODELS else "write a recipe with a model of timm, torchvision or your own"
    problem, expected = f"{file}: MODEL.TYPE is {kind}", "ViT; files of other models are not converted"
    require(kind.lower() == "vit", problem, expected, fix, code="E_PADDLE_FILE")


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


def _require_types(file: Path, values: Values) -> None:
    for key, value in values.items():
        default, types = KEYS[key].default, KEYS[key].types
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


def _require_convertible(file: Path, values: Values) -> None:
    rate, heads, dim = values["TRAIN.BASE_LR"], values["MODEL.NUM_HEADS"], values["MODEL.EMBED_DIM"]
    head_size, decay = values["MODEL.ATTN_HEAD_SIZE"], values["TRAIN.MODEL_EMA_DECAY"]
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
    }
    fix = "change the value in the file, or write a new recipe"
    for key, (is_valid, expected) in rules.items():
        require(is_valid, f"{file}: {key} is {values[key]}", expected, fix, code="E_PADDLE_FILE")


def _recipe(values: Values, devices: int) -> dict[str, Any]:
    batch_size = values["DATA.BATCH_SIZE"] * values["TRAIN.ACCUM_ITER"] * devices
    warms_up = values["TRAIN.LR_SCHEDULER.NAME"] == "warmupcosine"
    recipe: dict[str, Any] = {
        "data": _data(values),
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
        "microbatches": max(devices, 8),
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
        "augment": {"scale": [0.05, 1.0], "flip": 0.0},  # as PaddleViT's ViT
    }
    root = values["DATA.DATA_PATH"]
    if root is None:
        return {"name": "images", "options": options}
    has_lists = Path(root, "train_list.txt").is_file()
    train, validation = ("train_list.txt", "val_list.txt") if has_lists else ("train", "val")
    options |= {"path": str(Path(root, train)), "evaluation_path": str(Path(root, validation))}
    return {"name": "image_list" if has_lists else "images", "options": options}


def _model(values: Values) -> dict[str, Any]:
    name, dim, mlp_dim = values["MODEL.NAME"], values["MODEL.EMBED_DIM"], values["MODEL.MLP_DIM"]
    options = {
        "img_size": values["DATA.IMAGE_SIZE"],
        "patch_size": values["MODEL.PATCH_SIZE"],
        "embed_dim": dim,
        "depth": values["MODEL.DEPTH"],
        "num_heads": values["MODEL.NUM_HEADS"],
        "mlp_ratio": values["MODEL.MLP_RATIO"] if mlp_dim is None else mlp_dim / dim,
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


def _converted_keys(raw: Values, recipe: Values) -> Iterator[ConvertedKey]:
    """Yield every key of the file, then every default that sets something."""
    targets = {name: tuple(target for target in key.targets if _contains(recipe, target)) for name, key in KEYS.items()}
    for old, value in raw.items():
        name = OLD_NAMES.get(old, old)
        reason = KEYS[name].reason or "no effect with the other keys"
        yield ConvertedKey(old, value, False, targets[name], reason)
    present = {OLD_NAMES.get(key, key) for key in raw}
    for name, key in KEYS.items():
        if name not in present and key.default is not None and targets[name]:
            yield ConvertedKey(name, key.default, True, targets[name])


def _contains(recipe: Values, target: str) -> bool:
    node: Any = recipe
    for part in target.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
