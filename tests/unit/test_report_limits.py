"""Text of reports: limits, and texts of exceptions."""

from samestep.errors import bounded, class_name, message_of


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
