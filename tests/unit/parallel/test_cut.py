"""Where a model is cut into stages, and that the stages one after another are the model."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from samestep.config import StrategyPart
from samestep.errors import InputError
from samestep.parallel.pipeline.compute import Computer
from samestep.parallel.pipeline.cut import _partition, balanced, cut
from samestep.parallel.pipeline.order import stage_count
from samestep.parallel.pipeline.trace import bound, trace
from samestep.recipes.digits import DigitsNet
from samestep.recipes.text.gpt import GPT
from samestep.recipes.zoo import find_in_library


def through(
    model: nn.Module, names: tuple[str, ...], count: int, *inputs: torch.Tensor, training: bool
) -> torch.Tensor:
    """What the stages of a model make of inputs, one after another."""
    stages = cut(model, names, count)
    assert stages.count == count
    given_names = bound(model, inputs, {})
    model.train(training)
    values: tuple[torch.Tensor, ...] = ()
    for stage in stages.graphs[training]:
        values = Computer(model, stage.graph)(*values, *(given_names[name] for name in stage.inputs))
    assert isinstance(values, torch.Tensor)
    return values


class Masked(nn.Module):
    """Its second input is used in every stage, and what dropout does is asked of the model itself."""

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
    "gpt": (GPT(blocks=4, width=16), torch.randint(0, 200, (3, 20))),
    "chain": (nn.Sequential(*(nn.Linear(6, 6) for _ in range(7))), torch.randn(2, 6)),
    "nested": (
        nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2), nn.Linear(2, 2)),
        torch.ones(2, 6),
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_one_after_another_are_the_model(name: str, count: int, training: bool) -> None:
    model, inputs = CASES[name]
    model.train(training)
    expected = model(inputs)
    assert torch.equal(through(model, (), count, inputs, training=training), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torchvision", "resnet18"),
        ("torchvision", "vit_b_16"),
        ("torchvision", "mobilenet_v2"),
        ("timm", "vit_tiny_patch16_224"),
        ("timm", "convnext_atto"),
        ("timm", "swin_tiny_patch4_window7_224"),
    ],
)
def test_models_of_the_zoo_can_be_cut(library: str, name: str) -> None:
    build = find_in_library(f"{library}:{name}")
    assert build is not None
    model = build(num_classes=3).eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(through(model, (), 4, images, training=False), model(images))


def test_inputs_go_to_every_stage_that_uses_them() -> None:
    model, inputs, lengths = Masked(), torch.randn(3, 6), torch.tensor([6, 2, 4])
    model.eval()
    assert torch.equal(through(model, (), 4, inputs, lengths, training=False), model(inputs, lengths))
    stages = cut(model, (), 4)
    # What comes before the call of a layer belongs to the stage before it.
    assert ["lengths" in stage.inputs for stage in stages.graphs[False]] == [True, True, True, False]
    assert ["inputs" in stage.inputs for stage in stages.graphs[False]] == [True, False, False, True]
    assert stages.homes["scale"] == (0, 3)


def test_what_a_forward_asks_of_its_mode_is_asked_of_both() -> None:
    model, inputs, lengths = Masked(), torch.randn(3, 6), torch.tensor([6, 2, 4])
    found = []
    for run in (lambda: model(inputs, lengths), lambda: through(model, (), 2, inputs, lengths, training=True)):
        model.train()
        torch.manual_seed(0)
        found.append(run())
    assert torch.equal(*found)
    assert model.training, "cutting leaves the mode as it was"


def test_named_stages_begin_at_deep_modules_too() -> None:
    model, images = DigitsNet(dropout=0.0), torch.randn(4, 1, 8, 8)
    names = ("blocks.1.second", "head")
    assert torch.equal(through(model, names, 3, images, training=True), model(images))
    homes = cut(model, names, 3).homes
    assert homes["blocks.1.first.weight"] == (0,)
    assert homes["blocks.1.second.weight"] == (1,)
    assert homes["head.bias"] == (2,)


def test_a_tied_weight_is_in_both_stages() -> None:
    homes = cut(GPT(blocks=4), (), 2).homes
    assert homes["tokens.weight"] == (0, 1)
    assert set(homes.values()) == {(0,), (1,), (0, 1)}


def best(weights: list[int], count: int) -> int:
    """The least largest part, by trying all."""
    edges = ((0, *chosen, len(weights)) for chosen in combinations(range(1, len(weights)), count - 1))
    return min(max(sum(weights[a:b]) for a, b in pairwise(cuts)) for cuts in edges)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_stage_is_as_small_as_can_be(weights: list[int], count: int) -> None:
    count = min(count, len(weights))
    begins = _partition(weights, count)
    cuts = [0, *begins, len(weights)]
    assert len(begins) == count - 1
    assert all(a < b for a, b in pairwise(cuts))
    assert max(sum(weights[a:b]) for a, b in pairwise(cuts)) == best(weights, count)


def test_stages_are_balanced_by_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 4))
    assert balanced(model, trace(model, training=True), 3) == ["3", "5"]


class Shared(nn.Module):
    """Calls a module with buffers at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.two(self.one(self.norm(inputs))))
        return hidden


@pytest.mark.parametrize(
    ("model", "names", "count", "said"),
    [
        (Shared(), ("two",), 2, "'norm', which has buffers, is used in stages 1 and 2"),
        (DigitsNet(), ("head", "blocks.1"), 3, "the stages begin at head, blocks.1"),
        (DigitsNet(), ("haed",), 2, "names like head"),
        (DigitsNet(), ("stem",), 2, "without stem.0, with which the first one begins"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (), 2, "1 modules at which a stage can begin, for 2 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, names: tuple[str, ...], count: int, said: str) -> None:
    with pytest.raises(InputError) as refused:
        cut(model, names, count)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "named", "ranks", "count"),
    [
        ("1f1b", 0, 3, 3),
        ("gpipe", 1, 2, 2),
        ("interleaved", 0, 2, 4),
        ("interleaved", 5, 2, 6),
        ("zero_bubble", 0, 4, 4),
    ],
)
def test_as_many_stages_as_the_schedule_wants(schedule: str, named: int, ranks: int, count: int) -> None:
    part = StrategyPart(name="pp", schedule=schedule, stages=("x",) * named)  # type: ignore[arg-type]
    assert stage_count(part, ranks) == count


@pytest.mark.parametrize(("schedule", "named"), [("1f1b", 2), ("gpipe", 3), ("interleaved", 1), ("zero_bubble", 2)])
def test_named_stages_that_do_not_fit_the_ranks_are_refused(schedule: str, named: int) -> None:
    part = StrategyPart(name="pp", schedule=schedule, stages=("x",) * named)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"which makes {named + 1} stages for 2 ranks"):
        stage_count(part, 2)
