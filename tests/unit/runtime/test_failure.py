"""Of several failed ranks the one that failed first is reported, in the words a user can act on."""

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError, NonFiniteError, PeerLostError
from samestep.runtime.failure import Failure, first_cause


def failure(when: float, **changes: Any) -> Failure:
    return Failure(**{"rank": int(when), "when": when, "text": "error: x", "exit_code": 1, **changes})


def raised(error: BaseException) -> BaseException:
    """`error` with the traceback of having been raised."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_the_earliest_cause_is_chosen() -> None:
    failures = [failure(3.0), failure(1.0), failure(2.0)]
    assert first_cause(failures).when == 1.0


def test_a_consequence_is_not_a_cause_though_it_came_first() -> None:
    failures = [failure(1.0, is_consequence=True), failure(2.0), failure(3.0)]
    assert first_cause(failures).when == 2.0


def test_without_a_cause_the_earliest_consequence_is_chosen() -> None:
    failures = [failure(2.0, is_consequence=True), failure(1.0, is_consequence=True)]
    assert first_cause(failures).when == 1.0


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), min_size=1), st.randoms())
def test_the_choice_does_not_depend_on_who_is_asked_first(facts: list[tuple[float, bool]], shuffle: Any) -> None:
    failures = [failure(when, is_consequence=lost) for when, lost in facts]
    chosen = first_cause(failures)
    shuffle.shuffle(failures)
    again = first_cause(failures)
    assert (again.when, again.is_consequence) == (chosen.when, chosen.is_consequence)


def test_later_failures_have_later_times() -> None:
    first, second = Failure.of_exit(0, 1), Failure.of_exception(1, InputError("x"))
    assert first.when <= second.when


def test_wrong_input_is_told_without_a_traceback() -> None:
    found = Failure.of_exception(2, raised(InputError("v", rule="r", do="d")))
    assert found.text == "error: v\n  rule: r\n  do:   d"
    assert (found.rank, found.exit_code, found.is_consequence) == (2, 2, False)


def test_a_failed_run_is_told_without_a_traceback() -> None:
    found = Failure.of_exception(0, raised(NonFiniteError("step 3: NaN")))
    assert (found.text, found.exit_code) == ("error: step 3: NaN", 1)


def test_a_lost_peer_is_a_consequence() -> None:
    found = Failure.of_exception(0, raised(PeerLostError("rank 0 lost its connection")))
    assert found.is_consequence
    assert found.text.startswith("error: rank 0 lost its connection\nTraceback")


def test_a_fault_in_code_names_the_rank_and_the_place() -> None:
    found = Failure.of_exception(3, raised(KeyError("weight")))
    title, first, *_ = found.text.splitlines()
    assert title == "error: rank 3 failed: KeyError: 'weight'"
    assert first.startswith("Traceback")
    assert "test_failure.py" in found.text
    assert found.exit_code == 1


def test_a_message_of_several_lines_has_its_first_in_the_title() -> None:
    found = Failure.of_exception(0, raised(ValueError("one\ntwo")))
    assert found.text.splitlines()[0] == "error: rank 0 failed: ValueError: one"


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    found = Failure.of_exception(0, raised(ValueError()))
    assert found.text.splitlines()[0] == "error: rank 0 failed: ValueError"


def test_a_killed_process_names_its_signal_and_memory() -> None:
    found = Failure.of_exit(1, -signal.SIGKILL)
    assert found.text.startswith("error: rank 1 was killed by SIGKILL\n  do:   ")
    assert "memory" in found.text
    assert (found.by_signal, found.exit_code) == (signal.SIGKILL, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGPIPE])
def test_another_signal_is_named_without_a_guess(number: signal.Signals) -> None:
    found = Failure.of_exit(1, -number)
    assert (found.text, found.by_signal) == (f"error: rank 1 was killed by {number.name}", number)


def test_a_crash_is_told_with_its_step_and_its_stack() -> None:
    found = Failure.of_exit(1, -signal.SIGSEGV, "in engine.step 7", ["train.py:3 main", "net.py:9 forward"])
    assert found.text.splitlines()[:4] == [
        "error: rank 1 was killed by SIGSEGV in engine.step 7",
        "  its Python stack, innermost last:",
        "    train.py:3 main",
        "    net.py:9 forward",
    ]
    assert found.where == "in engine.step 7"


def test_a_rank_that_hangs_is_the_cause_of_all_that_follows() -> None:
    hang = Failure.of_hang(2, "rank 2 does not come", "after engine.step 6")
    killed = Failure.of_exit(1, -signal.SIGKILL)
    assert first_cause([killed, hang]) is hang
    assert hang.text == "error: rank 2 does not come"


def test_a_lack_of_memory_comes_with_ways_out() -> None:
    found = Failure.of_exception(0, raised(MemoryError("1 TB")), "in engine.step 2")
    assert found.text.startswith("error: rank 0 failed in engine.step 2: MemoryError: 1 TB\nTraceback")
    assert found.text.splitlines()[-1].startswith("  do:   let each rank hold less")


def test_an_early_end_gives_the_exit_code() -> None:
    found = Failure.of_exit(1, 5)
    title, hint = found.text.splitlines()
    assert title == "error: rank 1 ended with exit code 5, before it was done"
    assert "sys.exit()" in hint
    assert found.by_signal is None


def test_a_real_time_signal_is_told_like_any_other() -> None:
    assert "killed" in Failure.of_exit(1, -(signal.SIGRTMIN + 1)).text


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (InputError("out of memory"), False),
    ],
)
def test_a_want_of_memory_is_told_from_other_failures(error: BaseException, is_of_memory: bool) -> None:
    assert Failure.of_exception(0, raised(error)).is_of_memory is is_of_memory
