"""`dp`: shards at the same time, by threads of one process, with the bits of one after another."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import samestep
from batches import batch_of, random_batch, random_data
from models import Fragile, Perceptron, seeded
from ranks_devices import HALF, MODELS, alone, gone_on, made, refusal, require_same_bits, trained
from ranks_step import bad_gradient, bad_loss
from samestep.config import Mesh, StepRules, StrategyPart, settle
from samestep.engine.step import Engine
from samestep.errors import InputError, NonFiniteError, UnusedParameterError

DRAWS = {"Dropping", "ByPython", "ByNumpy", "DrawingLate", "Chain"}
DEVICES = [1, 2, 5]


def dp(devices: int | None = 2) -> StrategyPart:
    return StrategyPart(name="dp", devices=devices)


def run(strategy: StrategyPart | None, model: str, **options: Any) -> dict[str, Any]:
    with alone(strategy) as world:
        return trained(world, model, **options)


@pytest.mark.parametrize("model", MODELS)
def test_it_has_the_bits_of_one_device(model: str) -> None:
    expected = run(None, model)
    for devices in DEVICES:
        found = run(dp(devices), model)
        require_same_bits(found, expected)
        assert found["strategy"] == "dp"
        assert found["turns"] is (model in DRAWS)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["Normed", "Tokens"])
def test_of_weights_that_are_used_twice_the_casts_are_shared_as_on_one_device(model: str, precision: str) -> None:
    expected = run(None, model, precision=precision)
    for devices in DEVICES:
        require_same_bits(run(dp(devices), model, precision=precision), expected)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_in_float64_and_without_clipping(reduction: str) -> None:
    options = {"dtype": torch.float64, "reduction": reduction, "clip_norm": None}
    require_same_bits(run(dp(3), "Normed", **options), run(None, "Normed", **options))


@given(size=st.integers(1, 23), shards=st.integers(1, 9), devices=st.integers(1, 9))
def test_whatever_the_sizes(size: int, shards: int, devices: int) -> None:
    found = []
    for part in (None, dp(min(devices, shards))):
        with alone(part) as world:
            engine = engine_of(world, seeded(0, Perceptron), clip_norm=0.1)
            batch = random_batch(world, size, shards)
            found.append(([engine.step(batch) for _ in range(2)], list(engine.model.state_dict().values())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_a_loss_of_several_parts() -> None:
    def half(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return samestep.cross_entropy(outputs, targets).sum

    parts = [samestep.LossPart("own", half, "samples"), samestep.LossPart("other", half, "samples", weight=0.3)]
    found = []
    for part in (None, dp(3)):
        with alone(part) as world:
            model = seeded(0, Perceptron)
            engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.MultiLoss(parts), world=world)
            found.append([engine.step(random_batch(world, 19, 8)) for _ in range(3)])
    assert found[0] == found[1]


class Meeting(nn.Module):
    """Goes on when two forwards have come this far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.barrier = nn.Linear(6, 4), threading.Barrier(2, timeout=20)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.barrier.wait()
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def test_two_shards_are_computed_at_the_same_time() -> None:
    with alone(dp()) as world:
        engine = engine_of(world, Meeting().double())
        assert engine.step(random_batch(world, 8, 4)).step == 1


def engine_of(world: samestep.World, model: nn.Module, **rules: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(**rules))


def test_that_a_model_draws_is_seen_before_anything_has_changed() -> None:
    found = []
    for part in (None, dp()):
        with alone(part) as world:
            engine, batches = made(world, "Dropping")
            batch, before = next(iter(batches)), torch.get_rng_state()
            found.append([str(engine.step(batch)), *engine.model.state_dict().values()])
            assert torch.equal(torch.get_rng_state(), before)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))


def test_names_are_the_models_and_a_checkpoint_goes_either_way(tmp_path: Path) -> None:
    found = {}
    for name, part in (("one", None), ("dp", dp())):
        with alone(part) as world:
            found[name] = trained(world, "Normed", tmp_path / name)
    assert not any("module." in name for name in found["dp"]["state"])
    for saved, part in (("dp", None), ("one", dp()), ("dp", dp(3))):
        with alone(part) as world:
            require_same_bits(gone_on(world, "Normed", tmp_path / saved), found["one"], HALF)


@pytest.mark.parametrize(("kind", "bad"), [("Normed", bad_loss), ("Root", bad_gradient)])
def test_what_is_not_finite_is_told_as_on_one_device(kind: str, bad: Any) -> None:
    said, states = [], []
    for part in (None, dp(3)):
        with alone(part) as world:
            model = seeded(0, getattr(__import__("models"), kind))
            engine = engine_of(world, model)
            engine.step(random_batch(world, 19, 8))
            with pytest.raises(NonFiniteError) as raised:
                engine.step(bad(world))
            said.append(str(raised.value))
            states.append([tensor.clone() for tensor in model.state_dict().values()])
    assert said[0] == said[1]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


