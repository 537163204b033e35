"""A YAML file of PaddleViT's ViT becomes a recipe, and every key of it is accounted for."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from samestep.config import Recipe
from samestep.errors import RecipeError
from samestep.recipes.parse import load_recipe, make_recipe, recipe_data
from samestep.recipes.weights.paddle import NAMES
from samestep.tools.convert.keys import DEFAULTS, OLD_NAMES, REASONS, TARGETS
from samestep.tools.convert.recipe import ConvertedRecipe, convert_recipe

# The form of image_classification/ViT/configs/vit_base_patch32_384.yaml.
NESTED: dict[str, Any] = {
    "DATA": {"IMAGE_SIZE": 384, "CROP_PCT": 1.0},
    "MODEL": {
        "TYPE": "ViT",
        "NAME": "vit_base_patch32_384",
        "TRANS": {
            "PATCH_SIZE": 32,
            "EMBED_DIM": 768,
            "MLP_RATIO": 4.0,
            "DEPTH": 12,
            "NUM_HEADS": 12,
            "QKV_BIAS": True,
        },
    },
    "TRAIN": {
        "NUM_EPOCHS": 300,
        "WARMUP_EPOCHS": 3,
        "WEIGHT_DECAY": 0.3,
        "BASE_LR": 0.003,
        "WARMUP_START_LR": "1e-6",
        "END_LR": "5e-4",
        "ACCUM_ITER": 2,
    },
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"A.B": 1}` as `{"A": {"B": 1}}`."""
    whole: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        place = whole
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return whole


def converted(folder: Path, flat: dict[str, Any], devices: int | None = 8) -> ConvertedRecipe:
    path = folder / "paddle.yaml"
    path.write_text(yaml.safe_dump(nested(flat)), encoding="utf-8")
    return convert_recipe(path, devices)


def recipe_of(folder: Path, flat: dict[str, Any], devices: int = 8) -> Recipe:
    return make_recipe(converted(folder, flat, devices).recipe, (), origin="a test")


def test_a_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "vit_base_patch32_384.yaml"
    path.write_text(yaml.safe_dump(NESTED), encoding="utf-8")
    found = convert_recipe(path, 4)
    recipe = make_recipe(found.recipe, (), origin="a test")
    assert recipe.batch_size == 256 * 2 * 4
    assert (recipe.model.name, recipe.model.pretrained) == ("timm:vit_base_patch32_384", None)
    assert recipe.model.options == {
        "img_size": 384,
        "patch_size": 32,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "pos_drop_rate": 0.1,
        "proj_drop_rate": 0.1,
        "attn_drop_rate": 0.1,
        "drop_path_rate": 0.1,
    }
    options = recipe.data.options
    assert (options["image_size"], options["crop_fraction"], options["mean"]) == (384, 1.0, [0.5, 0.5, 0.5])
    assert recipe.optimizer.options == {"lr": 0.003, "weight_decay": 0.3, "betas": [0.9, 0.999], "eps": 1e-8}
    assert recipe.optimizer.decay_norms
    assert (recipe.schedule.name, recipe.schedule.warmup_epochs) == ("cosine", 3.0)
    assert recipe.schedule.final * recipe.optimizer.options["lr"] == pytest.approx(5e-4)
    assert (recipe.epochs, recipe.step.clip_norm, recipe.step.precision) == (300, 1.0, "fp32")


def test_what_is_written_is_the_recipe_under_its_account(tmp_path: Path) -> None:
    found = converted(tmp_path, {"TRAIN.NUM_EPOCHS": 7})
    path = tmp_path / "mine.yaml"
    path.write_text(found.to_text("paddle.yaml"), encoding="utf-8")
    assert load_recipe(str(path)) == make_recipe(found.recipe, (), origin="a test")
    text = path.read_text(encoding="utf-8")
    assert "# TRAIN.NUM_EPOCHS = 7 -> epochs\n" in text
    assert "# MODEL.DROPPATH = 0.1 (PaddleViT's default) -> model.options.drop_path_rate\n" in text
    assert all(f"# {account}\n" in text for account in found.accounts)


# --- every key -------------------------------------------------------------------------------------------

