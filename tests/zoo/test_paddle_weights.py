"""Weights of PaddleViT's ViT in timm's model."""

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from helpers.paddle_files import (
    CLASSES,
    DEPTH,
    HEADS,
    PATCH,
    SIZE,
    WIDTH,
    save_state,
    save_training,
    vit_forward,
    vit_state,
)
from samestep.errors import DataError
from samestep.recipes.weights import load_all, load_matching
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.paddle import NAMES, read_pdparams, timm_name


def timm_vit(*, bias: bool = True, classes: int = CLASSES) -> torch.nn.Module:
    make_torchvision_importable()
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        model: torch.nn.Module = VisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            num_classes=classes,
            embed_dim=WIDTH,
            depth=DEPTH,
            num_heads=HEADS,
            qkv_bias=bias,
        )
    return model.double().eval()


@pytest.mark.parametrize("save", [save_state, save_training])
@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_equal_those_of_paddle(tmp_path: Path, save: Callable[..., Path], old_names: bool, bias: bool) -> None:
    """In 64 bits, against PaddleViT's forward pass in NumPy; the largest of 15 logits is some units."""
    state = vit_state(1, old_names=old_names, bias=bias)
    images = numpy.random.default_rng(2).normal(size=(3, 3, SIZE, SIZE))
    model = timm_vit(bias=bias)
    load_all(model, save(tmp_path / "vit.pdparams", state))
    with torch.no_grad():
        logits = model(torch.from_numpy(images)).numpy()
    expected = vit_forward(state, images)
    assert numpy.abs(expected).max() > 1
    assert numpy.abs(logits - expected).max() < 1e-10


def test_every_array_maps_to_one_tensor(tmp_path: Path) -> None:
    """Each array is read once and sets one tensor of timm's model."""
    state = vit_state(3)
    converted = read_pdparams(save_state(tmp_path / "vit.pdparams", state))
    assert sorted(converted.sources.values()) == sorted(state)
    assert set(converted.tensors) == set(timm_vit().state_dict())
    for name, tensor in converted.tensors.items():
        array = state[converted.sources[name]]
        is_matrix = array.ndim == 2 and name.endswith(".weight")
        assert numpy.array_equal(tensor.numpy(), array.T if is_matrix else array)
        assert tensor.is_contiguous()


@pytest.mark.parametrize("pattern", NAMES)
def test_names_of_the_table(pattern: str) -> None:
    paddle, ours = pattern.replace("{}", "11"), NAMES[pattern].replace("{}", "11")
    if ours in ("cls_token", "pos_embed"):
        assert timm_name(paddle) == ours
        assert timm_name(f"{paddle}.weight") is None
    else:
        assert [timm_name(f"{paddle}.{ending}") for ending in ("weight", "bias")] == [f"{ours}.weight", f"{ours}.bias"]
        assert timm_name(f"{paddle}._mean") is None
        assert timm_name(paddle) is None


UNKNOWN = ["pre_logits.0.weight", "classifier.0.weight", "dist_token", "encoder.layers.0.gamma_1", "head.weight"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_array_is_refused(tmp_path: Path, name: str) -> None:
    path = save_state(tmp_path / "vit.pdparams", {**vit_state(), name: numpy.ones((2, 2))})
    with pytest.raises(DataError, match=f"timm's ViT has no {name}"):
        read_pdparams(path)


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    both = {**vit_state(), **vit_state(old_names=True)}
    with pytest.raises(DataError, match="map to cls_token"):
        read_pdparams(save_state(tmp_path / "vit.pdparams", both))


def test_pretrained_file_can_be_a_paddle_file(tmp_path: Path) -> None:
    """With another number of classes the head is left out and reported."""
    model = timm_vit(classes=7)
    loaded = load_matching(model, save_state(tmp_path / "vit.pdparams", vit_state()))
    assert len(loaded.taken) == len(model.state_dict()) - 2
    assert loaded.left_out == (
        "head.weight: (7, 12) here, (5, 12) in the file",
        "head.bias: (7,) here, (5,) in the file",
    )


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    model = timm_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {**before, "extra": torch.zeros(1), "pos_embed": torch.zeros(1, 9, WIDTH)}
    del state["norm.bias"], state["head.bias"]
    save_file(state, tmp_path / "half.safetensors")
    with pytest.raises(DataError) as error:
        load_all(model, tmp_path / "half.safetensors")
    assert "2 missing (norm.bias, head.bias)" in error.value.value
    assert "1 of another shape (pos_embed: (1, 5, 12) here, (1, 9, 12) in the file)" in error.value.value
    assert "1 only in the file (extra)" in error.value.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
