"""Parameter groups: layer-wise learning rates, and parameters without weight decay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from helpers.system import here, weights
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import Training, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import OptimizerConfig
from samestep.errors import CheckpointError, RecipeError
from samestep.recipes.optimizers import apply_layer_decay, layer_numbers, parameter_groups
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.digits import DigitsNet
from samestep.zoo.text.sentences import TokensNet


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
        model,
        weight_decay=0.3,
        layer_decay=0.7,
        weight_decay_exclude_1d=not decay_norms,
        no_weight_decay_list=excluded,
    )
    ours = described(model, parameter_groups(model, config), 0.3)
    assert ours == described(model, theirs, 0.3)
    assert len({scale for scale, _ in ours.values()}) >= 3


def test_trained_parameters_are_in_one_group_each_with_the_full_rate_first() -> None:
    model = TokensNet(width=8, heads=2, blocks=3)
    model.tokens.weight.requires_grad_(False)
    groups = parameter_groups(model, OptimizerConfig(name="adamw", layer_decay=0.5, decay_norms=False))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    scales = [group["lr_scale"] for group in groups]
    assert scales == sorted(scales, reverse=True)
    assert set(scales) == {1.0, 0.5, 0.25, 0.125, 0.0625}, "frozen parameters do not move the others' layers"


def test_layers_of_torchvisions_models() -> None:
    make_torchvision_importable()
    from torchvision.models import resnet18
    from torchvision.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        vit = layer_numbers(VisionTransformer(16, 8, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3))
        resnet = layer_numbers(resnet18(num_classes=3))
    first = {"class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"}
    assert {name for name, layer in vit.items() if layer == 0} == first
    assert {vit["encoder.ln.weight"], vit["heads.head.weight"]} == {4}
    assert vit["encoder.layers.encoder_layer_2.mlp.0.weight"] == 3
    assert [resnet[name] for name in ("conv1.weight", "layer1.0.conv1.weight", "layer4.1.conv2.weight", "fc.bias")] == [
        0,
        1,
        8,
        9,
    ]


def test_parameters_between_two_lists_belong_to_the_earlier_block() -> None:
    model = nn.ModuleDict(
        {
            "first": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "between": nn.Linear(2, 3),
            "second": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
        }
    )
    layers = layer_numbers(model)
    assert [layers[f"{name}.weight"] for name in ("first.0", "first.1", "between", "second.0", "second.1")] == [
        1,
        2,
        2,
        3,
        4,
    ]


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no list of similar blocks"):
        layer_numbers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))


def test_rates_are_scaled_once_and_reported() -> None:
    model, config = DigitsNet(width=4), OptimizerConfig(name="sgd", layer_decay=0.5)
    optimizer = torch.optim.SGD(parameter_groups(model, config), lr=0.8)
    (note,) = apply_layer_decay(optimizer, config)
    assert note == "layer decay 0.5: 5 learning rates from 0.05 to 0.8"
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.4, 0.2, 0.1, 0.05]
    assert optimizer.param_groups[0]["params"][0] is model.head.weight
    plain = torch.optim.SGD(model.parameters(), lr=0.8)
    assert apply_layer_decay(plain, OptimizerConfig(name="sgd")) == ()


def training(layer_decay: float | None) -> Training:
    with torch.random.fork_rng():
        model = DigitsNet(width=4)
    config = OptimizerConfig(name="adamw", layer_decay=layer_decay, decay_norms=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=0.1)
    apply_layer_decay(optimizer, config)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return Training(model, optimizer, scheduler, torch.amp.GradScaler("cpu", enabled=False))


def test_groups_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    first, second, other = training(0.5), training(0.5), training(None)
    first.model(torch.ones(2, 1, 8, 8)).sum().backward()
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


@pytest.mark.slow
def test_layer_decay_gives_equal_weights_on_one_and_three_processes(tmp_path: Path) -> None:
    overrides = (
        "data.options.lines=60",
        "epochs=2",
        "step.reduction=exact",
        "optimizer.layer_decay=0.5",
        "optimizer.decay_norms=false",
        "schedule={name: step, step_epochs: 1, gamma: 0.5}",
    )
    for count in (1, 3):
        code = here("train", "tokens", "--processes", count, "--name", count, "--set", *overrides, cwd=tmp_path)
        assert code == 0
    assert weights(tmp_path / "runs" / "1") == weights(tmp_path / "runs" / "3")
    assert (
        here("train", "tokens", "--name", "plain", "--set", *overrides, "optimizer.layer_decay=null", cwd=tmp_path) == 0
    )
    assert weights(tmp_path / "runs" / "plain") != weights(tmp_path / "runs" / "1")
