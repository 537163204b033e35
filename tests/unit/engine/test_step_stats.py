"""Statistics of a step: the vector of each microbatch and the sum over microbatches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepStats, stats_vector, vector_length

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)


def step_stats(losses: list[float], counts: list[float] | None = None) -> StepStats:
    return StepStats(losses, counts or [1.0] * len(losses), False, False, (0.0, 0.0), torch.empty(0))


def vector(
    microbatches: int, microbatch: int, loss: torch.Tensor, count: object, buffers: torch.Tensor
) -> torch.Tensor:
    return stats_vector(microbatches, microbatch, Loss(loss, count), buffers)  # type: ignore[arg-type]


@given(st.lists(st.tuples(numbers, st.integers(0, 2**50), st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_sum_of_vectors_contains_the_values_of_all_microbatches(
    microbatches: list[tuple[float, int, bool, bool]],
) -> None:
    V, none = len(microbatches), torch.empty(0, dtype=torch.float64)
    vectors = [
        stats_vector(V, s, Loss(torch.tensor(loss, dtype=torch.float64), count), none, (stop, save))
        for s, (loss, count, stop, save) in enumerate(microbatches)
    ]
    stats = StepStats.from_vector(V, torch.stack(vectors).sum(0))
    assert stats.losses == [loss for loss, _, _, _ in microbatches]
    assert stats.counts == [count for _, count, _, _ in microbatches]
    assert stats.stop == any(stop for _, _, stop, _ in microbatches)
    assert stats.save == any(save for _, _, _, save in microbatches)
    assert len(stats.buffers) == 0


def test_buffers_are_summed() -> None:
    buffers = [torch.tensor([1.0, 2.0], dtype=torch.float64) * s for s in range(3)]
    vectors = [vector(3, s, torch.tensor(0.0), 1, buffers[s]) for s in range(3)]
    assert StepStats.from_vector(3, torch.stack(vectors).sum(0)).buffers.tolist() == [3.0, 6.0]
    assert {len(vector) for vector in vectors} == {vector_length(3, 2)}


def test_counts_may_be_tensors_and_losses_of_any_precision() -> None:
    only = vector(1, 0, torch.tensor(1 / 3, dtype=torch.float32), torch.tensor(5), torch.empty(0))
    stats = StepStats.from_vector(1, only)
    assert stats.losses == [float(torch.tensor(1 / 3, dtype=torch.float32))]
    assert stats.counts == [5.0]


def test_microbatches_without_a_vector_have_loss_and_count_zero() -> None:
    stats = StepStats.from_vector(4, vector(4, 2, torch.tensor(1.5), 2, torch.empty(0)))
    assert (stats.losses, stats.counts) == ([0, 0, 1.5, 0], [0, 0, 2, 0])


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
