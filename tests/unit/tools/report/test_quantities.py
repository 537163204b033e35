"""Numbers as a person reads them."""

import pytest

from samestep.tools.report.quantities import in_bytes, in_time, of_kind


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (3 * 2**40, "3 TiB"), (None, "–")],
)
def test_bytes(value: float | None, shown: str) -> None:
    assert in_bytes(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59, "59 s"),
        (60, "1 min"),
        (1000, "16 min 40 s"),
        (7200, "2 h"),
        (90061, "1 d 1 h"),
    ],
)
def test_times(value: float, shown: str) -> None:
    assert in_time(value) == shown


def test_values_of_charts() -> None:
    assert [of_kind(0.51234, kind) for kind in ("percent", "number", "count", "bytes")] == [
        "51.23%",
        "0.51234",
        "0.5",
        "1 B",
    ]
    assert of_kind(None, "number") == "–"
