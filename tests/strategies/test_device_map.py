"""`device_map`: modules of a model on several devices of a rank, with one or several ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from samestep import launch
from samestep.config import MeshConfig, StrategyConfig, resolve_mesh
from samestep.data.batch import move_next_to
from samestep.engine.build import _checkpointed_forward
from samestep.errors import InputError
from samestep.strategies.device_map import DeviceMap, apply_device_map
from samestep.strategies.reduction import _buckets
from workers import devices as ranks_devices
from workers.devices import (
    HALF,
    Chain,
    Recurrent,
    Tokens,
    Toy,
    build,
    engine_error,
    require_same_bits,
    resume,
    single_process,
    steps_of,
    train,
)


def at(place: dict[str, int], devices: int | None = 2) -> StrategyConfig:
    return StrategyConfig(name="device_map", devices=devices, place=place)


CONFIGS = {
    "Toy": at({"net1": 0, "net2": 1}),
    "Normed": at({"*": 0, "twice": 1, "[fl]*": 2}, devices=3),
    "Dropping": at({"*": 1, "last": 0}),
    "Chain": StrategyConfig(name="device_map", devices=3),
    "Recurrent": at({"lstm": 1, "last": 0}),
}


def device_map_of(model: nn.Module, config: StrategyConfig) -> DeviceMap:
    with single_process(config) as world:
        return apply_device_map(model, world)


# --- the same bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CONFIGS)
def test_the_bits_are_those_of_one_device(model: str) -> None:
    with single_process() as world:
        expected = train(world, model)
    with single_process(CONFIGS[model]) as world:
        result = train(world, model)
    require_same_bits(result, expected)
    assert result["strategy"] == "device_map"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": "sync"},
        {"precision": "bf16"},
        {"reduction": "fast", "merge": "off"},
        {"recompute": ("twice", "last")},
    ],
)
def test_the_bits_are_those_of_one_device_under_other_options(options: dict[str, Any]) -> None:
    with single_process() as world:
        expected = train(world, "Normed", **options)
    with single_process(CONFIGS["Normed"]) as world:
        require_same_bits(train(world, "Normed", **options), expected)


def test_four_ranks_give_the_bits_of_one_device(tmp_path: Path) -> None:
    with single_process() as world:
        expected = train(world, "Normed", tmp_path / "one")
    configs = {"device_map": CONFIGS["Normed"], "ddp": StrategyConfig()}
    results = launch(ranks_devices.train_on_ranks, configs, "Normed", tmp_path, processes=4)
    for name, strategy in (("device_map", "ddp x device_map"), ("ddp", "ddp")):
        assert len(results[name]) == 4
        for result in results[name]:
            require_same_bits(result, expected)
            assert result["strategy"] == strategy
    for saved, config in (("device_map", None), ("one", CONFIGS["Normed"]), ("ddp", CONFIGS["Normed"])):
        with single_process(config) as world:
            require_same_bits(resume(world, "Normed", tmp_path / saved), expected, HALF)


# --- assignment of modules ------------------------------------------------------------------------------------------


def test_two_layers_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    move_inputs = DeviceMap.move_inputs

    def recorded(self: DeviceMap, name: str, *arguments: Any) -> Any:
        calls.append(name)
        return move_inputs(self, name, *arguments)

    monkeypatch.setattr(DeviceMap, "move_inputs", recorded)
    with single_process(CONFIGS["Toy"]) as world:
        engine, batches = build(world, "Toy")
        device_map = engine.device_map
        assert device_map is not None
        assert device_map.numbers == {"net1": 0, "net2": 1}
        steps_of(engine, batches, 1)
        assert calls == ["net1", "net2"] * 5  # microbatches
        assert list(engine.model.state_dict()) == list(Toy().state_dict())


class Generators:
    """States of the generators of two GPUs, of which one draws at a time."""

    def __init__(self) -> None:
        self.states = {torch.device("cuda", number): f"state of device {number}" for number in range(2)}

    def get_rng_state(self, device: torch.device) -> Any:
        return self.states[device]

    def set_rng_state(self, state: Any, device: torch.device) -> None:
        self.states[device] = state


def test_a_repeated_forward_draws_the_same_numbers_after_that_of_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = Generators()
    monkeypatch.setattr("samestep.strategies.device_map.accelerator_module", lambda: generators)
    monkeypatch.setattr("samestep.engine.build.checkpoint", lambda forward, **_: (forward(), forward)[1])
    first, second = devices = tuple(generators.states)
    device_map = DeviceMap(devices, {"net1.dropout": 0, "net1.linear": 1, "net2": 1})
    seen: list[Any] = []

    def forward() -> None:
        for name, device in {"net1.dropout": first, "net1.linear": second}.items():
            device_map.move_inputs(name, nn.Module(), (), {})
            seen.append(generators.states[device])
            generators.states[device] += ", drawn"

    device_map.begin_forward(nn.Module(), ())
    repeat = _checkpointed_forward(forward, device_map)
    device_map.move_inputs("net2", nn.Module(), (), {})
    generators.states[second] += ", drawn again"
    repeat()
    assert seen == ["state of device 0", "state of device 0, drawn"] * 2


def test_changed_parameters_keep_the_device_map_and_its_hooks() -> None:
    """Forwards that activation checkpointing repeats refer to the device map."""
    with single_process(CONFIGS["Toy"]) as world:
        engine, batches = build(world, "Toy")
        device_map, hooks = engine.device_map, len(engine.model.net1._forward_pre_hooks)
        steps_of(engine, batches, 1)
        engine.model.net1.requires_grad_(False)
        steps_of(engine, batches, 1)
        assert engine.device_map is device_map
        assert len(engine.model.net1._forward_pre_hooks) == hooks == 1


def test_the_last_matching_pattern_applies_to_all_descendants() -> None:
    model = nn.ModuleDict({"body": Chain(), "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    numbers = device_map_of(model, at({"*": 0, "head": 1, "body.1.*": 2}, devices=3)).numbers
    assert "" not in numbers
    assert "body" not in numbers
    assert numbers["head"] == numbers["head.0"] == 1
    assert {numbers[f"body.{inner}"] for inner in (0, 2, 3, 4, 5)} == {0}
    assert {numbers[f"body.1.{inner}"] for inner in range(3)} == {2}
    over = device_map_of(Toy(), at({"net1": 0, "net2": 1, "*": 1}))
    assert set(over.numbers.values()) == {1}


def test_a_sequential_model_is_partitioned_by_size() -> None:
    model = Chain()  # parameters: 264, (48, 400), 136, 36
    numbers = device_map_of(model, StrategyConfig(name="device_map", devices=2)).numbers
    assert numbers == {"0": 0, "1.0": 0, "1.1": 0, "1.2": 1, "2": 1, "3": 1, "4": 1, "5": 1}


class TransferRecorder(TorchFunctionMode):
    """Records the tensors of calls of `Tensor.to`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


