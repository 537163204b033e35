"""`placed`: parts of a model on several devices of a rank, alone and with ranks that are copies of each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ranks_devices
from ranks_devices import (
    HALF,
    Chain,
    Recurrent,
    Tokens,
    Toy,
    alone,
    gone_on,
    made,
    refusal,
    require_same_bits,
    steps_of,
    trained,
)
from samestep import launch
from samestep.config import Mesh, StrategyPart, settle
from samestep.data.transfer import beside_of
from samestep.errors import EXIT_INPUT, InputError
from samestep.parallel.kept import _groups
from samestep.parallel.placed import Placement, place
from system import here


def at(place: dict[str, int], devices: int | None = 2) -> StrategyPart:
    return StrategyPart(name="placed", devices=devices, place=place)


PARTS = {
    "Toy": at({"net1": 0, "net2": 1}),
    "Normed": at({"*": 0, "twice": 1, "[fl]*": 2}, devices=3),
    "Dropping": at({"*": 1, "last": 0}),
    "Chain": StrategyPart(name="placed", devices=3),
    "Recurrent": at({"lstm": 1, "last": 0}),
}


def placement_of(model: nn.Module, part: StrategyPart) -> Placement:
    with alone(part) as world:
        return place(model, world)


# --- the same bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", PARTS)
def test_it_has_the_bits_of_one_device(model: str) -> None:
    with alone() as world:
        expected = trained(world, model)
    with alone(PARTS[model]) as world:
        found = trained(world, model)
    require_same_bits(found, expected)
    assert found["strategy"] == "placed"


@pytest.mark.parametrize(
    "options", [{"batch_norm": "sync"}, {"precision": "bf16"}, {"reduction": "fast"}, {"recompute": ("twice", "last")}]
)
def test_under_other_rules_too(options: dict[str, Any]) -> None:
    with alone() as world:
        expected = trained(world, "Normed", **options)
    with alone(PARTS["Normed"]) as world:
        require_same_bits(trained(world, "Normed", **options), expected)


def test_on_four_ranks_it_has_the_bits_of_one_device(tmp_path: Path) -> None:
    with alone() as world:
        expected = trained(world, "Normed", tmp_path / "one")
    parts = {"placed": PARTS["Normed"], "ddp": StrategyPart()}
    found = launch(ranks_devices.placed_on_ranks, parts, "Normed", tmp_path, processes=4)
    for name, strategy in (("placed", "ddp x placed"), ("ddp", "ddp")):
        assert len(found[name]) == 4
        for of_rank in found[name]:
            require_same_bits(of_rank, expected)
            assert of_rank["strategy"] == strategy
    for saved, part in (("placed", None), ("one", PARTS["Normed"]), ("ddp", PARTS["Normed"])):
        with alone(part) as world:
            require_same_bits(gone_on(world, "Normed", tmp_path / saved), expected, HALF)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("model", ["Toy", "Chain"])
def test_on_any_number_of_ranks(model: str, ranks: int) -> None:
    with alone() as world:
        expected = trained(world, model)
    found = launch(ranks_devices.placed_on_ranks, {"placed": PARTS[model]}, model, None, processes=ranks)
    for of_rank in found["placed"]:
        require_same_bits(of_rank, expected)


# --- who is where ------------------------------------------------------------------------------------------


def test_the_model_of_the_tutorials() -> None:
    with alone(PARTS["Toy"]) as world:
        engine, batches = made(world, "Toy")
        placement = engine.placement
        assert placement is not None
        assert placement.numbers == {"net1": 0, "net2": 1}
        assert placement.picture() == "device 0 (cpu): net1\ndevice 1 (cpu): net2"
        placement.journal = []
        steps_of(engine, batches, 1)
        assert placement.journal == ["net1", "net2"] * 5  # shards
        assert list(engine.model.state_dict()) == list(Toy().state_dict())


def test_the_last_pattern_counts_and_holds_for_all_that_is_inside() -> None:
    model = nn.ModuleDict({"body": Chain(), "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    numbers = placement_of(model, at({"*": 0, "head": 1, "body.1.*": 2}, devices=3)).numbers
    assert "" not in numbers
    assert "body" not in numbers
    assert numbers["head"] == numbers["head.0"] == 1
    assert {numbers[f"body.{inner}"] for inner in (0, 2, 3, 4, 5)} == {0}
    assert {numbers[f"body.1.{inner}"] for inner in range(3)} == {2}
    over = placement_of(Toy(), at({"net1": 0, "net2": 1, "*": 1}))
    assert set(over.numbers.values()) == {1}
    assert over.picture() == "device 0 (cpu): nothing\ndevice 1 (cpu): the whole model"


def test_a_sequential_model_is_cut_where_the_largest_part_is_smallest() -> None:
    model = Chain()  # bytes: 264, 48 and 400 inside, 136, 36, times four
    numbers = placement_of(model, StrategyPart(name="placed", devices=2)).numbers
    assert numbers == {"0": 0, "1.0": 0, "1.1": 0, "1.2": 1, "2": 1, "3": 1, "4": 1, "5": 1}


def test_of_one_device_it_is_all_there() -> None:
    assert placement_of(nn.Linear(2, 2), at({"*": 0}, devices=1)).numbers == {"": 0}


class Moves(TorchFunctionMode):
    """Counts the tensors that are told to be somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


