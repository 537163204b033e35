"""Microbatches that a rank computes together: equal to separate ones to rounding, on any number of ranks."""

from typing import Any

import pytest
import torch

from samestep import launch
from workers import merged

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def separate() -> dict[str, Any]:
    results: dict[str, Any] = launch(merged.train, "off", processes=1)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_merged_steps_equal_separate_ones(separate: dict[str, Any], ranks: int) -> None:
    results = launch(merged.train, "auto", processes=ranks)
    for name, (state, losses, reason) in results.items():
        expected, expected_losses, _ = separate[name]
        assert reason is None, name
        for values, others in ((state, expected), (losses, expected_losses)):
            one, other = (torch.tensor(numbers, dtype=torch.float64) for numbers in (values, others))
            assert float((one - other).abs().max()) <= TOLERANCE * float(other.abs().max()), name
        assert state != expected, name  # another order of summation


@pytest.mark.slow
@pytest.mark.parametrize("name", merged.LATE_CHANGES)
def test_late_change_ends_the_merging_of_one_rank(name: str) -> None:
    [(expected, _)] = launch(merged.train_with_late_change, "off", name, processes=1)
    results = launch(merged.train_with_late_change, "auto", name, processes=3)
    assert [is_merged for _, is_merged in results] == [True, True, False]
    for weights, _ in results:
        one, other = (torch.tensor(numbers, dtype=torch.float64) for numbers in (weights, expected))
        assert float((one - other).abs().max()) <= TOLERANCE * float(other.abs().max())
