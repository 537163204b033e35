"""Conformance of strategies: `.grad` is the sum over microbatches on every rank; under `exact` with the same bits."""

from typing import Any

import pytest
import torch

from samestep import launch
from samestep.reduce.tree import MicrobatchTree
from workers import strategies as ranks_strategies
from workers.reductions import vector_of
from workers.strategies import MICROBATCHES, MODELS, SIZES

RANKS = [1, 2, 3, 4, 8]
TOLERANCE = {"wide float32": 2e-6, "wide float64": 1e-14, "mixed": 2e-6}
Outcomes = dict[int, list[dict[tuple[str, str, str], dict[str, Any]]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return {ranks: launch(ranks_strategies.steps, processes=ranks) for ranks in RANKS}


def results_of(outcomes: Outcomes, reduction: str, model: str) -> list[dict[str, Any]]:
    """Return the results of every rank of every world with every strategy."""
    return [
        outcome
        for ranks in RANKS
        for by_case in outcomes[ranks]
        for (case_reduction, case_model, _), outcome in by_case.items()
        if (case_reduction, case_model) == (reduction, model)
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_the_sum_is_that_of_the_complete_batch(outcomes: Outcomes, reduction: str, model: str) -> None:
    errors = [outcome["errors"] for outcome in results_of(outcomes, reduction, model) if outcome["errors"]]
    assert len(errors) == 2 * len(RANKS) + 1
    assert max(value for by_size in errors for value in by_size.values()) < TOLERANCE[model]


@pytest.mark.parametrize("model", MODELS)
def test_exact_gives_the_same_bits_for_every_strategy_and_number_of_ranks(outcomes: Outcomes, model: str) -> None:
    for size in SIZES:
        assert len({outcome["bits"][size] for outcome in results_of(outcomes, "exact", model)}) == 1, size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_all_ranks_of_a_world_have_the_same_bits(outcomes: Outcomes, reduction: str, model: str) -> None:
    for ranks in RANKS:
        for strategy in ("ddp", "deferred"):
            first, *others = [by_case[reduction, model, strategy]["bits"] for by_case in outcomes[ranks]]
            assert all(bits == first for bits in others)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_vectors_are_summed(outcomes: Outcomes, reduction: str) -> None:
    for size in SIZES:
        tree = MicrobatchTree(MICROBATCHES, size)
        leaves = {(s, s + 1): vector_of(s) for s in range(MICROBATCHES) if tree.has_samples((s, s + 1))}
        expected = tree.sum(leaves, lambda left, right: left + right)
        for data in {outcome["vectors"][size] for outcome in results_of(outcomes, reduction, "mixed")}:
            vector = torch.frombuffer(bytearray(data), dtype=torch.float64)
            torch.testing.assert_close(vector, expected, rtol=0 if reduction == "exact" else 1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_frozen_weights_have_no_gradient(outcomes: Outcomes, reduction: str) -> None:
    assert all(outcome["frozen"] == [True, True] for outcome in results_of(outcomes, reduction, "wide float32"))


@pytest.mark.parametrize(("ranks", "name"), [(1, "single"), (3, "ddp")])
def test_the_strategy_depends_on_the_world_size(ranks: int, name: str) -> None:
    assert launch(ranks_strategies.strategy_name, processes=ranks) == name


def test_names_of_strategies(outcomes: Outcomes) -> None:
    for ranks in RANKS:
        for (*_, name), outcome in outcomes[ranks][0].items():
            expected = {"deferred": "single" if ranks == 1 else "ddp"}.get(name, name)
            assert outcome["name"] == expected
