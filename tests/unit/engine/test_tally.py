"""The message of a step carries every shard's loss and count side by side, in full precision."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.tally import Tally, read_tally, tally_length, write_tally

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)


def tally(losses: list[float], counts: list[float] | None = None) -> Tally:
    return Tally(losses, counts or [1.0] * len(losses), False, False, torch.empty(0))


def vector(shards: int, shard: int, loss: torch.Tensor, count: object, buffers: torch.Tensor) -> torch.Tensor:
    return write_tally(shards, shard, loss, count, buffers, stop=False, save=False)  # type: ignore[arg-type]


@given(st.lists(st.tuples(numbers, st.integers(0, 2**50), st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_the_sum_of_the_vectors_is_all_of_them(shards: list[tuple[float, int, bool, bool]]) -> None:
    V, none = len(shards), torch.empty(0, dtype=torch.float64)
    vectors = [
        write_tally(V, s, torch.tensor(loss, dtype=torch.float64), count, none, stop=stop, save=save)
        for s, (loss, count, stop, save) in enumerate(shards)
    ]
    found = read_tally(V, torch.stack(vectors).sum(0))
    assert found.losses == [loss for loss, _, _, _ in shards]
    assert found.counts == [count for _, count, _, _ in shards]
    assert found.stop == any(stop for _, _, stop, _ in shards)
    assert found.save == any(save for _, _, _, save in shards)
    assert len(found.buffers) == 0


def test_buffers_are_summed() -> None:
    buffers = [torch.tensor([1.0, 2.0], dtype=torch.float64) * s for s in range(3)]
    vectors = [vector(3, s, torch.tensor(0.0), 1, buffers[s]) for s in range(3)]
    assert read_tally(3, torch.stack(vectors).sum(0)).buffers.tolist() == [3.0, 6.0]
    assert {len(vector) for vector in vectors} == {tally_length(3, 2)}


def test_counts_may_be_tensors_and_losses_of_any_precision() -> None:
    said = vector(1, 0, torch.tensor(1 / 3, dtype=torch.float32), torch.tensor(5), torch.empty(0))
    found = read_tally(1, said)
    assert found.losses == [float(torch.tensor(1 / 3, dtype=torch.float32))]
    assert found.counts == [5.0]


def test_shards_without_samples_say_nothing() -> None:
    found = read_tally(4, vector(4, 2, torch.tensor(1.5), 2, torch.empty(0)))
    assert (found.losses, found.counts) == ([0, 0, 1.5, 0], [0, 0, 2, 0])


def test_the_loss_is_the_sum_over_the_count_not_a_mean_of_means() -> None:
    assert tally([10.0, 2.0], [1, 5]).loss == 2.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.randoms())
def test_the_loss_does_not_depend_on_order(losses: list[float], shuffle: object) -> None:
    before = tally(losses).loss
    shuffle.shuffle(losses)  # type: ignore[attr-defined]
    assert tally(losses).loss == before


def test_a_step_that_counts_nothing_has_loss_zero() -> None:
    assert tally([0.0, 0.0], [0, 0]).loss == 0.0


def test_bad_shards_are_those_whose_loss_is_not_finite() -> None:
    assert tally([1.0, math.nan, -math.inf, 0.0, math.inf]).bad_shards == [1, 2, 4]
    assert tally([1.0, -1.0]).bad_shards == []


@pytest.mark.parametrize("losses", [[math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf], [math.nan, math.inf]])
def test_a_loss_that_is_not_finite_can_be_told(losses: list[float]) -> None:
    assert not math.isfinite(tally(losses).loss)


def test_finite_losses_too_large_to_sum_can_be_told() -> None:
    assert tally([1.7e308, 1.7e308]).loss > 1e307
