"""Models split between ranks by a tensor axis, a pipeline axis and replicas, compared with the plain loop."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import samestep
from helpers.forked_ranks import RankServer
from helpers.tensor_models import PLAN, Layers, gpt
from helpers.view_checks import difference, error_code
from samestep.checkpoint.contents import SavedParameters
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed.world import World
from samestep.parallelize import parallel_module
from samestep.strategies.divided_parameters import divided_parameters
from samestep.view.view import View

ROWS = 7
STEPS = 4
CLASSES = 4


def bits(name: str, mesh: dict[str, int], models: list[str], slices: int = 1) -> dict[str, list[Any]]:
    """Return for each model, on each rank, a hash of all values under `exact`, and divided and whole calls."""
    config, world = _joined(name, mesh, "exact")
    results = {}
    for model in models:
        divided, inputs = _divided(model, config, microbatches=4, reduction="exact", tensor_slices=slices)
        digest = hashlib.sha256()
        torch.manual_seed(1)
        for value in _script(divided, inputs, clips=True):
            digest.update(b"none" if value is None else value.contiguous().numpy().tobytes())
        owner = parallel_module(divided)
        assert owner is not None
        own = [digest.hexdigest(), owner.summary.divided, owner.summary.whole, owner.summary.reasons]
        results[model] = samestep.all_gather(own, world)
    return results


def refusals(name: str, mesh: dict[str, int], models: list[str]) -> list[str]:
    """Return the code of the error of each model under `exact`."""
    config, _ = _joined(name, mesh, "exact")
    return [error_code(partial(_divided, model, config, microbatches=4, reduction="exact")) for model in models]


def steps_of_optimizers(name: str, mesh: dict[str, int], models: list[str]) -> list[str]:
    """Return the code of the error of the first step of each optimizer, and of a norm of order 0."""
    config, _ = _joined(name, mesh, "fast")
    codes = []
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        divided, inputs = _divided(models[0], config)
        optimizer = make(divided.parameters())
        divided(inputs(0, ROWS)).pow(2).mean().backward()
        codes.append(error_code(optimizer.step))
    # Of a gradient that other ranks have parts of.
    codes.append(error_code(lambda: nn.utils.clip_grad_norm_(divided.parameters(), 1.0, norm_type=0)))
    return codes


def code_of_a_call_in_a_fork(name: str, mesh: dict[str, int], models: list[str]) -> str:
    """Return the code of the error of a call in a child process, with slices of products on one rank."""
    config, _ = _joined(name, mesh, "fast")
    divided, inputs = _divided(models[0], config, tensor_slices=2)
    divided(inputs(0, ROWS)).pow(2).mean().backward()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, error_code(lambda: divided(inputs(0, ROWS))).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    code = os.read(reader, 100).decode()
    os.close(reader)
    return code


def _joined(name: str, mesh: dict[str, int], reduction: Any) -> tuple[StrategyConfig, World]:
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    config = StrategyConfig(name=name, mesh=MeshConfig(**mesh))  # type: ignore[arg-type]
    strategy = config if mesh else None
    limit = timedelta(seconds=60)
    return config, samestep.init(threads=1, timeout=limit, strategy=strategy, reduction=reduction)


def run(name: str, mesh: dict[str, int], models: list[str], steps: int = STEPS) -> dict[str, list[Any]]:
    """Return for each model, on each rank: largest difference, divided and whole calls, and reasons for whole ones."""
    config, world = _joined(name, mesh, "fast")
    return {model: samestep.all_gather(_compared(model, config, steps), world) for model in models}


def checkpoints(name: str, mesh: dict[str, int], models: list[str], folder: str, epochs: int) -> dict[str, list[Any]]:
    """Resume each model from its last checkpoint, if there is one, and train to the end of some epoch.

    Return on each rank, after the last epoch: whether each model takes a full state dict.
    """
    config, world = _joined(name, mesh, "fast")
    results = {}
    for model in models:
        divided, inputs = _divided(model, config)
        optimizer = torch.optim.Adam(divided.parameters(), lr=0.05)
        dataset = torch.utils.data.TensorDataset(inputs(0, 3 * ROWS))
        batches = samestep.loader(dataset, batch_size=ROWS, shuffle=True)
        manager = samestep.CheckpointManager(f"{folder}/{model}", divided, batches, optimizer=optimizer)
        for _ in manager.epochs(epochs):
            for (batch,) in batches:
                optimizer.zero_grad()
                divided(batch).pow(2).mean().backward()
                optimizer.step()
        state = samestep.full_state_dict(divided)
        doubled = {key: value * 2 for key, value in state.items()}
        divided.load_state_dict(doubled)
        loaded = samestep.full_state_dict(divided)
        complete = all(torch.equal(loaded[key], value) for key, value in doubled.items())
        results[model] = samestep.all_gather(complete and list(loaded) == list(MODELS[model][0]().state_dict()), world)
    return results


class Deep(nn.Module):
    """Batch norm, dropout, an in-place activation, a frozen layer, a layer used twice, and a skip connection."""

    def __init__(self, dropout: float = 0.0, *, has_norm: bool = True) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(12, 16), nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        first = hidden = self.norm(self.first(inputs))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = self.drop(self.act(block(hidden)))
        logits: Tensor = self.last(self.frozen(hidden) + first)
        return logits


class HalfFrozen(Deep):
    """Model whose trained modules are all in one of two stages."""

    def __init__(self, trained: tuple[str, ...]) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))


class Layouts(nn.Module):
    """Stages that exchange a transposed tensor and an unaligned one, whose gradients are a slice and an expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 5 * 7), nn.Sequential(nn.GELU(), nn.Linear(5, 9))
        self.third, self.last = nn.Sequential(nn.Linear(9, 11), nn.GELU()), Pooled(11, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).unflatten(1, (5, 7)).transpose(1, 2))
        logits: Tensor = self.last(self.third(hidden[:, 1:]))
        return logits


