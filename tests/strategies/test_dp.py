"""`dp`: concurrent microbatches in threads of one process give the bits of sequential ones."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from helpers import models
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Fragile, Perceptron, seeded
from samestep.config import MeshConfig, StepConfig, StrategyConfig, resolve_mesh
from samestep.engine.engine import Engine
from samestep.errors import InputError, NonFiniteError, UnusedParameterError
from workers.devices import HALF, MODELS, build, engine_error, require_same_bits, resume, single_process, train
from workers.step import bad_gradient, bad_loss

RANDOM = {"Dropping", "ByPython", "ByNumpy", "DrawingLate", "Chain"}
DEVICES = [1, 2, 5]


def dp(devices: int | None = 2) -> StrategyConfig:
    return StrategyConfig(name="dp", devices=devices)


def run(strategy: StrategyConfig | None, model: str, **options: Any) -> dict[str, Any]:
    with single_process(strategy) as world:
        return train(world, model, **options)


@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_of_one_device(model: str) -> None:
    expected = run(None, model)
    for devices in DEVICES:
        result = run(dp(devices), model)
        require_same_bits(result, expected)
        assert result["strategy"] == "dp"
        assert result["sequential"] is (model in RANDOM)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["Normed", "Tokens"])
def test_casts_of_shared_weights_are_those_of_one_device(model: str, precision: str) -> None:
    expected = run(None, model, precision=precision)
    for devices in DEVICES:
        require_same_bits(run(dp(devices), model, precision=precision), expected)


@settings(max_examples=40)
@given(size=st.integers(1, 23), microbatches=st.integers(1, 9), devices=st.integers(1, 9))
def test_any_sizes(size: int, microbatches: int, devices: int) -> None:
    results = []
    for config in (None, dp(min(devices, microbatches))):
        with single_process(config) as world:
            engine = engine_of(world, seeded(0, Perceptron), clip_norm=0.1)
            batch = random_batch(world, size, microbatches)
            results.append(([engine.step(batch) for _ in range(2)], list(engine.model.state_dict().values())))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_a_loss_of_several_terms() -> None:
    def half(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return samestep.cross_entropy(outputs, targets).sum

    terms = [samestep.LossTerm("own", half, "samples"), samestep.LossTerm("other", half, "samples", weight=0.3)]
    results = []
    for config in (None, dp(3)):
        with single_process(config) as world:
            model = seeded(0, Perceptron)
            engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.MultiLoss(terms), world=world)
            results.append([engine.step(random_batch(world, 19, 8)) for _ in range(3)])
    assert results[0] == results[1]


class Barrier(nn.Module):
    """Layer that waits for a second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.barrier = nn.Linear(6, 4), threading.Barrier(2, timeout=20)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.barrier.wait()
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def test_two_microbatches_are_computed_concurrently() -> None:
    with single_process(dp()) as world:
        engine = engine_of(world, Barrier().double())
        assert engine.step(random_batch(world, 8, 4)).step == 1


def engine_of(world: samestep.World, model: nn.Module, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(**options))


def test_random_models_are_detected_before_any_change() -> None:
    results = []
    for config in (None, dp()):
        with single_process(config) as world:
            engine, batches = build(world, "Dropping")
            batch, before = next(iter(batches)), torch.get_rng_state()
            results.append([str(engine.step(batch)), *engine.model.state_dict().values()])
            assert torch.equal(torch.get_rng_state(), before)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1:], results[1][1:], strict=True))


def test_checkpoints_are_interchangeable_with_one_device(tmp_path: Path) -> None:
    results = {}
    for name, config in (("one", None), ("dp", dp())):
        with single_process(config) as world:
            results[name] = train(world, "Normed", tmp_path / name)
    assert not any("module." in name for name in results["dp"]["state"])
    for saved, config in (("dp", None), ("one", dp()), ("dp", dp(3))):
        with single_process(config) as world:
            require_same_bits(resume(world, "Normed", tmp_path / saved), results["one"], HALF)


