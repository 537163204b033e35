"""Options and keys of tutorials on the command line: errors with the equivalent, and `--local-rank`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.started import free_port, python, ranks
from helpers.system import here, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
Refused = Callable[..., str]

OPTIONS = {
    "train digits --gpus 4": "--processes 4",
    "train digits --gpus 0,1": "--devices 0,1",
    "train digits --nproc_per_node=2": "--processes 2",
    "train digits --batch-size 32": "--set batch_size=32",
    "train digits -b 32": "--set batch_size=32",
    "train --lr 0.1 digits": "--set optimizer.options.lr=0.1",
    "train --data-path images": "--set data.options.path=images",
    "train digits --epochs 3": "--set epochs=3",
    "train --amp": "--set step.precision=bf16",
    "train digits --sync-bn": "--set step.batch_norm=sync",
    "train digits --accumulation-steps 4": "--accumulate 4",
    "train digits --device cuda:0": "--devices 0",
    "train digits --max_restarts 2": "--max-restarts 2",
    "train digits --proceses 2": "--processes 2",
    "train digits --resume last.pth": "samestep resume runs/NAME",
    "train digits -ngpus=2": "--processes 2",
    "train -cfg=vit.yaml": "samestep train vit.yaml",
    "bench digits --gpus 1,2": "--devices 1,2",
    "plan digits --processes 1,2": "--devices 4",
    "run --gpus 2 train.py": "--processes 2",
    "top runs/first --gpus 2": "samestep top --help",
    "train digits --foo 2020-99-99": "leave --foo out",
}
KEYS = {
    "lr=0.1": "optimizer.options.lr=0.1",
    "optimizer.lrr=0.1": "optimizer.options.lr=0.1",
    "optimizer.type=SGD": "optimizer.name=sgd",
    "sync_bn=true": "step.batch_norm=sync",
    "freeze_layers=true": "model.freeze_except=",
    "accumulation_steps=4": "--accumulate 4",
    "train.num_epochs=3": "epochs=3",
    "dataset.path=images": "data.options.path=images",
    "scheduler.type=CosineAnnealingLR": "schedule.name=cosine",
    "data.num_workers=8": "--workers 8",
    "min_lr=1e-5": "schedule.final=0.0001",
    "optimizer=SGD": "optimizer.name=sgd",
    "epochs=3.0": "epochs=3",
    "step.precision=16-mixed": "step.precision=fp16",
}


def fix_of(err: str) -> str:
    return err[err.index("fix:") :]


@pytest.mark.parametrize("command", OPTIONS)
def test_unknown_option_names_the_equivalent(refused: Refused, command: str) -> None:
    assert OPTIONS[command] in fix_of(refused(*command.split()))


@pytest.mark.parametrize("override", KEYS)
def test_unknown_key_names_the_equivalent(refused: Refused, override: str) -> None:
    assert KEYS[override] in fix_of(refused("train", "digits", "--set", override))


def test_all_unknown_options_are_reported_together(refused: Refused) -> None:
    fix = fix_of(refused("train", "digits", "--gpus", 4, "--wd", "5e-4", "--workers", 2, "--amp"))
    for argument in ("--processes 4", "--set optimizer.options.weight_decay=5e-4", "--set step.precision=bf16"):
        assert argument in fix
    assert "--workers" not in fix


def test_unknown_key_is_reported_before_a_missing_one(refused: Refused, tmp_path: Path) -> None:
    text = RECIPE.read_text(encoding="utf-8").replace("epochs: 3", "num_epochs: 3")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert "--set epochs=3" in fix_of(refused("train", "mine.yaml"))


def test_local_rank_needs_its_launcher(refused: Refused) -> None:
    assert "[E_LAUNCH_VARIABLES]" in refused("--local-rank=0", "train", "digits")
    assert "[E_LAUNCH_VARIABLES]" in refused("--local_rank=0", "train", "digits")


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