class Pooled(nn.Linear):
    """Linear layer of a mean over the second dimension."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mean(dim=1))


class SharedFunction(nn.Module):
    """Model with a function of a parameter that several stages use, and a parameter that several stages use twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.square = nn.Parameter(torch.ones(12)), nn.Linear(12, 12)
        self.layers, self.last = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)]), nn.Linear(12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        factor, hidden = torch.exp(self.scale / 3), inputs
        for layer in self.layers:
            hidden = torch.tanh(self.square(self.square(layer(hidden))) * factor)
        logits: Tensor = self.last(hidden)
        return logits


class Convolutions(nn.Module):
    """A network of images whose batch norms are in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        logits: Tensor = self.head(self.body(hidden.transpose(2, 3)))
        return logits


class Pair(nn.Module):
    """Returns a dictionary of a tensor, a loss and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        logits = self.second(torch.tanh(self.first(inputs)))
        return {"logits": logits, "loss": logits.pow(2).mean(), "classes": 4}


def _untied() -> nn.Module:
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _points(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(step))


def _tokens(step: int, rows: int, vocabulary: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))


def _images(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 3, 10, 8, generator=torch.Generator().manual_seed(step))


Inputs = Callable[[int, int], Any]
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "deep": (Deep, _points),
    "untied": (_untied, _points),
    # Stages on CPUs do not divide calls with both batch norm and dropout.
    "dropout": (lambda: Deep(0.3, has_norm=False), _points),
    "norm and dropout": (lambda: Deep(0.3), _points),
    "layouts": (Layouts, _points),
    "shared function": (SharedFunction, _points),
    "first frozen": (lambda: HalfFrozen(("blocks.4", "last")), _points),
    "last frozen": (lambda: HalfFrozen(("first", "norm", "blocks.0")), _points),
    "images": (Convolutions, _images),
    "pair": (Pair, _points),
    "perceptron": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)), _points),
    "text": (gpt, lambda step, rows: _tokens(step, rows, 13, 6)),
    "layers": (Layers, lambda step, rows: _tokens(step, rows, 13, 6)),
}
PLANS = {"layers": PLAN, "perceptron": {"0": "column", "2": "row"}}


