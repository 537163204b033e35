"""Options of tutorials and other tools, and their equivalents."""

from typing import Any

import pytest

from samestep.config.key_suggestions import find_equivalent
from samestep.recipes.recipe_files import load_recipe

RECIPE = {"optimizer": {"options": {"lr": 0.1}}, "epochs": 50}
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("lr", 0.1, "--set optimizer.options.lr=0.1"),
    ("learning_rate", 1e-5, "--set optimizer.options.lr=1e-05"),
    ("base_lr", 0.1, "--set optimizer.options.lr=0.1"),
    ("momentum", 0.9, "--set optimizer.options.momentum=0.9"),
    ("wd", 0.0005, "--set optimizer.options.weight_decay=0.0005"),
    ("weight-decay", 0.0005, "--set optimizer.options.weight_decay=0.0005"),
    ("opt", "SGD", "--set optimizer.name=sgd"),
    ("num_epochs", 30.0, "--set epochs=30"),
    ("max_epochs", 30, "--set epochs=30"),
    ("batch-size", 32, "--set batch_size=32"),
    ("-b", 32, "--set batch_size=32"),
    ("per_device_train_batch_size", 32, "--per-device-batch-size 32 --processes N"),
    ("accumulation_steps", 4, "--accumulate 4"),
    ("gradient_accumulation_steps", 4, "--accumulate 4"),
    ("accum_iter", 4, "--accumulate 4"),
    ("sync_bn", True, "--set step.batch_norm=sync"),
    ("syncBN", True, "--set step.batch_norm=sync"),
    ("sync_batchnorm", False, "--set step.batch_norm=microbatch"),
    ("freeze_layers", True, """--set 'model.freeze_except=["fc.*"]'"""),
    ("freeze_layers", False, "--set 'model.freeze=[]'"),
    ("amp", True, "--set step.precision=bf16"),
    ("fp16", True, "--set step.precision=fp16"),
    ("precision", "16-mixed", "--set step.precision=fp16"),
    ("mixed_precision", "no", "--set step.precision=fp32"),
    ("gpus", 4, "--processes 4"),
    ("gpus", -1, "--processes auto"),
    ("gpus", "0,1", "--devices 0,1"),
    ("devices", [0, 1], "--devices 0,1"),
    ("nproc_per_node", 4, "--processes 4"),
    ("world_size", 4, "--processes 4"),
    ("device_ids", [0, 1], "--devices 0,1"),
    ("device", "cuda:1", "--devices 1"),
    ("num_workers", 8, "--workers 8"),
    ("resume", "last.pth", "samestep resume runs/NAME"),
    ("pretrained", True, "--set model.pretrained=FILE.safetensors"),
    ("weights", "a.pth", "--set model.pretrained=a.pth"),
    ("data_path", "/data", "--set data.options.path=/data"),
    ("img_size", 224, "--set data.options.image_size=224"),
    ("lrf", 0.01, "--set schedule.final=0.01"),
    ("min_lr", 0.001, "--set schedule.final=0.01"),
    ("warmup", 5, "--set schedule.warmup_epochs=5"),
    ("warmup_ratio", 0.1, "--set schedule.warmup_epochs=5.0"),
    ("lr_scheduler", "CosineAnnealingLR", "--set schedule.name=cosine"),
    ("clip_grad", 1.0, "--set step.clip_norm=1.0"),
    ("seed", 7, "--set step.seed=7"),
    ("smoothing", 0.1, "--set loss.options.label_smoothing=0.1"),
    ("val_percent", 10.0, "--set data.options.evaluation_fraction=0.1"),
    ("model_ema", True, "--set ema.decay=0.9999"),
    ("arch", "resnet50", "--set model.name=resnet50"),
    ("output_dir", "out", "--runs out"),
    ("exp_name", "first", "--name first"),
    ("num_epohcs", 3, "--set epochs=3"),
]


@pytest.mark.parametrize(("word", "value", "argument"), ARGUMENTS, ids=lambda part: str(part)[:24])
def test_word_has_an_equivalent(word: str, value: Any, argument: str) -> None:
    meant = find_equivalent(word, value, RECIPE)
    assert meant is not None
    assert meant.argument == argument
    assert argument in meant.suggestion()


def test_suggested_settings_are_accepted() -> None:
    """Every suggested `--set` with the value of a tutorial makes a valid recipe."""
    settings = set()
    for word, value, _ in ARGUMENTS:
        meant = find_equivalent(word, value, RECIPE)
        if meant is not None and meant.is_recipe_key:
            settings.add(meant.key)
            text = meant.argument.removeprefix("--set ").strip("'")
            load_recipe("images", [text])
    assert len(settings) > 15


@pytest.mark.parametrize("word", ["dist_backend", "print_freq", "master_port", "pin_memory"])
def test_word_without_an_equivalent_has_a_reason(word: str) -> None:
    meant = find_equivalent(word, "x")
    assert meant is not None
    assert (meant.key, meant.argument) == ("", "")
    assert meant.note in meant.suggestion()


def test_suggestion_for_the_same_key_is_its_argument() -> None:
    meant = find_equivalent("scheduler", "cos")
    assert meant is not None
    assert meant.suggestion("schedule.name") == "--set schedule.name=cosine"
    question = "did you mean schedule.name? --set schedule.name=cosine"
    assert meant.suggestion("schedule") == question == meant.suggestion()


def test_unknown_word_has_none() -> None:
    assert find_equivalent("qwertz", 1) is None
    assert find_equivalent("num_epohcs", 1, is_exact=True) is None
