"""Tests of the conversion of PaddleViT's YAML files: recipe, keys, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from samestep.config import Recipe
from samestep.errors import RecipeError
from samestep.recipes.recipe_files import load_recipe, make_recipe
from samestep.tools.convert import FAMILIES, ConvertedRecipe, convert_recipe
from samestep.torchvision_import import make_torchvision_importable

KEYS, OLD_NAMES = FAMILIES["vit"].keys, FAMILIES["vit"].old_names
TARGETS = {name: tuple(key.to) for name, key in KEYS.items() if key.to}
REASONS = {name: key.reason for name, key in KEYS.items() if key.reason}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return `{"A": {"B": 1}}` for `{"A.B": 1}`."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return root


def convert(folder: Path, flat: dict[str, Any], devices: int | None = 8) -> ConvertedRecipe:
    path = folder / "paddle.yaml"
    path.write_text(yaml.safe_dump(nested(flat)), encoding="utf-8")
    return convert_recipe(path, devices)


def recipe_of(folder: Path, flat: dict[str, Any], devices: int = 8) -> Recipe:
    return make_recipe(convert(folder, flat, devices).recipe, (), origin="a test")


def test_written_file_is_the_recipe_with_a_comment_per_key(tmp_path: Path) -> None:
    converted = convert(tmp_path, {"TRAIN.NUM_EPOCHS": 7})
    path = tmp_path / "mine.yaml"
    path.write_text(converted.to_text("paddle.yaml"), encoding="utf-8")
    assert load_recipe(str(path)) == make_recipe(converted.recipe, (), origin="a test")
    text = path.read_text(encoding="utf-8")
    assert "# TRAIN.NUM_EPOCHS = 7 -> epochs\n" in text
    assert "# MODEL.DROPPATH = 0.1 (PaddleViT's default) -> model.options.drop_path_rate\n" in text
    assert all(f"# {key}\n" in text for key in converted.keys)


# --- keys -------------------------------------------------------------------------------------------

# Another value of each key with a target; some set the same recipe key as another one.
OTHER_VALUES: dict[str, Any] = {
    "DATA.BATCH_SIZE": 64,
    "TRAIN.ACCUM_ITER": 3,
    "DATA.DATA_PATH": "/somewhere",
    "DATA.IMAGE_SIZE": 128,
    "DATA.CROP_PCT": 0.9,
    "DATA.IMAGENET_MEAN": [0.4, 0.5, 0.6],
    "DATA.IMAGENET_STD": "(0.2, 0.2, 0.3)",
    "MODEL.NAME": "vit_large_patch16_224",
    "MODEL.PRETRAINED": "weights",
    "MODEL.NUM_CLASSES": 10,
    "MODEL.DROPOUT": 0.0,
    "MODEL.DROPPATH": 0.2,
    "MODEL.ATTENTION_DROPOUT": 0.3,
    "MODEL.PATCH_SIZE": 16,
    "MODEL.EMBED_DIM": 384,
    "MODEL.MLP_RATIO": 3.0,
    "MODEL.MLP_DIM": 1536,
    "MODEL.NUM_HEADS": 6,
    "MODEL.DEPTH": 3,
    "MODEL.QKV_BIAS": False,
    "TRAIN.NUM_EPOCHS": 5,
    "TRAIN.WARMUP_EPOCHS": 1,
    "TRAIN.LR_SCHEDULER.NAME": "warmupcosine",
    "TRAIN.BASE_LR": 0.002,
    "TRAIN.END_LR": "1e-5",
    "TRAIN.LINEAR_SCALED_LR": 512,
    "TRAIN.WEIGHT_DECAY": 0.1,
    "TRAIN.GRAD_CLIP": None,
    "TRAIN.OPTIMIZER.NAME": "AdamW",
    "TRAIN.OPTIMIZER.EPS": "1e-6",
    "TRAIN.OPTIMIZER.BETAS": "(0.9, 0.95)",
    "TRAIN.OPTIMIZER.MOMENTUM": 0.8,
    "TRAIN.SMOOTHING": 0.1,
    "TRAIN.MODEL_EMA": True,
    "TRAIN.MODEL_EMA_DECAY": 0.999,
    "SEED": 3,
    "AMP": True,
}


def test_every_key_sets_its_recipe_keys(tmp_path: Path) -> None:
    converted = convert(tmp_path, OTHER_VALUES)
    model, data = converted.recipe.pop("model"), converted.recipe.pop("data")
    assert model.pop("options") == {
        **{"img_size": 128, "num_classes": 10, "pos_drop_rate": 0.0, "proj_drop_rate": 0.0, "drop_path_rate": 0.2},
        **{"attn_drop_rate": 0.3, "patch_size": 16, "embed_dim": 384, "mlp_ratio": 4.0, "num_heads": 6, "depth": 3},
        "qkv_bias": False,
    }
    assert model == {"name": "timm:vit_large_patch16_224", "pretrained": "weights.pdparams"}
    assert data["options"].pop("augment") == {"scale": [0.05, 1.0], "flip": 0.0}
    assert data["options"].pop("mean") == [0.4, 0.5, 0.6]
    assert data["options"].pop("std") == [0.2, 0.2, 0.3]
    paths = {"path": "/somewhere/train", "evaluation_path": "/somewhere/val"}
    options = {"image_size": 128, "crop_fraction": 0.9, "interpolation": "bicubic", **paths}
    assert data == {"name": "images", "options": options}
    adam = {"lr": 0.002, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}
    assert converted.recipe == {
        "batch_size": 64 * 3 * 8,
        "microbatches": 8,
        "epochs": 5,
        "optimizer": {"name": "adamw", "options": adam},
        "schedule": {"name": "cosine", "warmup_epochs": 1, "final": 0.005},
        "learning_rate": {"rule": "linear", "base_batch_size": 512},
        "loss": {"name": "cross_entropy", "options": {"label_smoothing": 0.1}},
        "ema": {"decay": 0.999},
        "step": {"seed": 3, "precision": "fp16", "clip_norm": None},
        "metrics": ["accuracy", "top5"],
    }
    targets = {result.key: result.targets for result in converted.keys if result.key in OTHER_VALUES}
    assert targets == {**TARGETS, "TRAIN.OPTIMIZER.MOMENTUM": ()}  # AdamW has no momentum
    sgd = convert(tmp_path, {"TRAIN.OPTIMIZER.NAME": "SGD", "TRAIN.LR_SCHEDULER.NAME": "cosine"}).recipe
    assert sgd["optimizer"] == {"name": "sgd", "options": {"lr": 0.001, "weight_decay": 0.05, "momentum": 0.9}}
    assert "warmup_epochs" not in sgd["schedule"]


def test_keys_without_equivalent_are_omitted_with_a_reason(tmp_path: Path) -> None:
    values = {"MODEL.TYPE": "vit", "DATA.IMAGE_CHANNELS": 3, "MODEL.ATTN_HEAD_SIZE": 64}
    values |= dict.fromkeys(("DATA.BATCH_SIZE_EVAL", "DATA.NUM_WORKERS", "TRAIN.LAST_EPOCH"), 5)
    flat = {key: values.get(key, "1e-5" if key == "TRAIN.WARMUP_START_LR" else "cifar10") for key in REASONS}
    converted = convert(tmp_path, flat)
    assert converted.recipe == convert(tmp_path, {}).recipe
    omitted = {result.key: str(result) for result in converted.keys if not result.targets}
    assert omitted == {key: f"{key} = {flat[key]}: omitted, {REASONS[key]}".replace("1e-5", "1e-05") for key in REASONS}


# --- refusals -------------------------------------------------------------------------------------


# image_classification/SwinTransformer/configs/swin_tiny_patch4_window7_224.yaml, and the form of older commits.
SWIN = {
    "DATA.IMAGE_SIZE": 224,
    "DATA.CROP_PCT": 0.9,
    "MODEL.TYPE": "swin",
    "MODEL.NAME": "swin_tiny_patch4_window7_224",
    "MODEL.DROPPATH": 0.2,
    "MODEL.EMBED_DIM": 96,
    "MODEL.STAGE_DEPTHS": [2, 2, 6, 2],
    "MODEL.NUM_HEADS": [3, 6, 12, 24],
    "MODEL.WINDOW_SIZE": 7,
    "MODEL.PATCH_SIZE": 4,
}
OLD_SWIN = {
    **{key: SWIN[key] for key in ("DATA.IMAGE_SIZE", "DATA.CROP_PCT", "MODEL.TYPE", "MODEL.NAME")},
    "MODEL.DROP_PATH": 0.2,
    **{
        f"MODEL.TRANS.{name}": SWIN[f"MODEL.{name}"]
        for name in ("EMBED_DIM", "STAGE_DEPTHS", "NUM_HEADS", "WINDOW_SIZE", "PATCH_SIZE")
    },
}
# image_classification/DeiT/configs/deit_tiny_patch16_224.yaml.
DEIT = {
    "DATA.IMAGE_SIZE": 224,
    "DATA.CROP_PCT": 0.875,
    "MODEL.TYPE": "deit",
    "MODEL.NAME": "deit_tiny_patch16_224",
    "MODEL.PATCH_SIZE": 16,
    "MODEL.MLP_RATIO": 4.0,
    "MODEL.QKV_BIAS": True,
    "MODEL.EMBED_DIM": 192,
    "MODEL.DEPTH": 12,
    "MODEL.NUM_HEADS": 3,
    "MODEL.DROPOUT": 0.0,
    "MODEL.ATTENTION_DROPOUT": 0.1,
    "TRAIN.NUM_EPOCHS": 300,
    "TRAIN.WARMUP_EPOCHS": 5,
    "TRAIN.BASE_LR": "5e-4",
    "TRAIN.END_LR": 0.0,
    "TRAIN.LINEAR_SCALED_LR": 512,
    "TRAIN.DISTILLATION_TYPE": "none",
}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other file": ({"BASE": ["base.yaml"]}, "includes other files by BASE"),
    "other model": ({"MODEL.TYPE": "CaiT"}, "MODEL.TYPE is CaiT"),
    "unknown key": ({"MODEL.TRANS.WINDOW_SIZE": 7}, "MODEL.TRANS.WINDOW_SIZE is not a key"),
    "typo": ({"TRAIN.NUM_EPOCH": 7}, "TRAIN.NUM_EPOCH is not a key"),
    "gray images": ({"DATA.IMAGE_CHANNELS": 1}, "DATA.IMAGE_CHANNELS is 1"),
    "other head size": ({"MODEL.ATTN_HEAD_SIZE": 32}, "MODEL.ATTN_HEAD_SIZE is 32"),
    "other schedule": ({"TRAIN.LR_SCHEDULER.NAME": "multi-step"}, "NAME is multi-step"),
    "other optimizer": ({"TRAIN.OPTIMIZER.NAME": "Lamb"}, "NAME is Lamb"),
    "rising learning rate": ({"TRAIN.BASE_LR": 1e-4}, "TRAIN.END_LR is 0.0005"),
    "zero learning rate": ({"TRAIN.BASE_LR": 0.0}, "TRAIN.BASE_LR is 0.0"),
    "EMA without decay": ({"TRAIN.MODEL_EMA": True}, "TRAIN.MODEL_EMA_DECAY is None"),
    "text instead of number": ({"DATA.BATCH_SIZE": "many"}, "DATA.BATCH_SIZE is 'many'"),
    "boolean instead of number": ({"TRAIN.NUM_EPOCHS": True}, "TRAIN.NUM_EPOCHS is True"),
    "fraction": ({"TRAIN.NUM_EPOCHS": 2.5}, "TRAIN.NUM_EPOCHS is 2.5"),
    "mapping": ({"DATA.BATCH_SIZE.X": 1}, "DATA.BATCH_SIZE.X is not a key"),
    "section without keys": ({"DATA": 3}, "DATA is not a key"),
    "distillation": (DEIT | {"TRAIN.DISTILLATION_TYPE": "hard"}, "DISTILLATION_TYPE is hard"),
    "distilled model": (DEIT | {"MODEL.NAME": "deit_tiny_distilled_patch16_224"}, "NAME is deit_tiny_distilled"),
    "absolute positions": (SWIN | {"MODEL.APE": True}, "MODEL.APE is True"),
    "key of another family": (SWIN | {"MODEL.DEPTH": 12}, "MODEL.DEPTH is not a key"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_file(tmp_path: Path, kind: str) -> None:
    flat, message = REFUSED[kind]
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")) as raised:
        convert(tmp_path, flat)
    assert raised.value.code == "E_UNREADABLE"


@pytest.mark.parametrize("flat", [SWIN, OLD_SWIN, DEIT], ids=["swin", "older swin", "deit"])
def test_swin_and_deit_have_the_parameters_of_timms_model(tmp_path: Path, flat: dict[str, Any]) -> None:
    make_torchvision_importable()
    timm = pytest.importorskip("timm")
    converted = convert(tmp_path, flat)
    model = make_recipe(converted.recipe, (), origin="test").model
    name = flat["MODEL.NAME"]
    assert model.name == f"timm:{name}"
    with torch.device("meta"):
        own, other = timm.create_model(name, **model.options), timm.create_model(name)
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (own, other)]
    assert shapes[0] == shapes[1]
    assert model.options["drop_path_rate"] == flat.get("MODEL.DROPPATH", flat.get("MODEL.DROP_PATH", 0.0))


def test_lists_of_the_dataset_are_used(tmp_path: Path) -> None:
    values = {"DATA.DATA_PATH": str(tmp_path)}
    assert recipe_of(tmp_path, values).data.name == "images"
    (tmp_path / "train_list.txt").touch()
    data = recipe_of(tmp_path, values).data
    assert data.name == "image_list"
    assert data.options["path"] == str(tmp_path / "train_list.txt")
    assert data.options["evaluation_path"] == str(tmp_path / "val_list.txt")
