"""An error reads as value, rule and way out, survives the way between processes, and knows its exit code."""

import pickle

import pytest

from samestep import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SamestepError, 1),
        (errors.InputError, 2),
        (errors.RecipeError, 2),
        (errors.DataError, 2),
        (errors.CheckpointError, 2),
        (errors.RunError, 1),
        (errors.NonFiniteError, 1),
        (errors.PeerLostError, 1),
    ],
)
def test_exit_codes(kind: type[errors.SamestepError], code: int) -> None:
    assert kind("value").exit_code == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.RunError("a"), "a"),
        (errors.RunError("a", rule="b"), "a\n  rule: b"),
        (errors.RunError("a", do="c"), "a\n  do:   c"),
        (errors.RunError("a", rule="b", do="c"), "a\n  rule: b\n  do:   c"),
    ],
)
def test_text_is_value_rule_and_way_out(error: errors.SamestepError, text: str) -> None:
    assert str(error) == text


def test_an_error_crosses_processes_whole() -> None:
    sent = errors.DataError("value", rule="rule", do="way out")
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is errors.DataError
    assert (got.value, got.rule, got.do) == (sent.value, sent.rule, sent.do)


def test_what_else_went_wrong_is_told_last() -> None:
    error = errors.InputError("a sample is bad", rule="all are good", do="mend it")
    error.add_note("nor can anything be saved")
    assert str(error).splitlines()[-1] == "  also: nor can anything be saved"
