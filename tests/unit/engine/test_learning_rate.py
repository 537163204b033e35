"""Learning rates, and schedulers of torch in an engine: a resumed run has the same rates."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import samestep
from helpers.models import Perceptron, seeded
from samestep.config import LearningRateConfig, LearningRateRule
from samestep.engine.learning_rate import scale_rates, scaled_lr
from samestep.errors import InputError
from workers.schedules import BATCH, EPOCHS, RATE, SAMPLES, SCHEDULERS, STEPS, run, train

sizes = st.integers(1, 2**20)


def test_rules_give_the_published_values() -> None:
    assert scaled_lr(0.1, 8192, rule="linear", base_batch_size=256) == pytest.approx(3.2)
    assert scaled_lr(0.1, 1024, rule="sqrt", base_batch_size=256) == pytest.approx(0.2)
    assert scaled_lr(0.1, 1024, rule="fixed") == 0.1
    assert samestep.scaled_lr is scaled_lr


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


def test_fixed_rule_changes_no_rate_and_returns_no_line() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert scale_rates(optimizer, 512, LearningRateConfig()) == ()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_optimizer_without_a_learning_rate_is_refused() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    with pytest.raises(InputError, match="Rateless has no learning rate"):
        scale_rates(Rateless(), 512, LearningRateConfig(rule="linear", base_batch_size=256))


World = samestep.World


def plain_rates(name: str) -> list[float]:
    """Return the learning rate of each epoch in a plain PyTorch loop."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    scheduler, rates = SCHEDULERS[name](optimizer), []
    for _ in range(EPOCHS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "plateau"])
def test_epoch_schedule_has_the_rates_of_a_plain_loop(alone: World, tmp_path: Path, name: str) -> None:
    _, rates = train(alone, name, tmp_path)
    assert rates == [rate for rate in plain_rates(name) for _ in range(STEPS)]
    assert len(set(rates)) > 2


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_is_resumed_in_mid_epoch_and_at_its_end(alone: World, tmp_path: Path, name: str) -> None:
    bits, rates = train(alone, name, tmp_path / "undisturbed")
    # The loop steps ReduceLROnPlateau after the last step of an epoch.
    for stop in (13,) if name == "plateau" else (13, 15):
        _, before = train(alone, name, tmp_path / f"stopped-{stop}", stop)
        resumed, after = train(alone, name, tmp_path / f"stopped-{stop}")
        assert before + after == rates
        assert resumed == bits


@pytest.mark.slow
def test_schedule_is_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    bits, rates = samestep.launch(run, "milestones", tmp_path / "undisturbed", processes=1)
    _, before = samestep.launch(run, "milestones", tmp_path / "stopped", 13, processes=1)
    resumed, after = samestep.launch(run, "milestones", tmp_path / "stopped", processes=3)
    assert before + after == rates
    assert resumed == bits


def engine_of(world: World, make: Any, interval: Any) -> samestep.Engine:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = make(optimizer) if make is not None else None
    return samestep.Engine(
        model, optimizer, samestep.cross_entropy, world=world, scheduler=scheduler, scheduler_interval=interval
    )


@pytest.mark.parametrize(
    ("make", "interval"),
    [
        (SCHEDULERS["cosine"], None),
        (SCHEDULERS["cosine"], "batch"),
        (SCHEDULERS["plateau"], "step"),
        (None, "epoch"),
    ],
)
def test_interval_is_required_and_valid(alone: World, make: Any, interval: Any) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone, make, interval)
    assert error.value.code == "E_OPTIMIZER"


@pytest.mark.parametrize(
    ("make", "warnings"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3), 1),
        (lambda o: lr_scheduler.StepLR(o, 2), 1),
        (lambda o: lr_scheduler.MultiStepLR(o, [1, 3]), 1),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS * STEPS), 0),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=2), 0),  # a warm-up
    ],
)
def test_epoch_schedule_that_counts_steps_gives_one_warning(
    alone: World, caplog: pytest.LogCaptureFixture, make: Any, warnings: int
) -> None:
    """As in a tutorial's script: T_max is the number of epochs, and the engine steps it 5 times in each."""
    engine = engine_of(alone, make, "step")
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 6).double(), torch.arange(SAMPLES) % 4)
    batches = samestep.loader(data, batch_size=BATCH, microbatches=4, world=alone)
    with caplog.at_level(logging.WARNING, "samestep"):
        for _ in range(2):
            for batch in batches:
                engine.step(batch)
    assert len(caplog.records) == warnings
