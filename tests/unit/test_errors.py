"""Errors, their codes, and the limits of reports."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import errors
from samestep.report_text import bounded, class_name, message_of


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SamestepError, errors.EXIT_FAILED),
        (errors.InputError, errors.EXIT_INPUT),
        (errors.RecipeError, errors.EXIT_INPUT),
        (errors.DataError, errors.EXIT_INPUT),
        (errors.CheckpointError, errors.EXIT_INPUT),
        (errors.RunError, errors.EXIT_FAILED),
        (errors.NonFiniteError, errors.EXIT_FAILED),
        (errors.PeerLostError, errors.EXIT_FAILED),
    ],
)
def test_exit_codes(kind: type[errors.SamestepError], code: int) -> None:
    assert kind("value").exit_code == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.RunError("a"), "a [E_RUN]"),
        (errors.RunError("a", expected="b"), "a [E_RUN]\n  expected: b"),
        (errors.RunError("a", fix="c"), "a [E_RUN]\n  fix:      c"),
        (errors.RunError("a", expected="b", fix="c"), "a [E_RUN]\n  expected: b\n  fix:      c"),
        (errors.RunError("a\n  more", code="E_HANG"), "a [E_HANG]\n  more"),
        (errors.RunError("a\nerror: b [E_X]"), "a [E_RUN]\n    error: b [E_X]"),
        (errors.RunError("a", fix="c\nerror: b"), "a [E_RUN]\n  fix:      c\n            error: b"),
        (errors.RunError("\x1b[31ma\r\u202e\udce9\t."), r"\x1b[31ma\r\u202e\udce9  . [E_RUN]"),
    ],
)
def test_text_has_code_expectation_and_fix(error: errors.SamestepError, text: str) -> None:
    assert str(error) == text


def test_error_is_equal_after_pickling() -> None:
    error = errors.DataError("value", expected="rule", fix="action", code="E_CLASSES")
    error.add_note("note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.DataError
    assert (copy.value, copy.expected, copy.fix, copy.code) == ("value", "rule", "action", "E_CLASSES")
    assert str(copy) == str(error)


def test_notes_follow_the_fix() -> None:
    error = errors.InputError("one sample is unusable", expected="all samples are usable", fix="remove the sample")
    error.add_note("no checkpoint was written")
    assert str(error).splitlines()[-1] == "  also:     no checkpoint was written"


def test_every_default_code_is_documented() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SamestepError)
    ]
    assert len(errors.CODES) <= 70  # more are not told apart
    assert {kind.default_code for kind in kinds} <= errors.CODES.keys()


@given(st.text(max_size=3000).map(lambda text: text * 9), st.integers(1, 200))
def test_report_is_bounded_and_printable(text: str, times: int) -> None:
    report = str(errors.InputError((text + "\n") * times, expected=text, fix=text))
    lines = report.split("\n")
    assert len(lines) <= 60
    assert len(report.encode()) <= 8192
    assert all(line.isprintable() and (line.startswith(" ") or not number) for number, line in enumerate(lines))


def test_begin_end_and_code_of_a_long_report_are_kept() -> None:
    lines = bounded("\n".join(["x" * 100_000 + " [E_RUN]", *map(str, range(100_000))])).split("\n")
    assert (lines[0][0], lines[0][-8:], lines[1], lines[-1]) == ("x", " [E_RUN]", "0", "99999")
    assert any("99,9" in line and "left out" in line for line in lines)
    assert bounded("short\n  text") == "short\n  text"


def test_message_of_an_exception_without_a_text() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert message_of(Unprintable()) == "<no text: Unprintable.__str__ raised KeyError>"
    assert message_of(ValueError("a")) == "a"
    assert class_name(type("", (Exception,), {})()) == "<class without a name>"