# Another value of each key that decides something, and what else must be said for it to do so.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DATA.BATCH_SIZE": (64, {}),
    "TRAIN.ACCUM_ITER": (1, {}),
    "DATA.DATA_PATH": ("/somewhere", {}),
    "DATA.IMAGE_SIZE": (128, {}),
    "DATA.CROP_PCT": (0.9, {}),
    "DATA.IMAGENET_MEAN": ([0.4, 0.5, 0.6], {}),
    "DATA.IMAGENET_STD": ([0.2, 0.2, 0.3], {}),
    "MODEL.NAME": ("vit_large_patch16_224", {}),
    "MODEL.PRETRAINED": ("weights", {}),
    "MODEL.NUM_CLASSES": (10, {}),
    "MODEL.DROPOUT": (0.0, {}),
    "MODEL.DROPPATH": (0.2, {}),
    "MODEL.ATTENTION_DROPOUT": (0.2, {}),
    "MODEL.PATCH_SIZE": (16, {}),
    "MODEL.EMBED_DIM": (384, {}),
    "MODEL.MLP_RATIO": (3.0, {}),
    "MODEL.MLP_DIM": (1536, {}),
    "MODEL.NUM_HEADS": (6, {}),
    "MODEL.DEPTH": (3, {}),
    "MODEL.QKV_BIAS": (False, {}),
    "TRAIN.NUM_EPOCHS": (5, {}),
    "TRAIN.WARMUP_EPOCHS": (1, {}),
    "TRAIN.LR_SCHEDULER.NAME": ("cosine", {}),
    "TRAIN.BASE_LR": (0.002, {}),
    "TRAIN.END_LR": ("1e-5", {}),
    "TRAIN.LINEAR_SCALED_LR": (512, {}),
    "TRAIN.WEIGHT_DECAY": (0.1, {}),
    "TRAIN.GRAD_CLIP": (None, {}),
    "TRAIN.OPTIMIZER.NAME": ("SGD", {}),
    "TRAIN.OPTIMIZER.EPS": ("1e-6", {}),
    "TRAIN.OPTIMIZER.BETAS": ("(0.9, 0.95)", {}),
    "TRAIN.OPTIMIZER.MOMENTUM": (0.8, {"TRAIN.OPTIMIZER.NAME": "SGD"}),
    "TRAIN.SMOOTHING": (0.1, {}),
    "TRAIN.MODEL_EMA": (True, {"TRAIN.MODEL_EMA_DECAY": 0.99}),
    "TRAIN.MODEL_EMA_DECAY": (0.999, {"TRAIN.MODEL_EMA": True}),
    "SEED": (3, {}),
    "AMP": (True, {}),
}
# What the key is before, where leaving it out is no recipe.
FIRST = {"TRAIN.MODEL_EMA_DECAY": {"TRAIN.MODEL_EMA_DECAY": 0.5}}
# What a key changes besides what it is said to decide: options that only one of two optimizers has.
BESIDES = {"TRAIN.OPTIMIZER.NAME": {"optimizer.options.betas", "optimizer.options.eps", "optimizer.options.momentum"}}


def leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix.removesuffix("."): data}
    return dict(itertools.chain.from_iterable(leaves(value, f"{prefix}{key}.").items() for key, value in data.items()))


@pytest.mark.parametrize("key", TARGETS)
def test_a_key_decides_what_the_table_says_and_nothing_else(tmp_path: Path, key: str) -> None:
    value, more = OTHERS[key]
    before = leaves(recipe_data(recipe_of(tmp_path, {**more, **FIRST.get(key, {})})))
    found = converted(tmp_path, {**more, key: value})
    after = leaves(recipe_data(make_recipe(found.recipe, (), origin="a test")))
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    allowed = {*TARGETS[key], *BESIDES.get(key, ())}
    unexpected = {name for name in changed if not any(f"{name}.".startswith(f"{target}.") for target in allowed)}
    assert changed
    assert not unexpected
    (account,) = [account for account in found.accounts if account.key == key]
    assert account.is_given
    if value is not None:
        assert set(account.targets) <= set(TARGETS[key])
        assert account.targets


@pytest.mark.parametrize("key", REASONS)
def test_a_key_without_a_counterpart_changes_nothing_and_says_why(tmp_path: Path, key: str) -> None:
    values = {"MODEL.TYPE": "vit", "DATA.IMAGE_CHANNELS": 3, "MODEL.ATTN_HEAD_SIZE": 64}
    whole = {"DATA.BATCH_SIZE_EVAL", "DATA.NUM_WORKERS", "TRAIN.LAST_EPOCH"}
    value = values.get(key, 5 if key in whole else "1e-5" if key == "TRAIN.WARMUP_START_LR" else "cifar10")
    found = converted(tmp_path, {key: value})
    assert found.recipe == converted(tmp_path, {}).recipe
    (account,) = [account for account in found.accounts if account.key == key]
    assert not account.targets
    assert str(account).endswith(f": left out, {REASONS[key]}")


def test_every_key_has_one_of_both() -> None:
    assert set(TARGETS) | set(REASONS) == set(DEFAULTS)
    assert not set(TARGETS) & set(REASONS)
    assert set(OLD_NAMES.values()) <= set(DEFAULTS)
    assert set(OTHERS) == set(TARGETS)


def test_accounts_are_of_every_key_once(tmp_path: Path) -> None:
    flat = {"DATA.NUM_WORKERS": 3, "MODEL.TRANS.DEPTH": 3, "TRAIN.OPTIMIZER.MOMENTUM": 0.5, "SAVE_FREQ": 1}
    accounts = converted(tmp_path, flat).accounts
    given = [account.key for account in accounts if account.is_given]
    assert sorted(given) == sorted(flat), "under the names that the file has"
    keys = [OLD_NAMES.get(account.key, account.key) for account in accounts]
    assert len(keys) == len(set(keys))
    (unused,) = [account for account in accounts if account.key == "TRAIN.OPTIMIZER.MOMENTUM"]
    assert "left out, nothing follows from it" in str(unused), "AdamW has none"


