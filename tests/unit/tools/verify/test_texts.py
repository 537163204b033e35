"""Numbers that scripts print."""

import pytest

from samestep.tools.verify.texts import Printed, differing_lines, numbers_of


def differences(lines: list[str], other: list[str], repeated: list[str] | None = None, *, is_exact: bool = True):
    return list(differing_lines(Printed(lines, repeated or lines), other, is_exact=is_exact))


def test_equal_lines_and_times_do_not_differ() -> None:
    lines = ["loss 0.25 in 1.5 s, 300 samples/s", "00:01 2026-01-02"]
    assert differences(lines, ["loss 0.25 in 9.1 s, 7 samples/s", "10:01:22 2027-01-02"]) == []
    assert numbers_of(lines[0])[1] == ["0.25"]


@pytest.mark.parametrize("other", ["loss 0.26", "loss nan", "LOSS 0.25"])
def test_other_number_or_text_differs(other: str) -> None:
    [(detail, _)] = differences(["loss 0.25"], [other])
    assert detail == f"'loss 0.25' and {other!r}"


def test_numbers_that_vary_between_equal_runs_are_no_results() -> None:
    assert differences(["seed 17 loss 0.5"], ["seed 99 loss 0.5"], ["seed 18 loss 0.5"]) == []
    assert len(differences(["seed 17 loss 0.5"], ["seed 99 loss 0.6"], ["seed 18 loss 0.5"])) == 1
    assert differences(["/tmp/a 1"], ["/tmp/c 2"], ["/tmp/b 1"]) == []


def test_rounding_of_a_printed_number_is_its_last_digit() -> None:
    assert differences(["loss 0.2500"], ["loss 0.2501"], is_exact=False) == []
    [(_, size)] = differences(["loss 0.2500"], ["loss 0.2600"], is_exact=False)
    assert size == pytest.approx(0.0099 / 0.26, rel=0.01)
    [(_, size)] = differences(["right 24"], ["right 25"], is_exact=False)
    assert size == pytest.approx(1 / 25)


def test_zeros_of_either_sign_are_one_number() -> None:
    for text, other in (("loss 0.0", "loss -0.0"), ("loss 0.0", "loss 0.00")):
        assert differences([text], [other], is_exact=False) == []


def test_missing_lines_differ() -> None:
    assert differences(["a 1", "b 2"], ["a 1"]) == [("2 lines and 1 lines", None)]
    assert differences(["a 1", "b 2"], ["a 1"], ["a 1"]) == []
