"""Partition of models: stage boundaries, and equality of the stages in sequence with the model."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from samestep.errors import InputError
from samestep.strategies.pipeline.partition import (
    balance,
    bind_inputs,
    partition_model,
)
from samestep.strategies.pipeline.stage import GraphExecutor
from samestep.zoo.digits import DigitsNet
from samestep.zoo.model_libraries import find_in_library
from samestep.zoo.models import GPT


def run_stages(
    model: nn.Module, names: tuple[str, ...], count: int, *inputs: torch.Tensor, training: bool
) -> torch.Tensor:
    """Return the output of the stages of a model in sequence."""
    partition = partition_model(model, names, count)
    assert partition.count == count
    by_name = bind_inputs(model, inputs, {})
    model.train(training)
    values: tuple[torch.Tensor, ...] = ()
    for graph in partition.graphs[training]:
        stage = GraphExecutor(model, graph)
        values = stage(*values, *(by_name[name] for name in stage.inputs))
    assert isinstance(values, torch.Tensor)
    return values


class Masked(nn.Module):
    """Model with an input that every stage uses, and functional dropout in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.5))

    def forward(self, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(6)[None, :] < lengths[:, None]
        first = hidden = inputs * self.scale
        for layer in self.layers:
            hidden = functional.dropout(layer(hidden * mask), 0.5, self.training) + self.shift
        return (hidden + first) * self.scale


CASES = {
    "digits": (DigitsNet(dropout=0.0), torch.randn(4, 1, 8, 8)),
    "gpt": (GPT(n_layer=4, n_embd=16), torch.randint(0, 200, (3, 20))),
    "chain": (nn.Sequential(*(nn.Linear(6, 6) for _ in range(7))), torch.randn(2, 6)),
    "nested": (
        nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2), nn.Linear(2, 2)),
        torch.ones(2, 6),
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_in_sequence_equal_the_model(name: str, count: int, training: bool) -> None:
    model, inputs = CASES[name]
    model.train(training)
    expected = model(inputs)
    assert torch.equal(run_stages(model, (), count, inputs, training=training), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torchvision", "resnet18"),
        ("timm", "vit_tiny_patch16_224"),
        pytest.param("torchvision", "vit_b_16", marks=pytest.mark.long),
        pytest.param("torchvision", "mobilenet_v2", marks=pytest.mark.long),
        pytest.param("timm", "convnext_atto", marks=pytest.mark.long),
        pytest.param("timm", "swin_tiny_patch4_window7_224", marks=pytest.mark.long),
    ],
)
def test_library_models_can_be_partitioned(library: str, name: str) -> None:
    build = find_in_library(f"{library}:{name}")
    assert build is not None
    model = build(num_classes=3).eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(run_stages(model, (), 4, images, training=False), model(images))


def test_every_stage_that_uses_an_input_receives_it() -> None:
    model, inputs, lengths = Masked(), torch.randn(3, 6), torch.tensor([6, 2, 4])
    model.eval()
    assert torch.equal(run_stages(model, (), 4, inputs, lengths, training=False), model(inputs, lengths))
    partition = partition_model(model, (), 4)
    # The code before the call of a layer belongs to the previous stage.
    stages = [GraphExecutor(model, graph) for graph in partition.graphs[False]]
    assert ["lengths" in stage.inputs for stage in stages] == [True, True, True, False]
    # The product with a trained parameter is sent: its backward runs once, in the first stage.
    assert ["inputs" in stage.inputs for stage in stages] == [True, False, False, False]
    assert partition.parameter_stages["scale"] == (0, 3)


def test_forward_is_traced_in_both_training_modes() -> None:
    model, inputs, lengths = Masked(), torch.randn(3, 6), torch.tensor([6, 2, 4])
    outputs = []
    for run in (lambda: model(inputs, lengths), lambda: run_stages(model, (), 2, inputs, lengths, training=True)):
        model.train()
        torch.manual_seed(0)
        outputs.append(run())
    assert torch.equal(*outputs)
    assert model.training, "the partition restores the training mode"


def test_named_stages_can_begin_at_nested_modules() -> None:
    model, images = DigitsNet(dropout=0.0), torch.randn(4, 1, 8, 8)
    names = ("blocks.1.second", "head")
    assert torch.equal(run_stages(model, names, 3, images, training=True), model(images))
    stages = partition_model(model, names, 3).parameter_stages
    assert stages["blocks.1.first.weight"] == (0,)
    assert stages["blocks.1.second.weight"] == (1,)
    assert stages["head.bias"] == (2,)


def test_a_tied_weight_is_in_both_stages() -> None:
    stages = partition_model(GPT(n_layer=4), (), 2).parameter_stages
    assert stages["wte.weight"] == (0, 1)
    assert set(stages.values()) == {(0,), (1,), (0, 1)}


def smallest_maximum(weights: list[int], count: int) -> int:
    """Return the minimal size of the largest part, by exhaustive search."""
    bounds = ((0, *chosen, len(weights)) for chosen in combinations(range(1, len(weights)), count - 1))
    return min(max(sum(weights[a:b]) for a, b in pairwise(edges)) for edges in bounds)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_part_is_minimal(weights: list[int], count: int) -> None:
    count = min(count, len(weights))
    starts = balance(weights, count)
    edges = [0, *starts, len(weights)]
    assert len(starts) == count - 1
    assert all(a < b for a, b in pairwise(edges))
    assert max(sum(weights[a:b]) for a, b in pairwise(edges)) == smallest_maximum(weights, count)


class SharedNorm(nn.Module):
    """Model that calls a module with buffers first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.two(self.one(self.norm(inputs))))
        return hidden


@pytest.mark.parametrize(
    ("model", "names", "count"),
    [
        (SharedNorm(), ("two",), 2),  # buffers in two stages
        (DigitsNet(), ("head", "blocks.1"), 3),  # in another order
        (DigitsNet(), ("haed",), 2),
        (DigitsNet(), ("stem",), 2),  # the first stage begins there
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (), 2),
    ],
)
def test_an_impossible_partition_is_an_error(model: nn.Module, names: tuple[str, ...], count: int) -> None:
    with pytest.raises(InputError) as error:
        partition_model(model, names, count)
    assert error.value.code == "E_PIPELINE"
