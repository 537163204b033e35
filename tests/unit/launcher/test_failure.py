"""Failures of ranks, the first cause among several, and restarts."""

import signal
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep import parallelize
from samestep.distributed import torch_errors
from samestep.distributed.devices import GpuMemory
from samestep.distributed.torch_errors import FRAGMENTS_FIX, GPU_MEMORY_FIXES, MEMORY_FIX
from samestep.errors import InputError, NonFiniteError, PeerLostError
from samestep.launcher.failure import Failure, RankError, first_cause
from samestep.launcher.restarts import RestartPolicy
from samestep.session import start


def failure(when: float, **changes: Any) -> Failure:
    return Failure(**{"rank": int(when), "when": when, "text": "error: x", "exit_code": 1, **changes})


def raised(error: BaseException) -> BaseException:
    """Return `error` with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("failures", "when"),
    [
        ([failure(3.0), failure(1.0), failure(2.0)], 1.0),
        ([failure(1.0, is_consequence=True), failure(2.0), failure(3.0)], 2.0),
        ([failure(2.0, is_consequence=True), failure(1.0, is_consequence=True)], 1.0),
    ],
)
def test_earliest_cause_is_selected_before_consequences(failures: list[Failure], when: float) -> None:
    assert first_cause(failures).when == when


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), min_size=1), st.randoms())
def test_cause_does_not_depend_on_the_order(facts: list[tuple[float, bool]], shuffle: Any) -> None:
    failures = [failure(when, is_consequence=lost) for when, lost in facts]
    cause = first_cause(failures)
    shuffle.shuffle(failures)
    again = first_cause(failures)
    assert (again.when, again.is_consequence) == (cause.when, cause.is_consequence)


@pytest.mark.parametrize(
    ("error", "text", "exit_code"),
    [
        (InputError("v", expected="r", fix="d"), "error: v [E_INPUT]\n  expected: r\n  fix:      d", 2),
        (NonFiniteError("step 3: NaN"), "error: step 3: NaN [E_NONFINITE]", 1),
    ],
)
def test_expected_errors_have_no_traceback(error: BaseException, text: str, exit_code: int) -> None:
    result = Failure.of_exception(2, raised(error))
    assert (result.rank, result.text, result.exit_code, result.is_consequence) == (2, text, exit_code, False)


def test_lost_peer_is_a_consequence() -> None:
    result = Failure.of_exception(0, raised(PeerLostError("rank 0 lost its connection")))
    assert result.is_consequence
    assert result.text.startswith("error: rank 0 lost its connection [E_PEER_LOST]\n    Traceback")


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (KeyError("weight"), "rank 3 failed: KeyError: 'weight'"),
        (ValueError("one\ntwo"), "rank 3 failed: ValueError: one"),
        (ValueError(), "rank 3 failed: ValueError"),
    ],
)
def test_exception_has_rank_and_traceback(error: BaseException, title: str) -> None:
    result = Failure.of_exception(3, raised(error))
    assert (result.title, result.exit_code) == (title, 1)
    assert result.text.startswith(f"error: {title} [E_RANK_FAILED]\n    Traceback")
    assert "test_failure.py" in result.text


@pytest.mark.parametrize(
    ("number", "fix"), [(signal.SIGKILL, "memory"), (signal.SIGTERM, ""), (signal.SIGPIPE, ""), (signal.SIGRTMIN, "")]
)
def test_killed_rank(number: signal.Signals, fix: str) -> None:
    result = Failure.of_exit(1, -number)
    assert result.text.startswith(f"error: rank 1 was killed by {number.name} [E_RANK_KILLED]")
    assert (result.by_signal, result.exit_code) == (number, 1)
    assert ("  fix:      " in result.text, fix in result.text) == (bool(fix), True)
    assert "killed" in Failure.of_exit(1, -(signal.SIGRTMIN + 1)).text, "it has no name"


def test_crash_has_step_and_stack() -> None:
    result = Failure.of_exit(1, -signal.SIGSEGV, "in step 7", ["train.py:3 main", "net.py:9 forward"])
    assert result.text.splitlines()[:4] == [
        "error: rank 1 was killed by SIGSEGV in step 7 [E_RANK_KILLED]",
        "  Python stack, innermost last:",
        "    train.py:3 main",
        "    net.py:9 forward",
    ]
    assert result.activity == "in step 7"


def test_hang_is_the_first_cause() -> None:
    hang = Failure.of_hang(2, "rank 2 hangs", "after step 6")
    killed = Failure.of_exit(1, -signal.SIGKILL)
    assert first_cause([killed, hang]) is hang
    assert hang.text == "error: rank 2 hangs"


def test_out_of_memory_has_a_fix() -> None:
    result = Failure.of_exception(0, raised(MemoryError("1 TB")), "in step 2")
    assert result.text.startswith("error: rank 0 failed in step 2: MemoryError: 1 TB [E_RANK_FAILED]\n    Traceback")
    assert result.text.splitlines()[-1].startswith("  fix:      use less memory per rank")


@pytest.mark.parametrize(
    ("exit_code", "is_script", "expected", "hint"),
    [
        (5, False, "the function returns in every rank", "look for sys.exit()"),
        (5, True, "the script ends with exit code 0 in every rank", "look for sys.exit()"),
    ],
)
def test_early_exit(exit_code: int, is_script: bool, expected: str, hint: str) -> None:
    result = Failure.of_exit(0, exit_code, is_script=is_script)
    title, *lines = result.text.splitlines()
    assert title.startswith(f"error: rank 0 ended with exit code {exit_code}, before the ")
    assert (result.code, result.by_signal) == ("E_RANK_EXITED", None)
    assert lines[0] == f"  expected: {expected}"
    assert lines[1].startswith(f"  fix:      {hint}")


def of_package(source: str) -> Any:
    """Return the function `run` of source code, as one of the package."""
    spaces: dict[str, Any] = {}
    exec(compile(source, parallelize.__file__, "exec"), spaces)
    return spaces["run"]


def fails_in_script(*_: object) -> None:
    raise ValueError("in the script")


def test_frames_of_the_package_are_left_out_around_code_of_the_script() -> None:
    around = of_package("def run(function):\n    return function(function)\n")
    with pytest.raises(ValueError, match="in the script") as caught:
        around(fails_in_script)
    text = Failure.of_exception(0, caught.value).text
    assert "in fails_in_script" in text
    assert "in run" not in text


def test_frames_of_the_package_are_kept_after_the_script_in_an_error_of_their_own() -> None:
    own = of_package("def run(number):\n    return 1 / number\n")
    with pytest.raises(ZeroDivisionError) as caught:
        own(0)
    text = Failure.of_exception(0, caught.value).text
    assert "in run" in text
    assert "test_failure.py" in text


def test_frames_of_a_function_mode_are_left_out_after_the_script() -> None:
    observe = of_package("def run(number):\n    def observe():\n        return 1 / number\n    return observe()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        observe(0)
    assert "in observe" not in Failure.of_exception(0, caught.value).text


def test_syntax_error_without_other_frames_has_no_frames_of_the_launcher() -> None:
    run = of_package("def run(text):\n    exec(compile(text, 'script.py', 'exec'))\n")
    with pytest.raises(SyntaxError) as caught:
        run("review text")
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    text = Failure.of_exception(0, caught.value).text
    assert 'File "script.py", line 1' in text
    assert "in run" not in text


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
    assert (MEMORY_FIX in Failure.of_exception(0, raised(error)).text) is is_out_of_memory


GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "numbers", "has_fragments"),
    [
        (
            (70 * GIB, 71 * GIB, 78 * GIB, GIB // 2, 80 * GIB),
            "70 GiB allocated, 78 GiB reserved by torch; 512 MiB of 80 GiB",
            True,
        ),
        (
            (78 * GIB, 78 * GIB, 78 * GIB + 10**9, GIB, 80 * GIB),
            "78 GiB allocated, 78.9 GiB reserved by torch; 1 GiB of 80",
            False,
        ),
        (None, "", False),  # a GPU that does not answer
    ],
)
def test_lack_of_gpu_memory_has_numbers_and_an_ordered_list_of_fixes(
    memory: tuple[int, int, int, int, int] | None, numbers: str, has_fragments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_errors, "gpu_memory", lambda: memory and GpuMemory(*memory))
    text = Failure.of_exception(0, raised(torch.OutOfMemoryError("CUDA out of memory."))).text
    _, _, report = text.partition("CUDA out of memory.\n")  # after the trace
    assert numbers in report
    expected = [*GPU_MEMORY_FIXES, *([FRAGMENTS_FIX] if has_fragments else [])]
    assert [line[12:] for line in report.splitlines() if ". " in line[:15]] == [
        f"{number}. {fix}" for number, fix in enumerate(expected, start=1)
    ]
    assert MEMORY_FIX not in text


def without_kernel() -> None:
    """An operator without a deterministic kernel on CPUs, on one of two ranks."""
    torch.manual_seed(0)
    with start(device="cpu", reduction="exact") as world:
        values = torch.zeros(4)
        if not world.is_main:
            values.put_(torch.tensor([1]), torch.ones(1))
        world.barrier()


def test_operator_without_a_deterministic_kernel_is_named_with_a_replacement() -> None:
    with pytest.raises(RankError) as failed:
        samestep.launch(without_kernel, processes=2)
    failure = failed.value.failure
    assert (failure.rank, failure.code, failure.exit_code) == (1, "E_NO_DETERMINISTIC_KERNEL", 1)
    assert failure.title.endswith("put_ has no deterministic kernel")
    assert "in without_kernel" in failure.text
    fix = failure.text.splitlines()[-1]
    assert "step.reduction: fast" in fix
    assert "index_put_" in fix


def test_other_errors_that_name_determinism_keep_their_text() -> None:
    error = ValueError("x does not have a deterministic implementation")
    result = Failure.of_exception(0, raised(error))
    assert (result.code, result.title) == ("E_RANK_FAILED", f"rank 0 failed: ValueError: {error}")


def test_a_chain_that_is_longer_than_the_stack_is_complete() -> None:
    error = ValueError("cause 0")
    for number in range(1, 2000):
        following = ValueError(f"cause {number}")
        following.__cause__ = error
        error = following
    lines = Failure.of_exception(1, error).text.splitlines()
    assert [line.strip() for line in lines if line.endswith((" cause 0", " cause 1999"))] == [
        "ValueError: cause 0",
        "ValueError: cause 1999",
    ]


def failed(
    kind: str | None = None, *, by_signal: int | None = None, exit_code: int = 1, is_stopping: bool = False
) -> RankError:
    failure = Failure(1, 0.0, "error: rank 1 ended\nmore", exit_code, kind=kind, by_signal=by_signal)
    return RankError(failure, is_stopping=is_stopping)


KILLED = failed(by_signal=9)
HANGS = failed("hang")
RAISED = failed("ValueError")


@pytest.mark.parametrize(
    ("limits", "failures", "processes"),
    [
        pytest.param((2, 4, 4), [(KILLED, 5), (KILLED, 6), (KILLED, 7)], [4, 4, None], id="up to the limit"),
        pytest.param((0, 4, 4), [(KILLED, 5)], [None], id="no restart by default"),
        pytest.param((5, 4, 4), [(failed("NonFiniteError"), 5)], [None], id="permanent failure"),
        pytest.param((5, 4, 4), [(failed("CheckpointWriteError"), 5)], [None], id="permanent failure of the disk"),
        pytest.param((5, 4, 4), [(failed("InputError", exit_code=2), 5)], [None], id="invalid input"),
        pytest.param((5, 4, 4), [(failed("OSError", is_stopping=True), 5)], [None], id="after a request to stop"),
        pytest.param((5, 4, 4), [(failed(by_signal=9, is_stopping=True), 5)], [None], id="killed after a request"),
        pytest.param((5, 4, 4), [(RAISED, 5), (RAISED, 5)], [4, None], id="same failure at the same step, once"),
        pytest.param((5, 4, 4), [(RAISED, 5), (failed("KeyError"), 5)], [4, 4], id="another failure"),
        pytest.param((5, 4, 4), [(RAISED, 5), (RAISED, 8)], [4, 4], id="another step"),
        pytest.param((3, 4, 4), [(KILLED, 5), (KILLED, 5), (HANGS, 5)], [4, 4, 4], id="lost at the same step"),
        pytest.param((9, 2, 4), [(KILLED, 5), (HANGS, 5), (failed(by_signal=11), 5)], [3, 2, 2], id="lost are dropped"),
        pytest.param((9, 2, 4), [(RAISED, 5)], [4], id="a rank that raised is not dropped"),
    ],
)
def test_restarts(
    limits: tuple[int, int, int], failures: list[tuple[RankError, int]], processes: list[int | None]
) -> None:
    policy = RestartPolicy(*limits)
    assert [policy.processes if policy.restart(*failure) else None for failure in failures] == processes


def test_restart_is_announced() -> None:
    assert RestartPolicy(2, 4, 4).restart(KILLED, 5) == "restart 1 of 2, on 4 processes: rank 1 ended"


@pytest.mark.parametrize("bounds", [(-1, 1, 1), (0, 3, 2), (0, 0, 2)])
def test_invalid_bounds_are_rejected(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="E_LAUNCH"):
        RestartPolicy(*bounds)