@pytest.mark.parametrize(("kind", "bad"), [("Normed", bad_loss), ("Root", bad_gradient)])
def test_non_finite_errors_are_those_of_one_device(kind: str, bad: Any) -> None:
    texts, states = [], []
    for config in (None, dp(3)):
        with single_process(config) as world:
            model = seeded(0, getattr(models, kind))
            engine = engine_of(world, model)
            engine.step(random_batch(world, 19, 8))
            with pytest.raises(NonFiniteError) as error:
                engine.step(bad(world))
            texts.append(str(error.value))
            states.append([tensor.clone() for tensor in model.state_dict().values()])
    assert texts[0] == texts[1]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


class Failing(Fragile):
    """Fragile model without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self[3] = nn.Identity()


def test_a_failed_microbatch_does_not_change_the_model_or_later_steps() -> None:
    states = []
    for config in (None, dp()):
        with single_process(config) as world:
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


def test_unused_parameters_are_named() -> None:
    with single_process(dp()) as world:
        model = seeded(0, MODELS["Toy"])
        model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
        with pytest.raises(UnusedParameterError, match="idle"):
            engine_of(world, model).step(random_batch(world, 8, 4, features=10))


def test_more_devices_than_microbatches_are_an_error() -> None:
    with pytest.raises(InputError, match="9 devices but the recipe has 8 microbatches"):
        resolve_mesh(dp(9), 1, microbatches=8)
    with single_process(dp(5)) as world, pytest.raises(InputError, match="5 devices but the recipe has 4 microbatches"):
        engine_of(world, seeded(0, MODELS["Toy"])).step(random_batch(world, 8, 4, features=10))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"batch_norm": "sync"}, "batch_norm: sync"),
        ({"compile": True}, "compile"),
        ({"recompute": ("1",)}, "recompute"),
    ],
)
def test_unsupported_options_are_errors(options: dict[str, Any], value: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    error = engine_error(dp(), model, StepConfig(**options))
    assert value in error.value
    assert "--strategy ddp" in str(error.fix)


def test_parameter_hooks_are_an_error() -> None:
    with single_process(dp()) as world:
        model = seeded(0, MODELS["Toy"])
        model.net1.bias.register_hook(lambda slope: None)
        with pytest.raises(InputError, match=r"the parameter 'net1\.bias' has hooks"):
            engine_of(world, model).step(random_batch(world, 8, 4, features=10))


class Hiding(nn.Module):
    """Module with a reference to its layer in a list, which a replica shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.hidden = [self.layer]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](inputs)


def test_a_replica_that_uses_the_original_parameters_is_an_error() -> None:
    with single_process(dp()) as world, pytest.raises(InputError, match="used the model's own parameters"):
        engine_of(world, Hiding().double()).step(random_batch(world, 8, 4))


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(replicate=2)])
def test_dp_needs_one_process(mesh: MeshConfig) -> None:
    with pytest.raises(InputError) as error:
        resolve_mesh(StrategyConfig(name="dp", mesh=mesh, devices=2), 2)
    assert error.value.code == "E_MESH"


# --- comparison with nn.DataParallel ---------------------------------------------------------------------------


def test_the_example_shows_the_mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import dp_mean_of_means

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    results = dp_mean_of_means.both()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # (0.50 + 0.60 + 0.76) / 3 = 0.62 and 0.24; their mean is 0.43. All four: 2.10 / 4 = 0.525.
    wrong, right = results.values()
    assert wrong == pytest.approx((0.43, 0.43), abs=1e-12)
    assert right == pytest.approx((0.525, 0.525), abs=1e-12)


# --- GPUs --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("model", ["Normed", "Dropping", "Recurrent"])
def test_gpus_give_the_bits_of_one_gpu(model: str) -> None:
    results = []
    for config in (None, dp(None)):
        with single_process(config, "cuda") as world:
            results.append(train(world, model))
    require_same_bits(results[1], results[0])
    assert results[1]["sequential"] is False  # each GPU has a separate generator