class ManyInputs(nn.Module):
    """Module with positional, nested and keyword tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, first: Any, pair: Any, *, named: Any, mode: str) -> Any:
        return first, pair, named, mode


def test_all_input_tensors_are_moved_and_other_inputs_are_unchanged() -> None:
    model = ManyInputs()
    device_map_of(model, at({"*": 1}))
    tensors = [torch.full((2,), float(number)) for number in range(4)]
    args = (tensors[0], (tensors[1], [tensors[2], 7]))
    with TransferRecorder() as recorder:
        first, pair, named, mode = model(*args, named={"mask": tensors[3], "scale": 0.5}, mode="fast")
    assert {id(tensor) for tensor in recorder.seen} == {id(tensor) for tensor in tensors}
    assert first is tensors[0]
    assert isinstance(pair, tuple)
    assert pair[1][1] == 7
    assert named["scale"] == 0.5
    assert mode == "fast"


def test_targets_are_moved_to_the_device_of_outputs() -> None:
    outputs = torch.zeros(2, device="meta")
    pair = {"labels": torch.ones(2), "name": "x"}
    moved = move_next_to(pair, [outputs])
    assert moved["labels"].device.type == "meta"
    assert moved["name"] == "x"
    assert move_next_to(pair, torch.zeros(1)) is pair  # no transfer needed
    assert move_next_to(pair, "nothing") is pair
    assert move_next_to("nothing", outputs) == "nothing"


def test_buckets_contain_gradients_of_one_device() -> None:
    devices = ("cpu", "cpu", "meta", "meta", "cpu")
    parameters = [nn.Parameter(torch.zeros(2, device=device)) for device in devices]
    assert [[p.device.type for p in bucket] for bucket in _buckets(parameters)] == [["cpu"] * 2, ["meta"] * 2, ["cpu"]]


# --- errors ----------------------------------------------------------------------------------------------


def test_tied_weights_must_be_on_one_device() -> None:
    error = engine_error(at({"*": 0, "out": 1}), Tokens())
    assert error.code == "E_DEVICE_MAP"
    assert "'embed' on device 0 and 'out' on device 1 share a tensor" in error.value
    assert device_map_of(Tokens(), at({"*": 0, "mix": 1})).numbers["out"] == 0


@pytest.mark.parametrize(
    ("config", "model", "value", "fix"),
    [
        (at({"*": 0, "net3": 1}), Toy(), "'net3' matches no module", "names such as net1, relu, net2"),
        (at({"*": 0, "net2": 2}), Toy(), "assigns 'net2' to device 2 of 2", "set strategy.devices: 3"),
        (at({"*": -1}), Toy(), "to device -1", "count devices from 0"),
        (at({"net1": 0}), Toy(), "assigns no device to net2", "begin strategy.place with '*': 0"),
        (at({"*": 0}, None), Toy(), "on a CPU without a number of devices", "set strategy.devices: 2"),
        (at({}), Toy(), "of a Toy without strategy.place", "set strategy.place"),
        (at({}), Recurrent(), "of a Recurrent without strategy.place", "set strategy.place"),
        (at({}), nn.Linear(2, 2), "of a Linear without strategy.place", "set strategy.place"),
        (
            at({}, 3),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "3 devices for 2 modules",
            "devices: 2",
        ),
    ],
)
def test_invalid_device_maps_are_errors(config: StrategyConfig, model: nn.Module, value: str, fix: str) -> None:
    error = engine_error(config, model)
    assert value in error.value
    assert fix in str(error.fix)
    assert error.expected


class OutOfOrder(nn.Sequential):
    """Sequential module with another order of calls."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self[0](self[1](inputs))
        return outputs


def test_a_sequential_module_with_another_forward_is_not_partitioned() -> None:
    model = OutOfOrder(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "of a OutOfOrder" in engine_error(at({}), model).value


@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2), MeshConfig(shard=2), MeshConfig(pipeline=2)])
def test_other_axes_are_errors(mesh: MeshConfig) -> None:
    with pytest.raises(InputError) as error:
        resolve_mesh(StrategyConfig(name="device_map", devices=2, mesh=mesh), 2)
    assert error.value.code == "E_MESH"


# --- GPUs --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("model", ["Toy", "Dropping", "Chain"])
def test_two_gpus_give_the_bits_of_one(model: str) -> None:
    config = StrategyConfig(name="device_map", devices=2) if model == "Chain" else CONFIGS[model]
    results = []
    for strategy in (None, config):
        with single_process(strategy, "cuda") as world:
            engine, batches = build(world, model)
            steps = steps_of(engine, batches, HALF)
            devices = {parameter.device.index for parameter in engine.model.parameters()}
            results.append((steps, [tensor.cpu() for tensor in engine.model.state_dict().values()], devices))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))
    assert (results[0][2], results[1][2]) == ({0}, {0, 1})
