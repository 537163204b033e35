"""Lines of JSON, as runs that were killed leave them."""

import math
from pathlib import Path

import pytest

from samestep.tools.report.json_lines import JsonLines, finite, number, whole


def read(path: Path, content: bytes) -> tuple[list[object], int]:
    path.write_bytes(content)
    lines = JsonLines(path)
    return list(lines), lines.unreadable


def test_half_a_line_at_the_end_is_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path / "a", b'{"time": 1}\n{"time": 2, "st') == ([{"time": 1}], 1)


def test_what_goes_on_behind_half_a_line_is_read(tmp_path: Path) -> None:
    content = b'{"time": 1}\n{"time": 2, "st{"time": 3, "event": "resume"}\n{"time": 4}\n'
    assert read(tmp_path / "a", content) == ([{"time": 1}, {"time": 3, "event": "resume"}, {"time": 4}], 1)


def test_lines_that_are_empty_or_of_zeros_are_none(tmp_path: Path) -> None:
    assert read(tmp_path / "a", b'\n{"time": 1}\n\0\0\0\0\n\n') == ([{"time": 1}], 0)


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b"\xff\xfe{", b"[" * 100_000, b'{"a": ' * 100_000])
def test_what_is_no_object_is_passed_over(line: bytes, tmp_path: Path) -> None:
    assert read(tmp_path / "a", line + b'\n{"time": 1}\n') == ([{"time": 1}], 1)


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(JsonLines(tmp_path / "none")) == []


def test_numbers_are_those_of_events() -> None:
    assert [number(value) for value in (1, 2.5, "inf", "-inf", "7", None, True, [1])] == [
        1.0,
        2.5,
        math.inf,
        -math.inf,
        None,
        None,
        None,
        None,
    ]
    assert math.isnan(number("nan") or 0.0)
    assert number(10**400) is None
    assert [finite(value) for value in (1, "nan", "inf", None)] == [1.0, None, None, None]
    assert [whole(value) for value in (0, 7, -1, 2.0, True, "7", 2**60)] == [0, 7, None, None, None, None, None]