def _divided(name: str, config: StrategyConfig, **options: Any) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    plan = PLANS.get(name, {})
    return samestep.parallel(make().double(), strategy=config, tensor_plan=plan, **options), inputs


def _compared(name: str, config: StrategyConfig, steps: int) -> list[Any]:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    divided, inputs = _divided(name, config)
    outcomes: list[list[Tensor | None]] = []
    for one in (model, divided):
        torch.manual_seed(1)
        outcomes.append(list(_script(one, inputs, clips=True, steps=steps)))
    owner = parallel_module(divided)
    assert owner is not None
    return [difference(*outcomes), owner.summary.divided, owner.summary.whole, owner.summary.reasons]


def _script(model: nn.Module, inputs: Inputs, *, clips: bool = False, steps: int = STEPS) -> Iterator[Tensor | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        outputs = model(inputs(step, ROWS + step % 2))
        loss = outputs["loss"] + outputs["logits"].sum() if isinstance(outputs, dict) else outputs.pow(2).mean()
        loss.backward()
        yield loss.detach()
        yield from _full(model, lambda parameter: parameter.grad)
        if clips:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            yield nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], math.inf)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for step in range(2):
            outputs = model(inputs(step, ROWS))
            yield outputs["logits"] if isinstance(outputs, dict) else outputs
    yield from _full(model, lambda parameter: parameter)
    yield from [buffer.clone() for buffer in model.buffers()]
    yield functional.dropout(torch.ones(5))  # the generator


def _full(model: nn.Module, value: Callable[[nn.Parameter], Tensor | None]) -> Iterator[Tensor | None]:
    saved = divided_parameters(model) or SavedParameters(model)
    for name, parameter in model.named_parameters():
        own = value(parameter)
        if own is None and parameter.requires_grad:
            own = torch.zeros_like(parameter)
        if own is None:
            yield None
        else:
            ((_, _, full),) = saved.full_values({name: {"": own.detach()}})
            yield full.clone()


TOLERANCE = 1e-13
PIPELINE = ["deep", "dropout", "layouts", "shared function", "first frozen", "last frozen", "images", "pair", "text"]
TENSOR = ["perceptron", "text", "layers"]
# Ranks, strategy and mesh.
LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "1": (1, "auto", {}),
    "ddp 2": (2, "auto", {}),
    "pp 2": (2, "pp", {"pipeline": 2}),
    "pp 3": (3, "pp", {"pipeline": 3}),
    "ddp 2 x pp 2": (4, "pp", {"pipeline": 2, "replicate": 2}),
    "tp 2": (2, "tp", {"tensor": 2}),
    "ddp 2 x tp 2": (4, "tp", {"tensor": 2, "replicate": 2}),
    "ddp with a mesh": (4, "ddp", {"tensor": 2}),
    "tp 2 x pp 2": (4, "pp", {"pipeline": 2, "tensor": 2}),
}


def started(on_ranks: RankServer, function: Any, layout: str, models: list[str], **options: Any) -> Any:
    """Return the result of a function of this file on the ranks of a layout."""
    ranks, name, mesh = LAYOUTS[layout]
    return on_ranks(function, ranks, name=name, mesh=mesh, models=models, **options)


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        ("pp 2", ["dropout", "shared function"]),
        ("tp 2", ["layers"]),
        pytest.param("pp 2", PIPELINE, marks=pytest.mark.long),
        pytest.param("pp 3", ["deep", "text", "layouts", "shared function"], marks=pytest.mark.slow),
        pytest.param("ddp 2 x pp 2", PIPELINE, marks=pytest.mark.slow),
        pytest.param("tp 2", TENSOR, marks=pytest.mark.long),
        pytest.param("ddp 2 x tp 2", TENSOR, marks=pytest.mark.slow),
        pytest.param("ddp with a mesh", ["layers"], marks=pytest.mark.long),
        pytest.param("tp 2 x pp 2", ["text"], marks=pytest.mark.slow),
    ],
)
def test_layouts_have_the_values_of_the_plain_loop(layout: str, models: list[str], on_ranks: RankServer) -> None:
    results = started(on_ranks, run, layout, models)
    assert list(results) == models
    for name, ranks in results.items():
        for deviation, *calls in ranks:
            assert deviation <= TOLERANCE, name
            assert calls == [4, 0, []], name  # all calls but the first of each kind were divided