class Failing(Fragile):
    """As the base, without anything random."""

    def __init__(self) -> None:
        super().__init__()
        self[3] = nn.Identity()


def test_a_shard_that_fails_leaves_the_model_as_it_was_and_the_next_step_is_right() -> None:
    states = []
    for part in (None, dp()):
        with alone(part) as world:
            model = seeded(0, Failing)
            engine = engine_of(world, model)
            good = random_batch(world, 16, 4)
            engine.step(good)
            inputs, targets = random_data(16)
            inputs[5] = 2000
            before = [tensor.clone() for tensor in model.state_dict().values()]
            with pytest.raises(ArithmeticError, match="too large"):
                engine.step(batch_of(world, inputs, targets, 4))
            assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
            engine.step(good)
            states.append([tensor.clone() for tensor in model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_parameter_that_no_shard_uses_is_named() -> None:
    with alone(dp()) as world:
        model = seeded(0, MODELS["Toy"])
        model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
        with pytest.raises(UnusedParameterError, match="idle"):
            engine_of(world, model).step(random_batch(world, 8, 4, features=10))


def test_devices_of_a_cpu_must_be_counted() -> None:
    refused = refusal(dp(None), nn.Linear(6, 4))
    assert "without a number of devices" in refused.value
    assert refused.do == "set strategy.devices: 2"


def test_more_devices_than_shards_are_refused() -> None:
    with pytest.raises(InputError, match="9 devices but the recipe has 8 shards"):
        settle(dp(9), 1, shards=8)
    with alone(dp(5)) as world, pytest.raises(InputError, match="5 devices but the recipe has 4 shards"):
        engine_of(world, seeded(0, MODELS["Toy"])).step(random_batch(world, 8, 4, features=10))


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({"batch_norm": "sync"}, "batch_norm: sync"),
        ({"compile": True}, "compile"),
        ({"recompute": ("1",)}, "recompute"),
    ],
)
def test_what_copies_cannot_do_is_refused(rules: dict[str, Any], what: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    refused = refusal(dp(), model, StepRules(**rules))
    assert what in refused.value
    assert "--strategy ddp" in str(refused.do)


def test_hooks_of_parameters_are_refused() -> None:
    with alone(dp()) as world:
        model = seeded(0, MODELS["Toy"])
        model.net1.bias.register_hook(lambda slope: None)
        with pytest.raises(InputError, match=r"the parameter 'net1\.bias' has hooks"):
            engine_of(world, model).step(random_batch(world, 8, 4, features=10))


class Hiding(nn.Module):
    """Reaches its layer by a list, in which a copy still finds the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.hidden = [self.layer]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](inputs)


def test_a_model_that_copies_cannot_reach_is_noticed() -> None:
    with alone(dp()) as world, pytest.raises(InputError, match="reached the model's own parameters"):
        engine_of(world, Hiding().double()).step(random_batch(world, 8, 4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(replicate=2)])
def test_it_is_one_process(mesh: Mesh) -> None:
    with pytest.raises(InputError, match="dp"):
        settle(StrategyPart(name="dp", mesh=mesh, devices=2), 2)


def test_devices_of_another_strategy_are_refused() -> None:
    with pytest.raises(InputError, match=r"strategy\.devices with strategy\.name ddp"):
        settle(StrategyPart(name="ddp", devices=2), 2)


# --- the trap of nn.DataParallel ---------------------------------------------------------------------------


def test_a_mean_of_means_is_another_number_and_ours_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import dp_mean_of_means

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    found = dp_mean_of_means.both()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # (0.50 + 0.60 + 0.76) / 3 = 0.62 and 0.24; their mean is 0.43. All four: 2.10 / 4 = 0.525.
    wrong, right = found.values()
    assert wrong == pytest.approx((0.43, 0.43), abs=1e-12)
    assert right == pytest.approx((0.525, 0.525), abs=1e-12)


def test_data_parallel_divides_ten_samples_among_four_devices_so() -> None:
    assert [len(part) for part in torch.arange(10).chunk(4)] == [3, 3, 3, 1]


# --- what only GPUs can run --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("model", ["Normed", "Dropping", "Recurrent"])
def test_on_gpus_it_has_the_bits_of_one_gpu(model: str) -> None:
    found = []
    for part in (None, dp(None)):
        with alone(part, "cuda") as world:
            found.append(trained(world, model))
    require_same_bits(found[1], found[0])
    assert found[1]["turns"] is False  # each GPU has a generator of its own
