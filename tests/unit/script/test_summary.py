"""Summary of an unchanged script: calls by class, times, data, and advice on batch sizes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.data.own_rows import OwnRows
from samestep.data.sample_reader import Decision
from samestep.script import summary as summary_module
from samestep.script.summary import Reading, Records, Summary, advice
from samestep.view.view import ModuleSummary

LINE = ("train.py", 31)
SHORT = "fewer rows than ranks"
RANKS: Any = SimpleNamespace(rank=0, size=2)


class Script:
    """Calls as of a script, with a clock that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(summary_module, "perf_counter", lambda: self.now)
        self.records = Records()

    def call(
        self, module: ModuleSummary, way: str, seconds: float = 0.0, *, rows: int = 32, line: tuple[str, int] = LINE
    ) -> None:
        """Call a module; `way` is `divided`, `watched`, or the reason for whole."""
        begin = self.records.begin_call(module)
        self.now += seconds
        module.rows = rows
        if way == "divided":
            module.divided += 1
        elif way == "watched":
            module.watched += 1
        elif way:
            module.whole += 1
            module.add_reason(way)
        self.records.end_call(module, begin, line)

    def backward(self, seconds: float = 0.0, line: tuple[str, int] = LINE) -> None:
        """Run a backward."""
        began = self.now
        self.now += seconds
        self.records.add_backward(began, line)

    def summary(self, size: int = 2, **options: Any) -> Summary:
        """Return the summary of the calls."""
        summary = Summary({}, size=size, **options)
        summary.records = self.records
        return summary


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def reading(dataset: str, decision: Decision, read: int, needed: int, line: int = 40) -> Reading:
    state = OwnRows(RANKS, samples=Counter(read=read, needed=needed))
    state.decision = decision
    return Reading(dataset, ("train.py", line), state)


def test_small_batches_with_accumulation_become_batches_with_a_row_for_each_rank() -> None:
    same = ": the same gradients without batch norm, and "
    expected = {
        (1, 32, 8): f"batch size 8 with accumulation 4{same}1 row on each of 8 processes",
        (1, 32, 3): f"batch size 4 with accumulation 8{same}2 rows on each of 3 processes",
        (2, 6, 3): f"batch size 4 with accumulation 3{same}2 rows on each of 3 processes",
        (1, 5, 4): f"batch size 5 with accumulation 1{same}2 rows on each of 4 processes",
        (1, 4, 8): f"batch size 4 with accumulation 1{same}1 row on each of 4 processes (--processes 4)",
    }
    for (rows, backwards, size), text in expected.items():
        old = f"in place of batch size {rows} with accumulation {backwards}, use "
        assert advice(rows, backwards, size) == old + text
    assert advice(3, 1, 4) == "calls with 3 rows cannot be divided between 4 processes: a larger batch size can"


def test_advice_counts_backwards_of_one_line_before_a_step(script: Script) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    closure = torch.optim.LBFGS([parameter], max_iter=3)
    module = ModuleSummary("Net")
    with script.records.steps_counted():
        for _ in range(3):
            for _ in range(32):
                script.call(module, SHORT, rows=1)
                script.backward()
            optimizer.step()
        script.backward(line=("gan.py", 1))
        script.backward(line=("gan.py", 2))
        optimizer.step()

        def loss() -> torch.Tensor:
            script.backward()
            parameter.grad = torch.ones(1)
            return torch.ones(1)

        closure.step(loss)  # type: ignore[no-untyped-call]
        optimizer.step()  # the closure's backwards belong to its own step
    assert script.records.accumulation == {32: 3, 1: 1}
    optimizer.step()
    assert script.records.accumulation == {32: 3, 1: 1}, "the hooks are gone"
    lines = list(script.summary(8).lines())
    assert lines[0] == f"Net: 0 of 96 calls divided; whole: {SHORT} (96)"
    assert any("use batch size 8 with accumulation 4:" in line for line in lines)


def test_few_short_calls_and_evaluation_need_no_advice(script: Script) -> None:
    module = ModuleSummary("Net")
    for _ in range(20):
        script.call(module, "divided")
    script.call(module, SHORT, rows=1)
    with torch.no_grad():
        for _ in range(50):
            script.call(module, SHORT, rows=1)
    lines = list(script.summary().lines())
    assert not [line for line in lines if "batch size 1" in line or "1 row" in line]
    assert lines[-1] == (
        "the batch size is global: 32 rows are 16 on each process; 64 would need the memory per process that 32 need "
        "on one process"
    )


def test_modules_of_one_class_have_one_line(script: Script) -> None:
    first = ModuleSummary("Net")
    second = ModuleSummary("Net")
    for module in (first, second):
        script.call(module, "watched")
        for _ in range(1000):
            script.call(module, "divided")
        script.call(module, SHORT, rows=1, line=("train.py", 50))
    script.call(first, "")  # part of a backward
    assert next(script.summary().lines()) == (
        f"Net: 2,000 of 2,004 calls divided; whole: first of its kind (2), {SHORT} (2)"
    )


def test_more_classes_than_three_are_two_and_the_others(script: Script) -> None:
    for number in range(5):
        for _ in range(2):
            script.call(ModuleSummary(f"Net{number}"), "divided" if number else "has a hook", number)
    lines = list(script.summary().lines())
    assert lines[:3] == [
        "Net4: 2 of 2 calls divided",
        "Net3: 2 of 2 calls divided",
        "3 other classes: 4 of 6 calls divided; whole: has a hook (2)",
    ]


def test_backwards_are_divided_as_the_calls_before_them(script: Script) -> None:
    module = ModuleSummary("Net")
    other = ModuleSummary("Critic")
    script.call(module, "divided", 50.0)  # with a trial: not timed
    script.call(other, "has a hook", 50.0)
    script.call(module, "divided", 3.0)
    script.call(other, "has a hook", 0.0)
    script.backward(1.0)  # 53 of 103 s before it were divided
    script.call(module, "divided", 1.0)
    script.call(other, "has a hook", 3.0)
    script.backward(4.0)  # one quarter
    script.backward(4.0)  # of the same graph
    run = script.records
    assert run.divided_seconds == pytest.approx(3 + 53 / 103 + 1 + 1 + 1)
    assert run.model_seconds == pytest.approx(3 + 1 + 1 + 3 + 4 + 4)
    for has_host_times, end in ((False, ""), (True, " (by the clock of the host)")):
        lines = list(script.summary(4, has_host_times=has_host_times).lines())
        assert lines[2] == f"41% of the time of model calls was divided{end}"


def test_data_that_are_read_alike_have_one_line() -> None:
    own = Decision("own", True)
    whole = Decision("whole", False, reason="the data set has a memory")
    readings = [reading("Photos", own, 160, 320), reading("Photos", own, 40, 64, 41), reading("Texts", whole, 8, 8)]
    summary = Summary(dict(enumerate(readings)), size=2)
    assert list(summary.lines()) == [
        "no calls to divide: the script has called no module with parameters",
        "Photos: each process reads its own samples (rank 0 read 200 of the 384 of the run)",
        "Texts: batches read whole on every process: the data set has a memory (rank 0 read 8 of the 8 of the run)",
        "Photos: random numbers of a sample depend on the epoch and its index, equal on every number of processes, and "
        "are not those of plain Python",
    ]


def test_explanation_names_lines_of_the_script(script: Script) -> None:
    module = ModuleSummary("Net")
    for _ in range(2):
        script.call(module, "divided", 0.25)
    assert list(script.summary().explanation()) == [
        "calls, by line of the script:",
        "  train.py:31 Net: 2 divided, 0.25 s, largest batch 32",
    ]
