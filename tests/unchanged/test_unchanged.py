"""Some of the unchanged scripts, on 1 and 3 processes; `make scripts` compares all."""

import argparse
from pathlib import Path

import pytest

from unchanged.runner import SCRIPTS, Comparison, Verdict, different_line, same_numbers


def compared(script: Path, folder: Path, numbers: tuple[int, ...] = (1, 3), *, divides: bool = False) -> Verdict:
    options = argparse.Namespace(numbers=numbers, quick=True, divides=divides)
    return Comparison(script, folder, options).compare()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lightning_classifier",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("mnist_convnet", "unet_dice", "wgan_gradient_penalty", "kfold_reset", "min_gpt_trainer")
        ),
    ],
)
def test_script_prints_the_text_of_plain_python(name: str, tmp_path: Path) -> None:
    verdict = compared(SCRIPTS / f"{name}.py", tmp_path)
    assert verdict.problems == []
    assert verdict.divided


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parts_and_whole", pytest.param("moco", marks=pytest.mark.long)])
def test_divided_parameters_change_nothing(name: str, tmp_path: Path) -> None:
    verdict = compared(SCRIPTS / f"{name}.py", tmp_path, (1,), divides=True)
    assert verdict.problems == []
    assert verdict.sharded == "equal"


@pytest.mark.long
def test_other_text_is_a_problem(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('began at', time.time_ns())\n", encoding="utf-8")
    assert len(compared(script, tmp_path, divides=True).problems) == 3


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("loss 1.2345", "loss 1.2346", True),
        ("loss 1.2345", "loss 1.2385", False),
        ("accuracy 0.12", "accuracy 0.13", True),
        ("accuracy 0.12", "accuracy 0.14", False),
        ("lr 1.0e-03", "lr 2.0e-03", False),
        ("epoch 1 loss 0.500", "epoch 2 loss 0.500", False),
        ("loss -0.500", "loss 0.500", False),
    ],
)
def test_numbers_are_equal_to_three_digits(one: str, other: str, expected: bool) -> None:
    assert same_numbers(one, other) is expected


def test_lines_with_times_are_left_out() -> None:
    assert different_line("loss 1.000\n3 it/s\n", "loss 1.000\n7 it/s\n") is None
    assert different_line("loss 1.000\nend\n", "loss 1.000\n") == "'end' and ''"
