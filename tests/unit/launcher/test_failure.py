"""Failures of ranks, the first cause among several, and restarts of failed runs."""

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError, NonFiniteError, PeerLostError
from samestep.launcher.failure import Failure, first_cause


def failure(when: float, **changes: Any) -> Failure:
    return Failure(**{"rank": int(when), "when": when, "text": "error: x", "exit_code": 1, **changes})


def raised(error: BaseException) -> BaseException:
    """Return `error` with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_earliest_cause_is_selected() -> None:
    failures = [failure(3.0), failure(1.0), failure(2.0)]
    assert first_cause(failures).when == 1.0


def test_earlier_consequence_is_not_the_cause() -> None:
    failures = [failure(1.0, is_consequence=True), failure(2.0), failure(3.0)]
    assert first_cause(failures).when == 2.0


def test_without_a_cause_the_earliest_consequence_is_selected() -> None:
    failures = [failure(2.0, is_consequence=True), failure(1.0, is_consequence=True)]
    assert first_cause(failures).when == 1.0


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), min_size=1), st.randoms())
def test_cause_does_not_depend_on_the_order(facts: list[tuple[float, bool]], shuffle: Any) -> None:
    failures = [failure(when, is_consequence=lost) for when, lost in facts]
    cause = first_cause(failures)
    shuffle.shuffle(failures)
    again = first_cause(failures)
    assert (again.when, again.is_consequence) == (cause.when, cause.is_consequence)


def test_later_failures_have_later_times() -> None:
    first, second = Failure.of_exit(0, 1), Failure.of_exception(1, InputError("x"))
    assert first.when <= second.when


def test_invalid_input_has_no_traceback() -> None:
    result = Failure.of_exception(2, raised(InputError("v", expected="r", fix="d")))
    assert result.text == "error: v [E_INPUT]\n  expected: r\n  fix:      d"
    assert (result.rank, result.exit_code, result.is_consequence) == (2, 2, False)


def test_failed_run_has_no_traceback() -> None:
    result = Failure.of_exception(0, raised(NonFiniteError("step 3: NaN")))
    assert (result.text, result.exit_code) == ("error: step 3: NaN [E_NONFINITE]", 1)


def test_lost_peer_is_a_consequence() -> None:
    result = Failure.of_exception(0, raised(PeerLostError("rank 0 lost its connection")))
    assert result.is_consequence
    assert result.text.startswith("error: rank 0 lost its connection [E_PEER_LOST]\n    Traceback")


def test_exception_has_rank_and_traceback() -> None:
    result = Failure.of_exception(3, raised(KeyError("weight")))
    title, first, *_ = result.text.splitlines()
    assert title == "error: rank 3 failed: KeyError: 'weight' [E_RANK_FAILED]"
    assert first.startswith("    Traceback")
    assert "test_failure.py" in result.text
    assert result.exit_code == 1


def test_first_line_of_a_message_is_the_title() -> None:
    result = Failure.of_exception(0, raised(ValueError("one\ntwo")))
    assert result.title == "rank 0 failed: ValueError: one"


def test_exception_without_a_message_has_its_type_as_title() -> None:
    result = Failure.of_exception(0, raised(ValueError()))
    assert result.title == "rank 0 failed: ValueError"


def test_sigkill_suggests_memory() -> None:
    result = Failure.of_exit(1, -signal.SIGKILL)
    assert result.text.startswith("error: rank 1 was killed by SIGKILL [E_RANK_KILLED]\n  fix:      ")
    assert "memory" in result.text
    assert (result.by_signal, result.exit_code) == (signal.SIGKILL, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGPIPE])
def test_other_signals_have_no_fix(number: signal.Signals) -> None:
    result = Failure.of_exit(1, -number)
    assert (result.text, result.by_signal) == (f"error: rank 1 was killed by {number.name} [E_RANK_KILLED]", number)


def test_crash_has_step_and_stack() -> None:
    result = Failure.of_exit(1, -signal.SIGSEGV, "in engine.step 7", ["train.py:3 main", "net.py:9 forward"])
    assert result.text.splitlines()[:4] == [
        "error: rank 1 was killed by SIGSEGV in engine.step 7 [E_RANK_KILLED]",
        "  Python stack, innermost last:",
        "    train.py:3 main",
        "    net.py:9 forward",
    ]
    assert result.activity == "in engine.step 7"


def test_hang_is_the_first_cause() -> None:
    hang = Failure.of_hang(2, "rank 2 hangs", "after engine.step 6")
    killed = Failure.of_exit(1, -signal.SIGKILL)
    assert first_cause([killed, hang]) is hang
    assert hang.text == "error: rank 2 hangs"


def test_out_of_memory_has_a_fix() -> None:
    result = Failure.of_exception(0, raised(MemoryError("1 TB")), "in engine.step 2")
    assert result.text.startswith(
        "error: rank 0 failed in engine.step 2: MemoryError: 1 TB [E_RANK_FAILED]\n    Traceback"
    )
    assert result.text.splitlines()[-1].startswith("  fix:      use less memory per rank")


def test_early_exit_has_the_exit_code() -> None:
    result = Failure.of_exit(1, 5)
    title, expected, hint = result.text.splitlines()
    assert title == "error: rank 1 ended with exit code 5, before the function returned [E_RANK_EXITED]"
    assert expected == "  expected: the function returns in every rank"
    assert "sys.exit()" in hint
    assert result.by_signal is None


@pytest.mark.parametrize(("exit_code", "hint"), [(2, "see the message above: argparse"), (5, "look for sys.exit()")])
def test_early_exit_of_a_script(exit_code: int, hint: str) -> None:
    lines = Failure.of_exit(0, exit_code, is_script=True).text.splitlines()
    assert lines[:2] == [
        f"error: rank 0 ended with exit code {exit_code}, before the script ended [E_RANK_EXITED]",
        "  expected: the script ends with exit code 0 in every rank",
    ]
    assert lines[2].startswith(f"  fix:      {hint}")


def test_syntax_error_without_other_frames_has_no_frames_of_the_launcher() -> None:
    spaces = {"__name__": "samestep.launcher.worker"}
    exec("def run(text):\n    exec(compile(text, 'script.py', 'exec'))\n", spaces)
    run: Any = spaces["run"]
    with pytest.raises(SyntaxError) as caught:
        run("review text")
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    text = Failure.of_exception(0, caught.value).text
    assert 'File "script.py", line 1' in text
    assert "in run" not in text


def test_real_time_signal_without_a_name() -> None:
    assert "killed" in Failure.of_exit(1, -(signal.SIGRTMIN + 1)).text


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
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
def test_out_of_memory_is_recognized(error: BaseException, is_out_of_memory: bool) -> None:
    assert Failure.of_exception(0, raised(error)).is_out_of_memory is is_out_of_memory


# --- restarts: within the limit, without lost ranks, but not for permanent failures ---------------------
