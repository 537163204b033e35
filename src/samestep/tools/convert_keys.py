"""Keys of PaddleViT's YAML files by model family, with the recipe keys that they set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Models of PaddleViT's ViT with the same name in timm.
_NAMES = (
    *("vit_base_patch16_224", "vit_base_patch16_384", "vit_base_patch32_224", "vit_base_patch32_384"),
    *("vit_large_patch16_224", "vit_large_patch16_384", "vit_large_patch32_384"),
)
_DEIT_NAMES = (*(f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")), "deit_base_patch16_384")
_SWIN_NAMES = (
    *(f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base", "large")),
    *(f"swin_{size}_patch4_window12_384" for size in ("base", "large")),
)
# Models of PaddleViT with the same name in timm whose files are not converted.
DISTILLED_NAMES = (
    *(f"deit_{size}_distilled_patch16_224" for size in ("tiny", "small", "base")),
    "deit_base_distilled_patch16_384",
)
NUMBER, INTEGER = (int, float), (int,)
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
    """One key of a model family.

    Attributes:
        default: default of the family's config.py: of ViT at commit 6368afe, of DeiT and Swin at commit 5ac7d89; None
            for keys of other commits, which are off by default.
        targets: recipe keys that the key sets.
        reason: reason why a key has no targets.
        types: types of a key whose default is None and which sets something.
    """

    default: Any
    targets: tuple[str, ...] = ()
    reason: str = ""
    types: tuple[type, ...] = ()


AUGMENT = "range and random draws differ from torchvision's; set data.options.augment"
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
    "MODEL.NUM_CLASSES": Key(None, ("model.options.num_classes",), types=INTEGER),
    "MODEL.DROPOUT": Key(0.1, ("model.options.pos_drop_rate", "model.options.proj_drop_rate")),
    "MODEL.DROPPATH": Key(0.1, ("model.options.drop_path_rate",)),
    "MODEL.ATTENTION_DROPOUT": Key(0.1, ("model.options.attn_drop_rate",)),
    "MODEL.PATCH_SIZE": Key(32, ("model.options.patch_size",)),
    "MODEL.EMBED_DIM": Key(768, ("model.options.embed_dim",)),
    "MODEL.MLP_RATIO": Key(4.0, ("model.options.mlp_ratio",)),
    "MODEL.MLP_DIM": Key(None, ("model.options.mlp_ratio",), types=INTEGER),
    "MODEL.NUM_HEADS": Key(12, ("model.options.num_heads",)),
    "MODEL.DEPTH": Key(12, ("model.options.depth",)),
    "MODEL.QKV_BIAS": Key(True, ("model.options.qkv_bias",)),
    "TRAIN.NUM_EPOCHS": Key(300, ("epochs",)),
    "TRAIN.WARMUP_EPOCHS": Key(3, ("schedule.warmup_epochs",)),
    "TRAIN.LR_SCHEDULER.NAME": Key("warmupcosine", ("schedule.name", "schedule.warmup_epochs")),
    "TRAIN.BASE_LR": Key(0.001, ("optimizer.options.lr", "schedule.final")),
    "TRAIN.END_LR": Key(5e-4, ("schedule.final",)),
    "TRAIN.LINEAR_SCALED_LR": Key(None, ("learning_rate.rule", "learning_rate.base_batch_size"), types=INTEGER),
    "TRAIN.WEIGHT_DECAY": Key(0.05, ("optimizer.options.weight_decay",)),
    "TRAIN.GRAD_CLIP": Key(1.0, ("step.clip_norm",)),
    "TRAIN.OPTIMIZER.NAME": Key("AdamW", ("optimizer.name",)),
    "TRAIN.OPTIMIZER.EPS": Key(1e-8, ("optimizer.options.eps",)),
    "TRAIN.OPTIMIZER.BETAS": Key((0.9, 0.999), ("optimizer.options.betas",)),
    "TRAIN.OPTIMIZER.MOMENTUM": Key(0.9, ("optimizer.options.momentum",)),
    "TRAIN.SMOOTHING": Key(None, ("loss.options.label_smoothing",), types=NUMBER),
    "TRAIN.MODEL_EMA": Key(None, ("ema",), types=(bool,)),
    "TRAIN.MODEL_EMA_DECAY": Key(None, ("ema.decay",), types=NUMBER),
    "SEED": Key(0, ("step.seed",)),
    "AMP": Key(False, ("step.precision",)),
    "DATA.BATCH_SIZE_EVAL": Key(8, reason="every sample is evaluated once; the result does not depend on a batch size"),
    "DATA.DATASET": Key("imagenet2012", reason="the dataset is a folder of images per class: data.options.path"),
    "DATA.IMAGE_CHANNELS": Key(3, reason="images are read as RGB, three channels"),
    "DATA.NUM_WORKERS": Key(2, reason=f"--workers; {_MACHINE}"),
    "MODEL.TYPE": Key("ViT", reason="the model is timm's"),
    "MODEL.RESUME": Key(None, reason="Paddle's optimizer state cannot be read; for its weights: model.pretrained"),
    "MODEL.ATTN_HEAD_SIZE": Key(None, reason="timm's head size is embed_dim / num_heads", types=INTEGER),
    "TRAIN.LAST_EPOCH": Key(0, reason="a run continues from its checkpoint: samestep resume"),
    "TRAIN.WARMUP_START_LR": Key(
        1e-6, reason="the warm-up of n steps starts at 1/n of the learning rate and increases every step"
    ),
    **dict.fromkeys((f"TRAIN.LR_SCHEDULER.{name}" for name in ("MILESTONES", "DECAY_EPOCHS", "DECAY_RATE")), _SCHEDULE),
    "TRAIN.MODEL_EMA_FORCE_CPU": Key(None, reason=_MACHINE),
    "LOCAL_RANK": Key(None, reason=_MACHINE),
    **dict.fromkeys((f"TRAIN.{name}" for name in _AUGMENT_KEYS), Key(None, reason=AUGMENT)),
    "SAVE": Key(None, reason="--runs and --name"),
    "TAG": Key(None, reason="--name"),
    "SAVE_FREQ": Key(None, reason="one checkpoint per epoch; --checkpoint-every for more, --keep for their number"),
    "REPORT_FREQ": Key(None, reason="every step is in events.jsonl"),
    "VALIDATE_FREQ": Key(None, reason="one evaluation per epoch"),
    "EVAL": Key(None, reason="samestep eval instead of samestep train"),
    "NGPUS": Key(None, reason=f"--processes; {_MACHINE}"),
}


def _with_defaults(keys: Mapping[str, Key], defaults: Mapping[str, Any]) -> dict[str, Key]:
    return {**keys, **{name: keys[name]._replace(default=value) for name, value in defaults.items()}}


_IMAGENET = {
    "DATA.IMAGENET_MEAN": [0.485, 0.456, 0.406],
    "DATA.IMAGENET_STD": [0.229, 0.224, 0.225],
    "MODEL.DROPOUT": 0.0,
    "MODEL.ATTENTION_DROPOUT": 0.0,
    "MODEL.PATCH_SIZE": 16,
    "TRAIN.WEIGHT_DECAY": 0.05,
    "TRAIN.BASE_LR": 5e-4,
    "TRAIN.ACCUM_ITER": 1,
    "TRAIN.LINEAR_SCALED_LR": 512,
    "TRAIN.MODEL_EMA_DECAY": 0.99996,
    "TRAIN.SMOOTHING": 0.1,
    "TRAIN.COLOR_JITTER": 0.4,
    "TRAIN.RAND_AUGMENT": True,
    "TRAIN.RAND_AUGMENT_MAGNITUDE": 9,
    "TRAIN.MIXUP_ALPHA": 0.8,
    "TRAIN.CUTMIX_ALPHA": 1.0,
    "TRAIN.RANDOM_ERASE_PROB": 0.25,
}
_DEIT_KEYS = _with_defaults(
    KEYS,
    {
        **_IMAGENET,
        "MODEL.NAME": "deit",
        "MODEL.TYPE": "deit",
        "MODEL.DROPPATH": 0.0,
        "TRAIN.WARMUP_EPOCHS": 5,
        "TRAIN.END_LR": 0.0,
        "TRAIN.GRAD_CLIP": None,
        "TRAIN.MODEL_EMA": True,
    },
) | {
    "TRAIN.DISTILLATION_TYPE": Key("hard", reason="a recipe has no teacher model"),
    **dict.fromkeys(
        (f"TRAIN.{name}" for name in ("DISTILLATION_ALPHA", "DISTILLATION_TAU", "TEACHER_MODEL")),
        Key(None, reason="not used without distillation"),
    ),
}
_SWIN_KEYS = _with_defaults(
    KEYS,
    {
        **_IMAGENET,
        "MODEL.NAME": "swin",
        "MODEL.TYPE": "swin",
        "DATA.CROP_PCT": 0.9,
        "MODEL.EMBED_DIM": 96,
        "MODEL.NUM_HEADS": [3, 6, 12, 24],
        "TRAIN.WARMUP_EPOCHS": 20,
        "TRAIN.END_LR": 5e-6,
        "TRAIN.GRAD_CLIP": 5.0,
        "TRAIN.MODEL_EMA": False,
    },
) | {
    "MODEL.DROPOUT": Key(0.0, ("model.options.proj_drop_rate",)),
    "MODEL.WINDOW_SIZE": Key(7, ("model.options.window_size",)),
    "MODEL.STAGE_DEPTHS": Key([2, 2, 6, 2], ("model.options.depths",)),
    "MODEL.QK_SCALE": Key(None, reason="timm's scale is that of the head size"),
    "MODEL.APE": Key(False, reason="timm's Swin has relative positions"),
    "MODEL.PATCH_NORM": Key(True, reason="timm's Swin has a norm layer after the patch embedding"),
}
_SWIN_KEYS = {name: key for name, key in _SWIN_KEYS.items() if name not in ("MODEL.DEPTH", "MODEL.ATTN_HEAD_SIZE")}


class Family(NamedTuple):
    """A model family of PaddleViT.

    Attributes:
        keys: keys of the family's files.
        names: models with the same name in timm.
        model: model of timm for other names; structure and sizes are options.
        crop: `data.options.augment` of the random crop and flip.
        old_names: keys of older files.
        required: values of keys that nothing in a recipe corresponds to.
    """

    keys: Mapping[str, Key]
    names: tuple[str, ...]
    model: str
    crop: Mapping[str, Any]
    old_names: Mapping[str, str] = OLD_NAMES
    required: Mapping[str, Any] = {}


_CROP = {"scale": [0.08, 1.0], "flip": 0.5}
_SWIN_OLD_NAMES = {
    "MODEL.DROP_PATH": "MODEL.DROPPATH",
    **{
        f"MODEL.TRANS.{name}": f"MODEL.{name}"
        for name in (
            *("PATCH_SIZE", "WINDOW_SIZE", "EMBED_DIM", "NUM_HEADS", "STAGE_DEPTHS"),
            *("MLP_RATIO", "QKV_BIAS", "QK_SCALE", "APE", "PATCH_NORM"),
        )
    },
}
FAMILIES: Mapping[str, Family] = {
    "vit": Family(KEYS, _NAMES, "vit_base_patch16_224", {"scale": [0.05, 1.0], "flip": 0.0}),
    "deit": Family(_DEIT_KEYS, _DEIT_NAMES, _DEIT_NAMES[0], _CROP, required={"TRAIN.DISTILLATION_TYPE": "none"}),
    "swin": Family(
        _SWIN_KEYS,
        _SWIN_NAMES,
        _SWIN_NAMES[0],
        _CROP,
        _SWIN_OLD_NAMES,
        {"MODEL.DROPOUT": 0, "MODEL.QK_SCALE": None, "MODEL.APE": False, "MODEL.PATCH_NORM": True},
    ),
}
