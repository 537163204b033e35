"""Statistics of a step, and values for logging, have the same bits on any number of ranks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.engine import step_stats as module
from samestep.engine.loss import Loss
from samestep.engine.step_stats import LocalStats, StepStats, StepValues, vector_length
from samestep.launcher.launch import launch
from samestep.reduce.tree import MicrobatchTree, Node
from workers import step_values

CPU = torch.device("cpu")

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)


def step_stats(losses: list[float], counts: list[float] | None = None) -> StepStats:
    return StepStats(losses, counts or [1.0] * len(losses), False, False, (0.0, 0.0), torch.empty(0))


def vectors(
    tree: MicrobatchTree, cover: tuple[Node, ...], losses: dict[int, Loss], **options: Any
) -> dict[Node, torch.Tensor]:
    stats = LocalStats()
    for number, loss in losses.items():
        stats.add(number, loss, None)
    return stats.vectors(tree, cover, CPU, **options)


Microbatches = list[tuple[float, int, bool, bool]]


@given(
    st.lists(st.tuples(numbers, st.integers(0, 2**50), st.booleans(), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_sum_of_vectors_contains_the_values_of_all_microbatches(microbatches: Microbatches, size: int) -> None:
    V = len(microbatches)
    tree, size = MicrobatchTree(V, V), min(size, V)
    rows: list[torch.Tensor] = []
    requests = []
    for rank in range(size):
        cover = tree.cover(rank, size)
        own = range(cover[0][0], cover[-1][1])
        losses = {s: Loss(torch.tensor(microbatches[s][0], dtype=torch.float64), microbatches[s][1]) for s in own}
        requests.append(microbatches[own[-1]][2:])
        by_node = vectors(tree, cover, losses, requests=requests[-1], step_hash=rank + 1)
        assert tuple(by_node) == cover
        rows += by_node.values()
    stats = StepStats.from_vector(V, torch.stack(rows).sum(0))
    assert stats.losses == [loss for loss, _, _, _ in microbatches]
    assert stats.counts == [count for _, count, _, _ in microbatches]
    assert (stats.stop, stats.save) == tuple(map(any, zip(*requests, strict=True)))
    assert stats.hashes == (sum(range(1, size + 1)), sum(number**2 for number in range(1, size + 1)))
    assert len(stats.buffers) == 0


@pytest.mark.parametrize("in_order", [True, False])
def test_buffers_are_summed(in_order: bool) -> None:
    tree, stats = MicrobatchTree(3, 3), LocalStats()
    for s in range(3):
        stats.add(s, Loss(torch.tensor(float(s)), 1), torch.tensor([1.0, 2.0], dtype=torch.float64) * s)
    by_node = stats.vectors(tree, ((0, 3),), CPU, 2, in_order=in_order)
    assert list(by_node) == ([(0, 1), (1, 2), (2, 3)] if in_order else [(0, 3)])
    assert {len(vector) for vector in by_node.values()} == {vector_length(3, 2)}
    total = StepStats.from_vector(3, torch.stack(list(by_node.values())).sum(0))
    assert (total.buffers.tolist(), total.losses) == ([3.0, 6.0], [0.0, 1.0, 2.0])


def test_counts_may_be_tensors_and_losses_of_any_precision() -> None:
    losses = {0: Loss(torch.tensor(1 / 3, dtype=torch.float32), torch.tensor(5)), 1: Loss(torch.tensor([2.0]), 3)}
    stats = StepStats.from_vector(2, vectors(MicrobatchTree(2, 2), ((0, 2),), losses)[0, 2])
    assert stats.losses == [float(torch.tensor(1 / 3, dtype=torch.float32)), 2.0]
    assert stats.counts == [5.0, 3.0]


def test_microbatches_without_samples_have_loss_and_count_zero() -> None:
    losses = {number: Loss(torch.tensor(1.5), 2) for number in (2, 5, 7)}
    stats = StepStats.from_vector(8, vectors(MicrobatchTree(8, 3), ((0, 8),), losses)[0, 8])
    assert stats.losses == [0, 0, 1.5, 0, 0, 1.5, 0, 1.5]
    assert stats.counts == [0, 0, 2, 0, 0, 2, 0, 2]


def test_a_rank_without_microbatches_has_no_vector() -> None:
    assert vectors(MicrobatchTree(8, 1), (), {}, requests=(True, False)) == {}


def test_loss_is_the_sum_divided_by_the_count() -> None:
    assert step_stats([10.0, 2.0], [1, 5]).loss == 2.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.randoms())
def test_loss_does_not_depend_on_the_order_of_microbatches(losses: list[float], shuffle: object) -> None:
    before = step_stats(losses).loss
    shuffle.shuffle(losses)  # type: ignore[attr-defined]
    assert step_stats(losses).loss == before


def test_loss_is_zero_if_nothing_is_counted() -> None:
    assert step_stats([0.0, 0.0], [0, 0]).loss == 0.0


def test_bad_microbatches_have_a_non_finite_loss() -> None:
    assert step_stats([1.0, math.nan, -math.inf, 0.0, math.inf]).bad_microbatches == [1, 2, 4]
    assert step_stats([1.0, -1.0]).bad_microbatches == []


@pytest.mark.parametrize("losses", [[math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf], [math.nan, math.inf]])
def test_non_finite_losses_have_a_non_finite_mean(losses: list[float]) -> None:
    assert not math.isfinite(step_stats(losses).loss)


def test_overflowing_sum_of_finite_losses_is_large() -> None:
    assert step_stats([1.7e308, 1.7e308]).loss > 1e307


World = samestep.World
RANKS = [1, 3, 4]


@pytest.fixture(scope="module")
def results() -> dict[int, Any]:
    return {ranks: launch(step_values.run_on_all, processes=ranks) for ranks in RANKS}


@pytest.mark.parametrize("case", step_values.CASES)
def test_values_have_the_same_bits_on_any_number_of_ranks(results: dict[int, Any], case: str) -> None:
    (first, _), *others = (results[ranks][rank][case] for ranks in RANKS for rank in range(ranks))
    assert all(values == first for values, _ in others)


@pytest.mark.parametrize("case", step_values.CASES)
def test_values_with_known_names_need_no_further_message(results: dict[int, Any], case: str) -> None:
    _, expected = step_values.CASES[case]
    assert [results[ranks][rank][case][1] for ranks in RANKS for rank in range(ranks)] == [expected] * sum(RANKS)


def test_values_are_means_over_the_samples_that_have_them(results: dict[int, Any]) -> None:
    cases = {case: values for case, (values, _) in results[4][3].items()}
    assert all(names == {} for names in cases["none"])
    assert [sorted(names) for names in cases["equal names"]] == [["a", "b", "least"]] * 4
    assert {(float.fromhex(names["a"]), names["least"]) for names in cases["equal names"]} == {(2.5, (0.0).hex())}
    assert all(math.isnan(float.fromhex(names["a"])) for names in cases["not finite"])
    assert all(float.fromhex(names["b"]) == -math.inf for names in cases["not finite"])
    assert [list(names) for names in cases["another name"]] == [["a"], ["a"], ["b"], ["b"]]
    assert [list(names) for names in cases["none later"]] == [["a"], ["a"], [], []]
    assert [float.fromhex(names["a"]) for names in cases["one microbatch"]] == [1.0] * 4
    means = [float.fromhex(names["b"]) for names in cases["equal names"]]
    assert [2 * float.fromhex(names["a"]) for names in cases["a sum and a count"]] == pytest.approx(means)


def test_a_microbatch_without_usable_samples_adds_no_values() -> None:
    expected, *_ = launch(step_values.with_unusable_microbatch, processes=1)
    for values in expected:
        assert values["same"] == values["loss"]
        assert values["mean"] == pytest.approx(values["loss"])
    assert launch(step_values.with_unusable_microbatch, processes=3) == 3 * [expected]


def test_numbers_on_a_device_may_have_different_types(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "value_on_host", lambda tensor: None)  # as for a GPU
    tree, values = MicrobatchTree(2, 2), StepValues()
    for is_planned in (False, True):
        values.begin_step([0, 1])
        for number in range(2):
            values.add(
                number, ("value", "a"), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(2**24 + number + 1)
            )
        assert values.is_planned == is_planned
        (vector,) = LocalStats().vectors(tree, ((0, 2),), alone.device, values=values).values()
        stats = StepStats.from_vector(2, vector, values_length=values.length(2))
        assert stats.are_values_planned == is_planned
        values.read(stats.values, [0, 1], alone, is_planned=is_planned)
        assert [row[2:] for row in values.rows] == [(0.5, 2**24 + 1), (0.5, 2**24 + 2)]
