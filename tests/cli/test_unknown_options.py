"""Unknown options and keys: errors with the nearest name; and `torch.distributed.launch`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.started import free_port, python, ranks
from helpers.system import here, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]

OPTIONS = {
    "train digits --gpus 4": "--processes",
    "train digits --nproc_per_node=2": "--processes",
    "train --lr 0.1 digits": "--set optimizer.options.lr=VALUE",
    "train digits -b 32": "--set batch_size=VALUE",
    "train digits --max_restarts 2": "--max-restarts",
    "train digits --proceses 2": "--processes",
    "train digits --foo 2020-99-99": "train --help",
    "top runs/first --gpus 2": "samestep top --help",
    "run --gpus 2 train.py": "--processes",
}
KEYS = {
    "lr=0.1": "optimizer.options.lr?",
    "batchsize=64": "batch_size?",
    "optimizer.option.lr=1": "optimizer.options?",
    "accumulation_steps=4": "--accumulate?",
    "data.num_workers=8": "--workers?",
    "schedule.warmup=1": "schedule.warmup_epochs?",
    "step.sed=1": "step.seed?",
    "qwertz=1": "remove qwertz",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_unknown_option_names_the_nearest(refused: Refused, command: str) -> None:
    err = refused(*command.split())
    assert "[E_UNKNOWN_OPTION]" in err
    assert OPTIONS[command] in err.splitlines()[-1]


@pytest.mark.parametrize("override", KEYS)
def test_unknown_key_names_the_nearest(refused: Refused, override: str) -> None:
    err = refused("train", "digits", "--set", override)
    assert "[E_UNKNOWN_KEY]" in err
    assert KEYS[override] in err.splitlines()[-1]


def test_unknown_key_is_reported_before_a_missing_one(refused: Refused, tmp_path: Path) -> None:
    text = RECIPE.read_text(encoding="utf-8").replace("epochs: 3", "num_epochs: 3")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert "did you mean epochs?" in refused("train", "mine.yaml")


@pytest.mark.slow
def test_distributed_launch_trains_to_the_same_bits(tmp_path: Path) -> None:
    arguments = ("train", RECIPE, "--set", "epochs=1", "--name")
    assert here(*arguments, "launched", "--processes", 2, cwd=tmp_path) == 0
    launcher = ("--nproc-per-node", "2", "--master-port", free_port(), "-m", "samestep", *arguments, "a")
    command = python("-W", "ignore", "-m", "torch.distributed.launch")
    with ranks(lambda r, s: {}, 1, *launcher, cwd=tmp_path, command=command) as started:
        (ended,) = started.wait()
    assert ended.code == 0, str(ended)
    assert weights(tmp_path / "runs" / "a") == weights(tmp_path / "runs" / "launched")
