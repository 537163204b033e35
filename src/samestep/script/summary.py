"""Summary of an unchanged script: calls of modules, their times, data, and advice on batch sizes.

Each call and each backward reads a clock twice, and waits for no accelerator: the times are those
of the host.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.data.own_rows import OwnRows
from samestep.distributed.collective_check import Line
from samestep.distributed.standard_streams import report_line
from samestep.view.view import ModuleSummary

_CLASSES = 3  # with a line of their own
_REASONS = 3  # in a line
_MANY_SHORT = 0.1  # of the calls with gradients, from which on advice is given


@dataclass
class CallRecord:
    """Calls of modules of one class at one line of the script, with one decision."""

    module: str  # class of the modules
    line: Line
    way: Literal["divided", "whole"]
    reason: str  # why they were computed whole
    has_gradients: bool  # whether gradients were enabled
    calls: int = 0
    seconds: float = 0.0  # without those of the first call, which may include a trial
    rows: int = 0  # of the largest batch


class Records:
    """Records of the calls of a script.

    Attributes:
        calls: one record for each class, line and decision.
        accumulation: number of steps, by number of backwards before the step.
        divided_seconds: time of divided calls and their backwards.
        model_seconds: time of all calls and backwards.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], CallRecord] = {}
        self.accumulation: Counter[int] = Counter()
        self.divided_seconds = 0.0
        self.model_seconds = 0.0
        self._backwards: Counter[Line] = Counter()  # since the last step; GANs have several lines
        self._forward = [0.0, 0.0]  # divided, and all, of the calls before a backward
        self._had_backward = False

    @contextmanager
    def steps_counted(self) -> Iterator[None]:
        """Count the backwards before each step of an optimizer, inside the block."""

        def count(*_: Any) -> None:
            if self._backwards:
                self.accumulation[max(self._backwards.values())] += 1

        def clear(*_: Any) -> None:
            self._backwards.clear()  # also those of a closure, as of LBFGS

        before = register_optimizer_step_pre_hook(count)
        after = register_optimizer_step_post_hook(clear)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def begin_call(self, summary: ModuleSummary) -> tuple[float, int, int, int]:
        """Return the time and the counts before a call."""
        summary.last_reason = ""
        return perf_counter(), summary.divided, summary.watched, summary.whole

    def end_call(
        self, summary: ModuleSummary, begin: tuple[float, int, int, int], line: Line
    ) -> None:
        """Record a call, unless it was a part of another computation, such as a backward."""
        began, divided, watched, whole = begin
        seconds = perf_counter() - began
        way: Literal["divided", "whole"] = "whole"
        reason = summary.last_reason
        if summary.divided > divided:
            way = "divided"
            reason = ""
        elif summary.whole == whole and summary.watched > watched:
            reason = reason or "first of its kind"
        elif summary.whole == whole:
            return
        # A script has few lines and decisions, so that the records stay few.
        key = (summary.module, line, way, reason, torch.is_grad_enabled())
        record = self.calls.get(key)
        if record is None:
            record = self.calls[key] = CallRecord(*key)
        record.calls += 1
        record.rows = max(record.rows, summary.rows)
        self._add_times(record, seconds)

    def _add_times(self, record: CallRecord, seconds: float) -> None:
        is_divided = record.way == "divided"
        if record.has_gradients:
            if self._had_backward:
                self._forward = [0.0, 0.0]
                self._had_backward = False
            self._forward[0] += seconds * is_divided
            self._forward[1] += seconds
        if record.calls == 1:  # with a trial, or the first use of kernels
            return
        record.seconds += seconds
        self.model_seconds += seconds
        self.divided_seconds += seconds * is_divided

    def add_backward(self, began: float, line: Line) -> None:
        """Record a backward that ends now; it is divided as the calls before it."""
        seconds = perf_counter() - began
        self._backwards[line] += 1
        self._had_backward = True
        divided, forward = self._forward
        self.model_seconds += seconds
        if forward:
            self.divided_seconds += seconds * divided / forward


@dataclass
class Reading:
    """How the loaders of one line of the script read."""

    dataset: str  # class of the data set
    line: Line
    state: OwnRows

    @property
    def how(self) -> str:
        """How batches are read; "" on one process."""
        decision = self.state.decision
        reason = "no batch with several samples that have an index"
        if self.state.ranks is None:
            return ""
        if decision is not None:
            if decision.how == "own":
                return "each process reads its own samples"
            reason = decision.reason
        return f"batches read whole on every process: {reason}"


