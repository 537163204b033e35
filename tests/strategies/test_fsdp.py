"""FSDP: precisions, errors, non-finite steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.simulated_accelerator import simulated_accelerator
from samestep import launch
from samestep.config import MeshConfig, Precision, StrategyConfig
from samestep.distributed.world import World
from samestep.errors import EXIT_INPUT
from samestep.launcher.failure import RankError
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.fsdp import TreeReduceScatter, _Backward, _move_buffers, shard_units
from workers import fsdp as ranks_fsdp

RANKS = 4
FSDP = StrategyConfig(name="fsdp")
# Tolerances of losses relative to one process: rounding of sums and of 16-bit numbers.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01, "gathered in bf16": 0.05}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    return launch(ranks_fsdp.precisions, processes=RANKS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return launch(ranks_fsdp.errors, processes=3)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_losses_are_close_to_those_of_one_process(outcomes: dict[str, dict[str, Any]]) -> None:
    single = launch(ranks_fsdp.single_process, processes=1)
    for name, result in outcomes.items():
        expected = single["bf16" if name == "gathered in bf16" else name]
        assert result["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[name]), name
        assert result["losses"][-1] < result["losses"][0]


HSDP = StrategyConfig(name="hsdp", mesh=MeshConfig(shard=2))
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of one process by precision."""
    cases = {precision: (None, precision) for precision in PRECISIONS}
    return launch(ranks_fsdp.digests, str(tmp_path_factory.mktemp("one")), cases, processes=1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (4, (FSDP, HSDP)),
        pytest.param(2, (FSDP,), marks=pytest.mark.slow),
        pytest.param(3, (FSDP,), marks=pytest.mark.slow),
        pytest.param(5, (FSDP,), marks=pytest.mark.long),
        pytest.param(6, (FSDP, HSDP), marks=pytest.mark.long),
    ],
)
def test_exact_sums_have_the_bits_of_one_process(
    expected: dict[str, str], tmp_path: Path, processes: int, layouts: tuple[StrategyConfig, ...]
) -> None:
    cases = {f"{layout.name} {precision}": (layout, precision) for layout in layouts for precision in PRECISIONS}
    digests = launch(ranks_fsdp.digests, str(tmp_path), cases, processes=processes)
    assert digests == {name: expected[precision] for name, (_, precision) in cases.items()}


@pytest.mark.slow
def test_exact_runs_have_the_same_bits_if_the_layout_changes(tmp_path: Path) -> None:
    def train(processes: int, layout: StrategyConfig | None, name: str, epochs: int, begin: str = "") -> str:
        cases = {name: (layout, "fp32")}
        digests: dict[str, str] = launch(ranks_fsdp.digests, str(tmp_path), cases, epochs, begin, processes=processes)
        return digests[name]

    train(3, FSDP, "first", 1)
    train(4, HSDP, "second", 2, "first")
    assert train(2, None, "third", 3, "second") == train(1, None, "undisturbed", 3)


def test_full_weights_are_equal_on_all_ranks(outcomes: dict[str, dict[str, Any]]) -> None:
    for name, result in outcomes.items():
        assert all(weights == result["weights"][0] for weights in result["weights"]), name


def test_the_fp16_scale_is_equal_on_all_ranks(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["fp16"]["scale"] > 1
    assert outcomes["fp32"]["scale"] == 1
    assert launch(ranks_fsdp.scales, processes=RANKS) == [[1.0] * RANKS, [0.5] * RANKS]


def test_a_rank_stores_a_shard_and_computes_with_full_parameters() -> None:
    assert launch(ranks_fsdp.shard_sizes, processes=RANKS) == [[True, True]] * RANKS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimizer", "the optimizer Adafactor with parameters that are divided among ranks|"),
        ("batch norm", "batch_norm: sync"),
        ("channels last", "the parameter 0.weight of the shape (8, 3, 3, 3)|"),
        ("scalar", "the mesh fsdp with the parameter scale of the shape ()|"),
        ("tied", "strategy.meta with a model that uses a parameter under two names|remove strategy.meta"),
    ],
)
def test_errors_are_equal_on_every_rank(errors: dict[str, list[str]], name: str, text: str) -> None:
    assert len(set(errors[name])) == 1
    assert text in errors[name][0]


def test_a_model_without_values_on_rank_0_is_an_error() -> None:
    with pytest.raises(RankError, match=r"the model has no values on rank 0 \[E_META\]") as error:
        launch(ranks_fsdp.without_values, processes=2)
    assert error.value.exit_code == EXIT_INPUT


def test_a_unit_that_a_microbatch_leaves_out_is_an_error() -> None:
    with pytest.raises(RankError, match=r"\[E_UNUSED_PARAMETER\]"):
        launch(ranks_fsdp.skipped_unit, processes=2)


def test_a_step_leaves_the_model_of_another_engine_unchanged() -> None:
    (expected,) = launch(ranks_fsdp.generator_and_critic, processes=1)
    assert launch(ranks_fsdp.generator_and_critic, processes=2) == [expected] * 2


def test_a_non_finite_step_ends_the_same_way_on_every_rank(errors: dict[str, list[str]]) -> None:
    assert errors["skip"] == ["no error"] * 3
    assert errors["skip: steps"] == ["3"] * 3
    assert len(set(errors["stop"])) == 1
    assert errors["stop"][0].startswith("step 2: the loss of microbatch")
    assert errors["stop: steps"] == ["1"] * 3


def test_units_are_blocks_without_shared_parameters() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)])
            self.head = nn.Linear(32, 50)
            self.blocks[2][0].weight = self.blocks[1][0].weight

    model = Shared()
    assert shard_units(model) == [model.blocks[0]]
    plain = nn.Module()
    plain.first, plain.second = nn.Linear(64, 64), nn.Linear(64, 64)
    assert shard_units(plain) == [plain.first, plain.second]
    assert shard_units(nn.Linear(3, 3)) == []
    assert all(isinstance(p, torch.Tensor) for p in model.parameters())


def test_sums_on_another_stream_keep_their_memory() -> None:
    """FSDP frees the gradients of a unit for the stream of the backward, while earlier ones are added on its own."""
    world, tree = World(0, 1, torch.device("cpu")), MicrobatchTree(4, 8)
    unit = TreeReduceScatter(world, world, None)
    with simulated_accelerator() as accelerator:
        gradients = [accelerator.copy(torch.ones(6)) for _ in range(2)]
        stream = accelerator.Stream(world.device)
        for microbatch, gradient in enumerate(gradients):
            unit.backward = _Backward(tree, (microbatch, microbatch + 1), last=False)
            with accelerator.stream(stream):
                unit(torch.empty(6), gradient, None, None)  # type: ignore[arg-type]
    assert [gradient.streams for gradient in gradients] == [(stream,), (stream,)]


def test_buffers_are_on_the_device_that_computes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    _move_buffers(model, torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