@pytest.mark.parametrize(
    ("layout", "codes"), [("tp 2", ["none", "none", "none"]), ("pp 2", ["none", "none", "E_VALUE"])]
)
def test_optimizers_and_norms_that_parts_and_stages_allow(layout: str, codes: list[str], on_ranks: RankServer) -> None:
    assert started(on_ranks, steps_of_optimizers, layout, ["perceptron"]) == codes


def test_slices_of_one_rank_are_computed_in_a_fork(on_ranks: RankServer) -> None:
    assert started(on_ranks, code_of_a_call_in_a_fork, "1", ["perceptron"]) == "none"


def test_stages_with_batch_norm_and_dropout_keep_the_running_statistics(on_ranks: RankServer) -> None:
    """Over many steps: wrong statistics of slices change no training loss, only evaluations."""
    name = "norm and dropout"
    for deviation, *_ in started(on_ranks, run, "pp 2", [name], steps=12)[name]:
        assert deviation <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("text", ["pp 2", "1", "pp 3", "tp 2", "tp 2 x pp 2"]),
        ("images", ["ddp 2 x pp 2", "ddp 2"]),  # copies of stages with batch norm
    ],
)
def test_checkpoints_belong_to_no_layout(model: str, layouts: list[str], tmp_path: Path, on_ranks: RankServer) -> None:
    runs = [("plain", "1", len(layouts)), *(("changing", layout, epoch) for epoch, layout in enumerate(layouts, 1))]
    for folder, layout, epochs in runs:
        result = started(on_ranks, checkpoints, layout, [model], folder=str(tmp_path / folder), epochs=epochs)
        assert result == {model: [True] * LAYOUTS[layout][0]}
    plain, changing = (tmp_path / folder / model / "last" for folder in ("plain", "changing"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = load_file(plain / file), load_file(changing / file)
        assert list(one) == list(other)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-9)
    one, other = (json.loads((folder / "state.json").read_text()) for folder in (plain, changing))
    assert one["optimizer"] == other["optimizer"]
    assert one["aliases"] == other["aliases"]


@pytest.mark.slow
def test_stages_have_the_bits_of_one_process(on_ranks: RankServer) -> None:
    models = ["untied", "layouts", "first frozen", "images", "pair", "text"]
    one = started(on_ranks, bits, "1", models)
    others = {"ddp 2": models, "pp 2": models, "pp 3": ["untied", "text"], "ddp 2 x pp 2": ["untied", "images"]}
    for layout, names in others.items():
        for name, ranks in started(on_ranks, bits, layout, names).items():
            assert ranks[0][1:] == [6, 0, []]
            assert all(rank == one[name][0] for rank in ranks), (layout, name)
    assert started(on_ranks, refusals, "pp 2", ["deep", "shared function"]) == ["E_PIPELINE", "E_PIPELINE"]


@pytest.mark.slow
def test_bits_depend_on_the_number_of_slices_only(on_ranks: RankServer) -> None:
    one = started(on_ranks, bits, "1", TENSOR, slices=2)
    without = started(on_ranks, bits, "1", TENSOR, slices=1)
    for layout in ("ddp 2", "tp 2", "ddp 2 x tp 2"):
        others = started(on_ranks, bits, layout, TENSOR, slices=2)
        for name, ranks in one.items():
            digest, *calls = ranks[0]
            assert calls == [6, 0, []]
            assert all(other == ranks[0] for other in others[name]), (layout, name)
            assert without[name][0][0] != digest
