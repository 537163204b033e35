"""Model transforms keep parameter names and the equality of bits on any number of ranks."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.config import StepConfig, StrategyConfig
from samestep.data.batch import channels_last
from samestep.engine import build
from samestep.errors import InputError
from samestep.launcher.launch import launch
from workers.transforms import Conv, engine_of, train, train_each

NAMES = list(Conv().state_dict())
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "channels last": {"channels_last": True},
    "recompute": {"recompute": ("blocks.*",)},
    "bf16": {"precision": "bf16"},
    "all": {"channels_last": True, "recompute": ("blocks.0",), "precision": "bf16", "tf32": True},
}


Results = dict[str, tuple[str, float, list[str]]]


@pytest.fixture(scope="module")
def alone_each() -> Results:
    """Return the results of all options on one process."""
    results: Results = launch(train_each, OPTIONS, processes=1)
    return results


@pytest.fixture(scope="module")
def ranks_each() -> Results:
    """Return the results of all options on three processes."""
    results: Results = launch(train_each, OPTIONS, processes=3)
    return results


@pytest.mark.parametrize("name", OPTIONS)
def test_result_has_the_same_bits_on_any_number_of_ranks(name: str, alone_each: Results, ranks_each: Results) -> None:
    assert alone_each[name][2] == NAMES
    assert ranks_each[name] == alone_each[name]


def test_activation_checkpointing_gives_the_same_bits(alone_each: Results) -> None:
    """Dropout masks and running statistics are also equal."""
    assert alone_each["recompute"] == alone_each["none"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_model_gives_the_same_bits_on_any_number_of_ranks(alone_each: Results) -> None:
    alone = launch(train, {"compile": True}, processes=1)
    assert alone[1] == pytest.approx(alone_each["none"][1], rel=1e-4), (
        "sums have another order, dropout masks are equal"
    )
    assert alone[2] == NAMES
    assert launch(train, {"compile": True}, processes=3) == alone


def test_channels_last_changes_the_memory_format_of_images_only() -> None:
    images, rows = torch.randn(2, 3, 4, 4), torch.randn(2, 3)
    data = channels_last({"pixels": images, "rows": [rows]})
    assert data["pixels"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(data["pixels"], images)
    assert data["rows"][0] is rows


def test_only_named_modules_are_recomputed(alone: samestep.World) -> None:
    engine = engine_of(alone, recompute=("blocks.1",))
    calls = {name: 0 for name in ("blocks.0", "blocks.1")}

    def count(name: str) -> Any:
        def hook(*arguments: Any) -> None:
            calls[name] += 1

        return hook

    for name in calls:
        engine.model.get_submodule(f"{name}.0").register_forward_hook(count(name))
    engine.model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == {"blocks.0": 1, "blocks.1": 2}
    with torch.no_grad():
        engine.model(torch.randn(2, 3, 8, 8))
    assert calls == {"blocks.0": 2, "blocks.1": 3}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"recompute": ("block.*",)}, "step.recompute: 'block.*' matches no module"),
        ({"recompute": ("blocks.*",), "batch_norm": "sync"}, "step.recompute with step.batch_norm: sync"),
        ({"compile": True, "batch_norm": "sync"}, "step.compile with step.batch_norm: sync"),
    ],
)
def test_incompatible_options_are_refused(alone: samestep.World, options: dict[str, Any], value: str) -> None:
    with pytest.raises(InputError) as error:
        engine_of(alone, **options)
    assert value in error.value.value
    assert error.value.fix


def test_recomputed_modules_receive_tensors_and_options_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch restores the generators of the devices of positional tensors, and has an option `debug` of its own."""
    passed: list[tuple[Any, ...]] = []

    def recorded(function: Any, *arguments: Any, **options: Any) -> Any:
        passed.append(arguments)
        return checkpoint(function, *arguments, **options)

    monkeypatch.setattr(build, "checkpoint", recorded)
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    outputs = build._checkpointed_forward(lambda x, y, *, debug: x * y * debug, None, x, y=y, debug=2.0)
    outputs.sum().backward()
    assert passed == [(x, y, 2.0)]
    assert torch.equal(x.grad, torch.full((2,), 6.0))


@pytest.mark.parametrize(("offload", "ranks", "device"), [(True, 2, "cpu"), (True, 1, "meta"), (False, 2, "meta")])
def test_the_scale_of_fp16_is_on_the_device_of_the_gradients(offload: bool, ranks: int, device: str) -> None:
    """With `offload`, gradients of shards are in host memory; otherwise on the device of the rank."""
    strategy = StrategyConfig(name="fsdp", offload=offload)
    world = samestep.World(0, ranks, torch.device("meta"), strategy=strategy)
    scaler = build._scaler(samestep.StepConfig(precision="fp16"), world)
    assert scaler.scale(torch.zeros((), device="meta")).device.type == "meta"
    assert scaler._scale is not None
    assert scaler._scale.device.type == device


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def compiled_graphs(model: torch.nn.Module) -> int:
    build.transform_model(model, StepConfig(compile=True), torch.device("cpu"))
    for _ in range(2):
        model(torch.randn(3, 2)).sum().backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("model", [torch.nn.Sequential(torch.nn.Linear(2, 2)), Wrapped()], ids=["Sequential", "own"])
def test_model_is_compiled_once(model: torch.nn.Module) -> None:
    assert launch(compiled_graphs, model, processes=1) == 1
