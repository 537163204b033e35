"""Optimizers of recipes: parameter groups, scaled learning rates and schedules."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, StepLR

from samestep.checkpoint.contents import Progress, Training
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import LearningRateConfig, LearningRateRule, OptimizerConfig, RunOptions, ScheduleConfig
from samestep.distributed import devices
from samestep.distributed.world import World
from samestep.errors import CheckpointError, RecipeError
from samestep.recipes.builder import Built, build, find
from samestep.recipes.optimizers import (
    OPTIMIZERS,
    apply_layer_decay,
    build_optimizer,
    parameter_groups,
    scale_rates,
    schedule_factor,
)
from samestep.recipes.recipe_files import load_recipe
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.models import TokensNet


def timm_model(name: str) -> nn.Module:
    make_torchvision_importable()
    import timm

    with torch.random.fork_rng():
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5)
    return model


def described(model: nn.Module, groups: list[dict[str, Any]], weight_decay: float) -> dict[str, tuple[float, float]]:
    """Return rate factor and weight decay of each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group.get("lr_scale", 1.0), group.get("weight_decay", weight_decay))
        for group in groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet"])
@pytest.mark.parametrize("decay_norms", [False, True])
def test_groups_equal_those_of_timm(name: str, decay_norms: bool) -> None:
    model = timm_model(name)
    from timm.optim import param_groups_layer_decay

    config = OptimizerConfig(name="adamw", layer_decay=0.7, decay_norms=decay_norms)
    excluded = model.no_weight_decay() if hasattr(model, "no_weight_decay") and not decay_norms else ()
    theirs = param_groups_layer_decay(
        model, weight_decay=0.3, layer_decay=0.7, weight_decay_exclude_1d=not decay_norms, no_weight_decay_list=excluded
    )
    ours = described(model, parameter_groups(model, config), 0.3)
    assert ours == described(model, theirs, 0.3)
    assert len({scale for scale, _ in ours.values()}) >= 3


def test_trained_parameters_are_in_one_group_each_with_the_full_rate_first() -> None:
    model = timm_model("test_vit")
    model.patch_embed.proj.weight.requires_grad_(False)  # type: ignore[union-attr]
    groups = parameter_groups(model, OptimizerConfig(name="adamw", layer_decay=0.5, decay_norms=False))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    scales = [group["lr_scale"] for group in groups]
    assert scales == sorted(scales, reverse=True)
    assert set(scales) == {0.5**layer for layer in range(8)}, "frozen parameters do not move the others' layers"


def test_model_without_numbered_layers_is_refused() -> None:
    with pytest.raises(RecipeError, match="does not number its layers"):
        parameter_groups(TokensNet(width=8, heads=2), OptimizerConfig(name="adamw", layer_decay=0.5))


def test_rates_are_scaled_once_and_reported() -> None:
    model, config = timm_model("test_vit"), OptimizerConfig(name="sgd", layer_decay=0.5)
    optimizer = torch.optim.SGD(parameter_groups(model, config), lr=0.8)
    (note,) = apply_layer_decay(optimizer, config)
    assert note == "layer decay 0.5: 8 learning rates from 0.00625 to 0.8"
    assert [group["lr"] for group in optimizer.param_groups] == [0.8 * 0.5**layer for layer in range(8)]
    assert any(parameter is model.head.weight for parameter in optimizer.param_groups[0]["params"])
    plain = torch.optim.SGD(model.parameters(), lr=0.8)
    assert apply_layer_decay(plain, OptimizerConfig(name="sgd")) == []


def training(layer_decay: float | None) -> Training:
    model = timm_model("test_vit")
    config = OptimizerConfig(name="adamw", layer_decay=layer_decay, decay_norms=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=0.1)
    apply_layer_decay(optimizer, config)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return Training(model, optimizer, scheduler, torch.amp.GradScaler("cpu", enabled=False))


def test_groups_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    first, second, other = training(0.5), training(0.5), training(None)
    first.model(torch.ones(2, 3, 160, 160)).sum().backward()
    first.optimizer.step()
    assert first.scheduler is not None
    first.scheduler.step()
    checkpoint = CheckpointFolder(tmp_path).write(1, pack(first, Progress(step=1)))
    load(checkpoint, second)
    for ours, theirs in zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True):
        assert {key: ours[key] for key in ("lr", "lr_scale", "weight_decay", "initial_lr")} == {
            key: theirs[key] for key in ("lr", "lr_scale", "weight_decay", "initial_lr")
        }
    names = {parameter: name for name, parameter in second.model.named_parameters()}
    slots = {names[parameter]: state["exp_avg"] for parameter, state in second.optimizer.state.items()}
    for name, parameter in first.model.named_parameters():
        assert torch.equal(slots[name], first.optimizer.state[parameter]["exp_avg"])
    with pytest.raises(CheckpointError, match="does not match"):
        load(checkpoint, other)