class Taking(nn.Module):
    """Takes tensors in every form that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, first: Any, pair: Any, *, named: Any, mode: str) -> Any:
        return first, pair, named, mode


def test_every_tensor_that_a_module_is_given_is_moved_and_nothing_else_changes() -> None:
    model = Taking()
    placement_of(model, at({"*": 1}))
    tensors = [torch.full((2,), float(number)) for number in range(4)]
    given = (tensors[0], (tensors[1], [tensors[2], 7]))
    with Moves() as moves:
        first, pair, named, mode = model(*given, named={"mask": tensors[3], "scale": 0.5}, mode="fast")
    assert {id(tensor) for tensor in moves.seen} == {id(tensor) for tensor in tensors}
    assert first is tensors[0]
    assert isinstance(pair, tuple)
    assert pair[1][1] == 7
    assert named["scale"] == 0.5
    assert mode == "fast"


def test_targets_go_where_outputs_are() -> None:
    there = torch.zeros(2, device="meta")
    pair = {"labels": torch.ones(2), "name": "x"}
    moved = beside_of(pair, [there])
    assert moved["labels"].device.type == "meta"
    assert moved["name"] == "x"
    assert beside_of(pair, torch.zeros(1)) is pair  # they are there already
    assert beside_of(pair, "nothing") is pair
    assert beside_of("nothing", there) == "nothing"


def test_gradients_are_sent_by_device() -> None:
    places = ("cpu", "cpu", "meta", "meta", "cpu")
    parameters = [nn.Parameter(torch.zeros(2, device=place)) for place in places]
    assert [[p.device.type for p in group] for group in _groups(parameters)] == [["cpu"] * 2, ["meta"] * 2, ["cpu"]]


# --- refusals ----------------------------------------------------------------------------------------------


def test_tied_weights_are_on_one_device() -> None:
    refused = refusal(at({"*": 0, "out": 1}), Tokens())
    assert "'embed' on device 0 and 'out' on device 1 share a tensor" in refused.value
    assert placement_of(Tokens(), at({"*": 0, "mix": 1})).numbers["out"] == 0


@pytest.mark.parametrize(
    ("part", "model", "said", "do"),
    [
        (at({"*": 0, "net3": 1}), Toy(), "'net3' matches no module", "names like net1, relu, net2"),
        (at({"*": 0, "net2": 2}), Toy(), "puts 'net2' on device 2, and there are 2", "set strategy.devices: 3"),
        (at({"*": -1}), Toy(), "on device -1", "count devices from 0"),
        (at({"net1": 0}), Toy(), "says nothing of net2", "begin strategy.place with '*': 0"),
        (at({"*": 0}, None), Toy(), "on a CPU without a number of devices", "set strategy.devices: 2"),
        (at({}), Toy(), "of a Toy without strategy.place", "{'net1*': 0, 'net2*': 1}"),
        (at({}), Recurrent(), "of a Recurrent without strategy.place", "{'lstm*': 0, 'last*': 1}"),
        (at({}), nn.Linear(2, 2), "of a Linear without strategy.place", "{'*': 0}"),
        (
            at({}, 3),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "3 devices for 2 modules",
            "devices: 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(part: StrategyPart, model: nn.Module, said: str, do: str) -> None:
    refused = refusal(part, model)
    assert said in refused.value
    assert do in str(refused.do)
    assert refused.rule


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_says_what_does_not_fit(processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("strategy.devices=2", "strategy.place={'*': 0, 'tail': 1}")
    chosen = ("--strategy", "placed", "--processes", processes, "--set", *place)
    assert here("train", "digits", *chosen, cwd=tmp_path) == EXIT_INPUT
    said = capsys.readouterr().err
    assert said.count("strategy.place: 'tail' matches no module") == 1


class OutOfOrder(nn.Sequential):
    """Computes in an order of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self[0](self[1](inputs))
        return outputs


def test_a_sequential_model_with_a_forward_of_its_own_says_nothing_of_its_order() -> None:
    model = OutOfOrder(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "of a OutOfOrder" in refusal(at({}), model).value


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(shard=2), Mesh(pipeline=2)])
def test_other_axes_are_refused(mesh: Mesh) -> None:
    with pytest.raises(InputError, match="strategy placed with a"):
        settle(StrategyPart(name="placed", devices=2, mesh=mesh), 2)


def test_places_of_another_strategy_are_refused() -> None:
    with pytest.raises(InputError, match=r"strategy\.place with strategy\.name ddp"):
        settle(StrategyPart(name="ddp", place={"*": 0}), 2)


# --- what only GPUs can run --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")
@pytest.mark.parametrize("model", ["Toy", "Dropping", "Chain"])
def test_on_two_gpus_it_has_the_bits_of_one(model: str) -> None:
    part = StrategyPart(name="placed", devices=2) if model == "Chain" else PARTS[model]
    found = []
    for strategy in (None, part):
        with alone(strategy, "cuda") as world:
            engine, batches = made(world, model)
            steps = steps_of(engine, batches, HALF)
            devices = {parameter.device.index for parameter in engine.model.parameters()}
            found.append((steps, [tensor.cpu() for tensor in engine.model.state_dict().values()], devices))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    assert (found[0][2], found[1][2]) == ({0}, {0, 1})