@dataclass
class Summary:
    """What is divided in one rank.

    Attributes:
        readings: how the loaders of the script read.
        size: number of ranks.
        has_host_times: calls are computed on an accelerator, so times are those of the host.
        explains: whether the lines have details.
        records: times and lines of the calls.
    """

    readings: Mapping[Hashable, Reading]
    size: int = 1
    has_host_times: bool = False
    explains: bool = False
    records: Records = field(default_factory=Records, init=False)
    _start: str = field(default_factory=os.getcwd, init=False)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        records = list(self.records.calls.values())
        if self.size > 1 and not records:
            yield "no calls to divide: the script has called no module with parameters"
        yield from _lines_of_calls(records)
        yield from self._times()
        yield from self.data_lines()
        trainings = [record for record in records if record.has_gradients]
        short = [record for record in trainings if record.reason.startswith("fewer rows than")]
        share = sum(one.calls for one in short) / max(1, sum(one.calls for one in trainings))
        if self.size > 1 and share > _MANY_SHORT:
            ((backwards, _),) = self.records.accumulation.most_common(1) or [(1, 0)]
            yield advice(max(one.rows for one in short), backwards, self.size)
        divided = [record.rows for record in trainings if record.way == "divided"]
        if divided and self.size > 1:
            rows = max(divided)
            yield (
                f"the batch size is global: {rows:,} rows are {-(-rows // self.size):,} on each "
                f"process; {rows * self.size:,} would need the memory per process that {rows:,} "
                "need on one process"
            )

    def _times(self) -> Iterator[str]:
        records = self.records
        if self.size == 1 or not records.model_seconds:
            return
        if not records.divided_seconds:
            yield "no time of model calls was divided: not faster than one process"
            return
        share = records.divided_seconds / records.model_seconds
        text = f"{share:.0%} of the time of model calls was divided"
        if self.has_host_times:
            text += " (by the clock of the host)"
        yield text

    def data_lines(self) -> Iterator[str]:
        """Yield lines about how data sets are read."""
        counts: dict[tuple[str, str], Counter[str]] = {}
        for reading in self.readings.values():
            if reading.how:
                count = counts.setdefault((reading.dataset, reading.how), Counter())
                count.update(reading.state.samples)
        for (dataset, how), count in counts.items():
            samples = ""
            if count["needed"]:
                samples = f" (rank 0 read {count['read']:,} of the {count['needed']:,} of the run)"
            yield f"{dataset}: {how}{samples}"
        readings = self.readings.values()
        drawing = dict.fromkeys(one.dataset for one in readings if one.state.draws)
        if drawing:
            yield (
                f"{', '.join(drawing)}: random numbers of a sample depend on the epoch and its "
                "index, equal on every number of processes, and are not those of plain Python"
            )

    def explanation(self) -> Iterator[str]:
        """Yield lines about each kind of calls."""
        if self.records.calls:
            yield "calls, by line of the script:"
        for record in sorted(self.records.calls.values(), key=lambda one: -one.seconds):
            reason = f": {record.reason}" if record.reason else ""
            mode = "" if record.has_gradients else " without gradients"
            yield (
                f"  {self._place(record.line)} {record.module}: {record.calls:,} {record.way}"
                f"{mode}, {record.seconds:.2f} s, largest batch {record.rows:,}{reason}"
            )
        for backwards, steps in self.records.accumulation.most_common(1):
            yield f"  backwards before a step: {backwards} ({steps:,} steps)"

    def _place(self, line: Line) -> str:
        file, number = line
        relative = os.path.relpath(file, self._start)
        if relative.startswith(".."):
            return f"{file}:{number}"
        return f"{relative}:{number}"

    def report(self) -> None:
        """Print the lines on standard error."""
        lines = list(self.lines())
        if self.explains:
            lines += self.explanation()
        for line in dict.fromkeys(lines):
            report_line(f"samestep: {line}")


def _lines_of_calls(records: Sequence[CallRecord]) -> Iterator[str]:
    classes: dict[str, list[CallRecord]] = {}
    for record in records:
        classes.setdefault(record.module, []).append(record)
    order = sorted(classes, key=lambda name: -sum(record.seconds for record in classes[name]))
    named = order
    if len(order) > _CLASSES:
        named = order[: _CLASSES - 1]
    for name in named:
        yield f"{name}: {_counts(classes[name])}"
    others = order[len(named) :]
    if others:
        counts = _counts([record for name in others for record in classes[name]])
        yield f"{len(others)} other classes: {counts}"


def _counts(records: Sequence[CallRecord]) -> str:
    reasons: Counter[str] = Counter()
    for record in records:
        reasons[record.reason] += record.calls
    divided = reasons.pop("", 0)
    text = f"{divided:,} of {divided + reasons.total():,} calls divided"
    if reasons:
        most = [f"{reason} ({count:,})" for reason, count in reasons.most_common(_REASONS)]
        text += f"; whole: {', '.join(most)}"
    return text


def advice(rows: int, backwards: int, size: int) -> str:
    """Return a batch size with which calls can be divided.

    Args:
        rows: rows of a call, fewer than ranks.
        backwards: backwards before a step.
        size: number of ranks.
    """
    if backwards == 1:
        return (
            f"calls with {_rows(rows)} cannot be divided between {size} processes: a larger batch "
            "size can"
        )
    factors = [factor for factor in range(2, backwards + 1) if backwards % factor == 0]
    factor = next((factor for factor in factors if rows * factor >= size), backwards)
    batch = rows * factor
    used = min(batch, size)
    processes = f"{used} processes"
    if used < size:
        processes += f" (--processes {used})"
    return (
        f"in place of batch size {rows} with accumulation {backwards}, use batch size {batch} "
        f"with accumulation {backwards // factor}: the same gradients without batch norm, and "
        f"{_rows(-(-batch // used))} on each of {processes}"
    )


def _rows(number: int) -> str:
    if number == 1:
        return "1 row"
    return f"{number:,} rows"