def scaled(lr: float, size: int, rule: LearningRateRule, base: int) -> float:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scale_rates(optimizer, size, LearningRateConfig(rule=rule, base_batch_size=base))
    return float(optimizer.param_groups[0]["lr"])


sizes = st.integers(1, 2**20)


@given(size=sizes, base=sizes, rate=st.floats(1e-6, 10))
def test_sqrt_twice_equals_linear_and_the_base_batch_size_keeps_the_rate(size: int, base: int, rate: float) -> None:
    linear = scaled(rate, size, "linear", base)
    assert scaled(scaled(rate, size, "sqrt", base), size, "sqrt", base) == pytest.approx(linear, rel=1e-12)
    assert scaled(rate, base, "linear", base) == pytest.approx(rate, rel=1e-15)
    assert scaled(rate, base, "sqrt", base) == rate
    assert scaled(0.1, 8192, "linear", 256) == pytest.approx(3.2)


def test_every_parameter_group_is_scaled() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": [second]}], lr=0.1)
    lines = scale_rates(optimizer, 512, LearningRateConfig(rule="sqrt", base_batch_size=256))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4 * math.sqrt(2), 0.1 * math.sqrt(2)])
    assert lines == [
        "learning rate 0.565685 = 0.4 x sqrt(512/256) (sqrt)",
        "learning rate 0.141421 = 0.1 x sqrt(512/256) (sqrt)",
    ]


SMALL = ("data.options.lines=50", "model.options.width=16", "batch_size=16", "microbatches=4", "schedule.name=constant")
LINEAR = ("learning_rate.rule=linear", "learning_rate.base_batch_size=8")


def built(world: World, *overrides: str) -> Built:
    return build(load_recipe("tokens", [*SMALL, *overrides]), RunOptions(workers=0), world)


def rate_of_steps(made: Built, steps: int) -> list[float]:
    batches = iter(made.train)
    return [made.driver.step(next(batches)).lr for _ in range(steps)]


def test_the_rate_is_scaled_before_the_schedule_and_told(alone: World) -> None:
    made = built(alone, "optimizer.options.lr=0.01", "schedule.warmup_epochs=1", *LINEAR)
    assert made.notes == ["learning rate 0.02 = 0.01 x 16/8 (linear)"]
    assert len(made.train) == 3
    assert rate_of_steps(made, 3) == pytest.approx([0.02 / 3, 0.02 * 2 / 3, 0.02])


def test_an_optimizers_own_rate_is_scaled_too(alone: World) -> None:
    made = built(alone, "optimizer.options={}", "schedule.warmup_epochs=0", *LINEAR)
    assert made.notes == ["learning rate 0.002 = 0.001 x 16/8 (linear)"]
    assert rate_of_steps(made, 1) == [0.002]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate.rule=linear", "learning_rate.rule is linear and learning_rate.base_batch_size is None"),
        ("learning_rate.base_batch_size=256", "learning_rate.rule is fixed and learning_rate.base_batch_size is 256"),
        ("learning_rate={rule: sqrt, base_batch_size: 0}", "base_batch_size is 0"),
        ("learning_rate.rule=quadratic", '"quadratic"'),
        ("learning_rate.base=256", "unknown key learning_rate.base"),
        ("learning_rate=0.1", "learning_rate is 0.1"),
    ],
)
def test_invalid_values_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("digits", [override])
    assert message in str(error.value)
    assert error.value.code in ("E_VALUE", "E_UNKNOWN_KEY")
    assert error.value.expected
    assert error.value.fix


# --- factor of a schedule ---


STEPS, EPOCHS = 10, 6
FALLING = STEPS * EPOCHS - 1


