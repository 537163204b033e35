"""Reasons of whole calls."""

from samestep.view.trial_result import LONGEST_REASON, failure, shortened


def test_long_reason_is_cut() -> None:
    reason = failure("fails in the trial", RuntimeError("size mismatch " * 20))
    assert reason.startswith("fails in the trial (RuntimeError: size mismatch")
    assert reason.endswith("...")
    assert len(reason) <= LONGEST_REASON


def test_only_the_first_line_of_an_error() -> None:
    assert failure("fails in the trial", ValueError("first\nsecond")) == "fails in the trial (ValueError: first)"
    assert shortened("one\ntwo") == "one"