@pytest.mark.parametrize("key", OLD_NAMES)
def test_older_names_mean_the_same(tmp_path: Path, key: str) -> None:
    value, _ = OTHERS.get(OLD_NAMES[key], (64, {}))
    assert converted(tmp_path, {key: value}).recipe == converted(tmp_path, {OLD_NAMES[key]: value}).recipe


def test_files_that_a_file_includes_come_before_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("TRAIN: {NUM_EPOCHS: 5, BASE_LR: 0.002}\nSEED: 1", encoding="utf-8")
    assert recipe_of(tmp_path, {"BASE": ["base.yaml"], "TRAIN.NUM_EPOCHS": 6}).epochs == 6
    assert recipe_of(tmp_path, {"BASE": ["base.yaml"], "TRAIN.NUM_EPOCHS": 6}).step.seed == 1
    assert recipe_of(tmp_path, {"BASE": [""], "SEED": 2}).step.seed == 2
    with pytest.raises(RecipeError, match="includes itself"):
        converted(tmp_path, {"BASE": ["paddle.yaml"]})


# --- what is refused -------------------------------------------------------------------------------------


def test_the_number_of_devices_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"DATA\.BATCH_SIZE is 64 samples a device, accumulated over 3") as error:
        converted(tmp_path, {"DATA.BATCH_SIZE": 64, "TRAIN.ACCUM_ITER": 3}, None)
    assert "--devices-meant 8 makes it 1536" in str(error.value.do)


@pytest.mark.parametrize("devices", [1, 3, 16])
def test_as_many_ranks_as_devices_can_train_it(tmp_path: Path, devices: int) -> None:
    recipe = recipe_of(tmp_path, {"DATA.BATCH_SIZE": 32, "TRAIN.ACCUM_ITER": 1}, devices)
    assert (recipe.batch_size, recipe.shards) == (32 * devices, max(8, devices))


REFUSED = {
    "another model": ({"MODEL.TYPE": "Swin"}, "MODEL.TYPE is Swin"),
    "an unknown key": ({"MODEL.TRANS.WINDOW_SIZE": 7}, "MODEL.TRANS.WINDOW_SIZE is not a key"),
    "a slip": ({"TRAIN.NUM_EPOCH": 7}, "TRAIN.NUM_EPOCH is not a key"),
    "grey images": ({"DATA.IMAGE_CHANNELS": 1}, "DATA.IMAGE_CHANNELS is 1"),
    "other heads": ({"MODEL.ATTN_HEAD_SIZE": 32}, "MODEL.ATTN_HEAD_SIZE is 32"),
    "another schedule": ({"TRAIN.LR_SCHEDULER.NAME": "multi-step"}, "NAME is multi-step"),
    "another optimizer": ({"TRAIN.OPTIMIZER.NAME": "Lamb"}, "NAME is Lamb"),
    "a rate that rises": ({"TRAIN.BASE_LR": 1e-4}, "TRAIN.END_LR is 0.0005"),
    "no rate": ({"TRAIN.BASE_LR": 0.0}, "TRAIN.BASE_LR is 0.0"),
    "an average of no decay": ({"TRAIN.MODEL_EMA": True}, "TRAIN.MODEL_EMA_DECAY is None"),
    "text for a number": ({"DATA.BATCH_SIZE": "many"}, "DATA.BATCH_SIZE is 'many'"),
    "true for a number": ({"TRAIN.NUM_EPOCHS": True}, "TRAIN.NUM_EPOCHS is True"),
    "a fraction": ({"TRAIN.NUM_EPOCHS": 2.5}, "TRAIN.NUM_EPOCHS is 2.5"),
    "a mapping": ({"DATA.BATCH_SIZE.X": 1}, "DATA.BATCH_SIZE.X is not a key"),
    "a section without keys": ({"DATA": 3}, "DATA is not a key"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_recipe_can_say_is_refused(tmp_path: Path, kind: str) -> None:
    flat, said = REFUSED[kind]
    with pytest.raises(RecipeError, match=said.replace(".", r"\.")):
        converted(tmp_path, flat)


# --- the page --------------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, str]:
    """The second column of the tables of docs/vit.md, by each thing in the first."""
    page = (Path(__file__).parents[3] / "docs" / "vit.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {key.strip("` "): second for first, second in cells for key in first.split(", ")}


def test_the_page_says_what_becomes_of_every_key() -> None:
    rows = rows_of_the_page()
    for key, targets in TARGETS.items():
        assert rows[key] == ", ".join(f"`{target}`" for target in targets)
    for key, why in REASONS.items():
        assert rows[key] == why


def test_the_page_has_every_name_of_an_array() -> None:
    rows = rows_of_the_page()
    for paddle, ours in NAMES.items():
        assert rows[paddle.replace("{}", "N")] == f"`{ours.replace('{}', 'N')}`"
