"""Scaling of the learning rate with the batch size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.config import LearningRateConfig, LearningRateRule
from samestep.errors import InputError
from samestep.recipes.optimizers import scale_rates, scaled_lr

sizes = st.integers(1, 2**20)


def test_rules_give_the_published_values() -> None:
    assert scaled_lr(0.1, 8192, rule="linear", base_batch_size=256) == pytest.approx(3.2)
    assert scaled_lr(0.1, 1024, rule="sqrt", base_batch_size=256) == pytest.approx(0.2)
    assert scaled_lr(0.1, 1024, rule="fixed") == 0.1


@given(size=sizes, base=sizes, rate=st.floats(1e-6, 10))
def test_sqrt_twice_equals_linear_and_the_base_batch_size_keeps_the_rate(size: int, base: int, rate: float) -> None:
    linear = scaled_lr(rate, size, rule="linear", base_batch_size=base)
    once = scaled_lr(rate, size, rule="sqrt", base_batch_size=base)
    assert scaled_lr(once, size, rule="sqrt", base_batch_size=base) == pytest.approx(linear, rel=1e-12)
    assert scaled_lr(rate, base, rule="linear", base_batch_size=base) == pytest.approx(rate, rel=1e-15)
    assert scaled_lr(rate, base, rule="sqrt", base_batch_size=base) == rate


@pytest.mark.parametrize(
    ("size", "rule", "base"),
    [(64, "linear", None), (64, "sqrt", None), (64, "sqrt", 0), (0, "linear", 256), (64, "fixed", 256), (64, "lin", 1)],
)
def test_invalid_arguments_are_refused(size: int, rule: LearningRateRule, base: int | None) -> None:
    with pytest.raises(InputError) as error:
        scaled_lr(0.1, size, rule=rule, base_batch_size=base)
    assert error.value.expected
    assert error.value.fix


def test_every_parameter_group_is_scaled() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": [second]}], lr=0.1)
    lines = scale_rates(optimizer, 512, LearningRateConfig(rule="sqrt", base_batch_size=256))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4 * math.sqrt(2), 0.1 * math.sqrt(2)])
    assert lines == (
        "learning rate 0.565685 = 0.4 x sqrt(512/256) (sqrt)",
        "learning rate 0.141421 = 0.1 x sqrt(512/256) (sqrt)",
    )
