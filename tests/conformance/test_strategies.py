"""Every strategy leaves the sum over shards in `.grad` on every rank; under `exact` with the same bits everywhere."""

from typing import Any

import pytest
import torch

import ranks_strategies
from ranks_reductions import vector_of
from ranks_strategies import MODELS, SHARDS, SIZES
from samestep import launch
from samestep.parallel.tree import ShardTree

RANKS = [1, 2, 3, 4, 8]
TOLERANCE = {"wide float32": 2e-6, "wide float64": 1e-14, "mixed": 2e-6}
Outcomes = dict[int, list[dict[tuple[str, str, str], dict[str, Any]]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return {ranks: launch(ranks_strategies.steps, processes=ranks) for ranks in RANKS}


def of(outcomes: Outcomes, reduction: str, model: str) -> list[dict[str, Any]]:
    """What every rank of every world found with every strategy."""
    return [
        outcome
        for ranks in RANKS
        for found in outcomes[ranks]
        for (chosen, called, _), outcome in found.items()
        if (chosen, called) == (reduction, model)
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_the_sum_is_that_of_the_whole_batch(outcomes: Outcomes, reduction: str, model: str) -> None:
    errors = [outcome["errors"] for outcome in of(outcomes, reduction, model) if outcome["errors"]]
    assert len(errors) == 2 * len(RANKS) + 1
    assert max(value for by_size in errors for value in by_size.values()) < TOLERANCE[model]


@pytest.mark.parametrize("model", MODELS)
def test_exact_has_the_same_bits_with_every_strategy_and_number_of_ranks(outcomes: Outcomes, model: str) -> None:
    for size in SIZES:
        assert len({outcome["bits"][size] for outcome in of(outcomes, "exact", model)}) == 1, size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_all_ranks_of_a_world_have_the_same_bits(outcomes: Outcomes, reduction: str, model: str) -> None:
    for ranks in RANKS:
        for strategy in ("ddp", "together"):
            first, *others = [found[reduction, model, strategy]["bits"] for found in outcomes[ranks]]
            assert all(bits == first for bits in others)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_vectors_travel_with_the_gradients(outcomes: Outcomes, reduction: str) -> None:
    for size in SIZES:
        tree = ShardTree(SHARDS, size)
        leaves = {(s, s + 1): vector_of(s) for s in range(SHARDS) if tree.has_samples((s, s + 1))}
        expected = tree.fold((0, SHARDS), leaves, lambda left, right: left + right)
        assert expected is not None
        for found in {outcome["vectors"][size] for outcome in of(outcomes, reduction, "mixed")}:
            vector = torch.frombuffer(bytearray(found), dtype=torch.float64)
            torch.testing.assert_close(vector, expected, rtol=0 if reduction == "exact" else 1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_frozen_weights_get_no_gradient(outcomes: Outcomes, reduction: str) -> None:
    assert all(outcome["frozen"] == [True, True] for outcome in of(outcomes, reduction, "wide float32"))


@pytest.mark.parametrize(("ranks", "name"), [(1, "single"), (3, "ddp")])
def test_a_world_gets_the_strategy_for_its_size(ranks: int, name: str) -> None:
    assert launch(ranks_strategies.chosen, processes=ranks) == name


def test_strategies_say_who_they_are(outcomes: Outcomes) -> None:
    for ranks in RANKS:
        for (*_, name), outcome in outcomes[ranks][0].items():
            expected = {"together": "single" if ranks == 1 else "ddp"}.get(name, name)
            assert outcome["name"] == expected
