"""`fsdp`: precisions, what is refused, and what a step does that is not finite."""

from typing import Any

import pytest
import torch
from torch import nn

import ranks_sharded
from samestep import launch
from samestep.errors import EXIT_INPUT
from samestep.parallel.sharded import units
from samestep.runtime.crew import RankError

RANKS = 4
# Of ten losses, relative to those of one process: rounding of sums, and of what 16 bits hold.
NEAR = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01, "gathered in bf16": 0.05}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    return launch(ranks_sharded.precisions, processes=RANKS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    return launch(ranks_sharded.refused, processes=3)  # type: ignore[no-any-return]


def test_precisions_are_near_those_of_one_process(outcomes: dict[str, dict[str, Any]]) -> None:
    alone = launch(ranks_sharded.alone, processes=1)
    for name, found in outcomes.items():
        expected = alone["bf16" if name == "gathered in bf16" else name]
        assert found["losses"] == pytest.approx(expected["losses"], rel=NEAR[name]), name
        assert found["losses"][-1] < found["losses"][0]


def test_all_ranks_hold_parts_of_the_same_weights(outcomes: dict[str, dict[str, Any]]) -> None:
    for name, found in outcomes.items():
        assert all(weights == found["weights"][0] for weights in found["weights"]), name


def test_the_scale_of_fp16_is_one_for_all(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["fp16"]["scale"] > 1
    assert outcomes["fp32"]["scale"] == 1
    assert launch(ranks_sharded.scales, processes=RANKS) == [[1.0] * RANKS, [0.5] * RANKS]


def test_a_rank_holds_its_part_and_computes_with_the_whole() -> None:
    assert launch(ranks_sharded.states, processes=RANKS) == [[True, True]] * RANKS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer", "the optimizer Adafactor with parameters that ranks divide among them|"),
        ("batch norm", "batch_norm: sync"),
        ("tied", "strategy.meta with a model that uses a parameter under two names|leave strategy.meta out"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank_alike(told: dict[str, list[str]], name: str, said: str) -> None:
    assert len(set(told[name])) == 1
    assert said in told[name][0]


def test_model_without_values_on_any_rank_is_refused() -> None:
    with pytest.raises(RankError, match="the model has no values on rank 0 either") as failed:
        launch(ranks_sharded.without_values, processes=2)
    assert failed.value.exit_code == EXIT_INPUT


def test_step_that_is_not_finite_ends_alike_on_every_rank(told: dict[str, list[str]]) -> None:
    assert told["skip"] == ["nothing"] * 3
    assert told["skip: steps"] == ["3"] * 3
    assert len(set(told["stop"])) == 1
    assert told["stop"][0].startswith("step 2: the loss of shard")
    assert told["stop: steps"] == ["1"] * 3


def test_units_are_blocks_and_what_is_shared_is_gathered_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)])
            self.head = nn.Linear(32, 50)
            self.blocks[2][0].weight = self.blocks[1][0].weight

    model = Shared()
    assert units(model) == [model.blocks[0]]
    plain = nn.Module()
    plain.first, plain.second = nn.Linear(64, 64), nn.Linear(64, 64)
    assert units(plain) == [plain.first, plain.second]
    assert units(nn.Linear(3, 3)) == []
    assert all(isinstance(p, torch.Tensor) for p in model.parameters())
