"""Divided weights in one process: a divided call has the results and the operations of a whole one."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from helpers.tensor_models import DROPOUT, LENGTH, PLAN, TOKENS, Layers, gpt
from samestep.distributed.world import Session, World
from samestep.errors import InputError
from samestep.strategies.tensor import TensorParallel
from samestep.strategies.tensor_slices import Slicing
from samestep.torchvision_import import make_torchvision_importable
from samestep.view.operations import Operations
from samestep.zoo.model_libraries import transformers_model


def _hugging_face_gpt2() -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT)
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": LENGTH}
    return transformers_model("GPT2LMHeadModel")(num_classes=TOKENS, **sizes, **rates)


def _classifier(name: str) -> nn.Module:
    data = {"vocabulary": TOKENS, "padding": TOKENS - 1, "longest": LENGTH}
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    return transformers_model(name)(num_classes=3, **data, **sizes, **rates)


def _timm_vit() -> nn.Module:
    make_torchvision_importable()
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}
    drops = {"drop_rate": 0.1, "proj_drop_rate": DROPOUT, "attn_drop_rate": DROPOUT, "drop_path_rate": DROPOUT}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes, **drops)
    return model


def _torchvision_vit() -> nn.Module:
    make_torchvision_importable()
    from torchvision.models.vision_transformer import VisionTransformer

    drops = {"dropout": DROPOUT, "attention_dropout": DROPOUT}
    return VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=3, **drops)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": Layers,
    "gpt": gpt,
    "transformers gpt2": _hugging_face_gpt2,
    "bert": lambda: _classifier("BertForSequenceClassification"),
    "roberta": lambda: _classifier("RobertaForSequenceClassification"),
    "timm vit": _timm_vit,
    "torchvision vit": _torchvision_vit,
}
SLOW = [name for name in MODELS if name not in ("layers", "gpt")]
SLICES = {"timm vit": 3, "torchvision vit": 1}


@pytest.fixture
def world() -> World:
    return World(0, 1, torch.device("cpu"), Session.local())


def first_rows(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a call with five samples."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS - 1, (5, LENGTH), generator=draw)
    if name.endswith("vit"):
        return (torch.randn(5, 3, 16, 16, generator=draw, dtype=torch.float64),), {}
    if "bert" in name:
        mask = torch.ones(5, LENGTH, dtype=torch.int64)
        mask[::3, 3:] = 0
        return (), {"input_ids": tokens, "attention_mask": mask}
    return (tokens,), {}


def computed(model: nn.Module, name: str) -> tuple[torch.Tensor, Operations]:
    arguments, options = first_rows(name)
    torch.manual_seed(3)
    with Operations() as operations:
        result = model.forward(*arguments, **options)
    return getattr(result, "logits", result), operations


@pytest.mark.parametrize("name", ["layers", "gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_divided_products_are_those_of_the_whole_model(name: str, world: World) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    sliced = copy.deepcopy(model)
    tensor = TensorParallel(sliced, Slicing(SLICES.get(name, 2), world), PLAN if name == "layers" else {})
    result, operations = computed(model, name)
    with tensor.divided_weights():
        divided, seen = computed(sliced, name)
    torch.testing.assert_close(divided, result, rtol=0, atol=1e-12)
    assert seen.functions == operations.functions
    assert seen.draws == operations.draws
    assert seen.numbers == operations.numbers
    result.square().sum().backward()
    divided.square().sum().backward()
    for one, other in zip(model.parameters(), sliced.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None
        else:
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12)
    assert list(sliced.state_dict()) == list(model.state_dict())
    assert all("forward" not in vars(part) for part in sliced.modules())


def test_other_uses_of_a_divided_weight_are_errors(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    tensor = TensorParallel(model, Slicing(2, world), {"0": "column_gathered"})
    with tensor.divided_weights():
        weight: Any = model[0]._parameters["weight"]
        assert weight.shape == (4, 4)
        for use in (partial(getattr, weight, "sum"), partial(torch.add, weight, 1)):
            with pytest.raises(InputError) as error:
                use()
            assert error.value.code == "E_STRATEGY"
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize(
    "kinds", [("column", "row"), ("column", "column_gathered"), ("column_gathered", "row"), ("row", "column_gathered")]
)
def test_each_kind_has_the_gradients_of_the_whole_model(world: World, kinds: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    plain(inputs).square().sum().backward()
    expected, inputs.grad = inputs.grad, None
    tensor = TensorParallel(model, Slicing(3, world), dict(zip(("0", "2"), kinds, strict=True)))
    with tensor.divided_weights():
        result = model(inputs)
    result.square().sum().backward()
    torch.testing.assert_close(inputs.grad, expected)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