def by_torch(kind: type[LRScheduler], **options: float) -> list[float]:
    """The factors of one of torch's schedulers, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, factors = kind(optimizer, **options), []  # type: ignore[arg-type]
    for _ in range(STEPS * EPOCHS):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return factors


def factors(schedule: ScheduleConfig) -> list[float]:
    factor = schedule_factor(schedule, STEPS, EPOCHS)
    return [factor(step) for step in range(STEPS * EPOCHS)]


@pytest.mark.parametrize("final", [0.0, 0.25, 1.0])
def test_linear_is_torchs(final: float) -> None:
    theirs = by_torch(LinearLR, start_factor=1.0, end_factor=final, total_iters=FALLING)
    assert factors(ScheduleConfig(name="linear", final=final)) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_cosine_is_torchs(final: float) -> None:
    theirs = by_torch(CosineAnnealingLR, T_max=FALLING, eta_min=final)
    assert factors(ScheduleConfig(name="cosine", final=final)) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(("epochs", "gamma"), [(2, 0.1), (1, 0.5), (0.5, 0.9), (100, 0.1)])
def test_step_is_torchs(epochs: float, gamma: float) -> None:
    theirs = by_torch(StepLR, step_size=round(epochs * STEPS), gamma=gamma)
    assert factors(ScheduleConfig(name="step", step_epochs=epochs, gamma=gamma)) == pytest.approx(theirs)


def test_warm_up_rises_in_equal_parts_to_one() -> None:
    factor = schedule_factor(ScheduleConfig(warmup_epochs=0.5), steps_per_epoch=10, epochs=3)
    assert [factor(step) for step in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_peak_comes_after_the_warm_up_and_the_end_at_the_last_step(name: str) -> None:
    schedule = ScheduleConfig(name=name, warmup_epochs=1, final=0.1)  # type: ignore[arg-type]
    factor = schedule_factor(schedule, steps_per_epoch=10, epochs=3)
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == factor(10) == 1.0
    middle = (10 + 29) / 2
    assert factor(19) + factor(20) == pytest.approx(2 * (0.1 + 0.9 / 2)), f"symmetric about {middle}"
    assert factor(29) == pytest.approx(0.1)
    assert factor(30) == pytest.approx(0.1), "called once more after the last step"
    fallen = {"cosine": 0.5 * (1 + math.cos(math.pi * 5 / 19)), "linear": 1 - 5 / 19}
    assert factor(15) == pytest.approx(0.1 + 0.9 * fallen[name])


@given(
    name=st.sampled_from(["cosine", "linear", "step"]),
    steps=st.integers(1, 50),
    epochs=st.integers(1, 20),
    warmup=st.floats(0, 30),
    final=st.floats(0, 1),
)
def test_factor_stays_between_its_ends_and_never_rises_after_the_warm_up(
    name: str, steps: int, epochs: int, warmup: float, final: float
) -> None:
    schedule = ScheduleConfig(name=name, warmup_epochs=warmup, final=final, step_epochs=3)  # type: ignore[arg-type]
    factor = schedule_factor(schedule, steps, epochs)
    values = [factor(step) for step in range(steps * epochs)]
    assert all(0 < value <= 1 or (value == 0 and final == 0) or value == pytest.approx(final) for value in values)
    after = values[round(warmup * steps) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


@pytest.mark.parametrize(
    ("name", "options", "device", "is_fused"),
    [
        ("sgd", "{lr: 0.1}", "cpu", True),
        ("torch.optim:AdamW", "{lr: 0.1}", "cpu", True),
        ("adam", "{lr: 0.1, foreach: true}", "cpu", False),
        ("adam", "{lr: 0.1, fused: false}", "cpu", False),
        ("sgd", "{lr: 0.1, momentum: 0.9, dampening: 0.1}", "cpu", False),
        ("torch.optim:RMSprop", "{lr: 0.1}", "cpu", False),
        ("sgd", "{lr: 0.1}", "cuda", False),
    ],
)
def test_optimizers_are_fused_on_accelerators(
    alone: World, monkeypatch: pytest.MonkeyPatch, name: str, options: str, device: str, is_fused: bool
) -> None:
    overrides = [f"optimizer.name={name}", f"optimizer.options={options}"]
    config = load_recipe("digits", overrides).optimizer
    monkeypatch.setattr(devices, "ACCELERATOR", device)  # the kind of device of an accelerator
    kind = find(config.name, OPTIMIZERS, "optimizer")
    [group] = build_optimizer(config, kind, nn.Linear(3, 2)).param_groups
    assert bool(group.get("fused")) is is_fused
