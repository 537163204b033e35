"""Tests of predictions for published tables: each row from the other rows."""

import pytest
from benchmarks.plan_tables import TABLES, Row, bert_end_error, fit, left_out_errors, resnet50_error

# Largest error of the time of a row, as in docs/guides/plan.md.
LIMITS = [
    (0, "tree", 0.07),
    (0, "ring", 0.52),  # poor: an epoch of 2 s contains more than bytes on links
    (1, "alone", 0.04),
    (2, "ring", 0.11),
    (3, "ring", 0.06),
    (4, "ring", 0.05),
]


@pytest.mark.parametrize(("number", "growth", "limit"), LIMITS)
def test_row_is_predicted_from_the_others(number: int, growth: str, limit: float) -> None:
    largest = max(map(abs, left_out_errors(TABLES[number], growth)))
    assert limit - 0.01 < largest <= limit


def test_ends_of_other_tables_are_predicted() -> None:
    assert bert_end_error() == pytest.approx(-0.05, abs=0.01)
    assert resnet50_error() == pytest.approx(0.088, abs=0.005)


def test_fit_finds_the_numbers_of_exact_rows() -> None:
    rows = [Row(devices, 1.0, 6 / devices + 2 * (devices - 1), devices) for devices in (1, 2, 4)]
    result = fit(rows, lambda number: number - 1)
    assert (result.work, result.communication) == pytest.approx((6, 2))
