"""Times, rows and decisions of the outermost calls of modules in a script, and advice on batch sizes.

Each call and each backward reads a clock twice, and waits for no accelerator: the times are those
of the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.view.in_step import Line
from samestep.view.view import ModuleSummary

_PUBLISH_SECONDS = 30.0
_CLASSES = 3  # with a line of their own
_REASONS = 3  # in a line
_MANY_SHORT = 0.1  # of the calls with gradients, from which on advice is given


@dataclass
class CallRecord:
    """Calls of modules of one class at one line of the script, with one decision.

    Attributes:
        module: class of the modules.
        line: line of the script.
        way: how the calls were computed.
        reason: why they were computed whole.
        has_gradients: whether gradients were enabled.
        calls: number of calls.
        seconds: their time, without that of the first one, which may include a trial.
        rows: rows of the largest batch.
    """

    module: str
    line: Line
    way: Literal["divided", "whole"]
    reason: str
    has_gradients: bool
    calls: int = 0
    seconds: float = 0.0
    rows: int = 0


class Records:
    """Records of the calls of a script.

    Args:
        publish: called about every 30 s, after a call.

    Attributes:
        calls: one record for each class, line and decision.
        accumulation: number of steps, by number of backwards before the step.
        divided_seconds: time of divided calls and their backwards.
        model_seconds: time of all calls and backwards.
    """

    def __init__(self, publish: Callable[[], None] | None = None) -> None:
        self.calls: dict[tuple[Any, ...], CallRecord] = {}
        self.accumulation: Counter[int] = Counter()
        self.divided_seconds = 0.0
        self.model_seconds = 0.0
        self._publish = publish
        self._published = perf_counter()
        self._backwards: Counter[Line] = Counter()  # since the last step; GANs have several lines
        self._span: tuple[float, float] | None = (
            None  # start of the first call, end of the last call or backward
        )
        self._first_seconds = 0.0
        self._forward = [0.0, 0.0]  # divided, and all, of the calls before a backward
        self._had_backward = False

    @property
    def run_seconds(self) -> float:
        """Time from the first call to the end of the last one, without first calls."""
        if self._span is None:
            return 0.0
        return self._span[1] - self._span[0] - self._first_seconds

    @contextmanager
    def steps_counted(self) -> Iterator[None]:
        """Count the backwards before each step of an optimizer, inside the block."""
        hooks = [
            register_optimizer_step_pre_hook(self._count_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count_step(self, *_: Any) -> None:
        if self._backwards:
            self.accumulation[max(self._backwards.values())] += 1

    def _end_step(self, *_: Any) -> None:
        self._backwards.clear()  # also those of a closure, as of LBFGS

    def begin_call(self, summary: ModuleSummary) -> tuple[float, int, int, int]:
        """Return the time and the counts before a call."""
        summary.last_reason = ""
        return perf_counter(), summary.divided, summary.watched, summary.whole

    def end_call(
        self, summary: ModuleSummary, begin: tuple[float, int, int, int], line: Line
    ) -> None:
        """Record a call, unless it was a part of another computation, such as a backward."""
        now = perf_counter()
        began, divided, watched, whole = begin
        way: Literal["divided", "whole"] = "whole"
        reason = summary.last_reason
        if summary.divided > divided:
            way = "divided"
            reason = ""
        elif summary.whole == whole and summary.watched > watched:
            reason = reason or "first of its kind"
        elif summary.whole == whole:
            return
        key = (summary.module, line, way, reason, torch.is_grad_enabled())
        record = self.calls.get(key)
        if record is None:
            record = self.calls[key] = CallRecord(*key)
        record.calls += 1
        record.rows = max(record.rows, summary.rows)
        self._add_call(record, began, now)
        if self._publish is not None and now - self._published > _PUBLISH_SECONDS:
            self._published = now
            self._publish()

    def _add_call(self, record: CallRecord, began: float, now: float) -> None:
        seconds = now - began
        is_divided = record.way == "divided"
        if record.has_gradients:
            if self._had_backward:
                self._forward = [0.0, 0.0]
                self._had_backward = False
            self._forward[0] += seconds * is_divided
            self._forward[1] += seconds
        self._extend(began, now)
        if record.calls == 1:
            self._first_seconds += seconds
            return
        record.seconds += seconds
        self.model_seconds += seconds
        self.divided_seconds += seconds * is_divided

    def add_backward(self, began: float, line: Line) -> None:
        """Record a backward that ends now; it is divided as the calls before it."""
        now = perf_counter()
        self._backwards[line] += 1
        self._had_backward = True
        divided, forward = self._forward
        self._extend(began, now)
        self.model_seconds += now - began
        if forward:
            self.divided_seconds += (now - began) * divided / forward

    def advice(self, size: int) -> Iterator[str]:
        """Yield a line if many calls have fewer rows than there are ranks."""
        trainings = [record for record in self.calls.values() if record.has_gradients]
        short = [record for record in trainings if record.reason.startswith("fewer rows than")]
        if size > 1 and sum(one.calls for one in short) > _MANY_SHORT * sum(
            one.calls for one in trainings
        ):
            ((backwards, _),) = self.accumulation.most_common(1) or [(1, 0)]
            yield advice(max(one.rows for one in short), backwards, size)

    def _extend(self, began: float, now: float) -> None:
        self._span = (began if self._span is None else self._span[0], now)


def lines_of_calls(records: Sequence[CallRecord]) -> Iterator[str]:
    """Yield a line for each of the classes that have taken most time, and one for the others."""
    classes: dict[str, list[CallRecord]] = {}
    for record in records:
        classes.setdefault(record.module, []).append(record)
    order = sorted(classes, key=lambda name: -sum(record.seconds for record in classes[name]))
    named = order if len(order) <= _CLASSES else order[: _CLASSES - 1]
    others = order[len(named) :]
    for name in named:
        yield f"{name}: {_counts(classes[name])}"
    if others:
        yield f"{len(others)} other classes: {_counts([record for name in others for record in classes[name]])}"


def _counts(records: Sequence[CallRecord]) -> str:
    """Return how many calls were divided, and why others were not."""
    reasons: Counter[str] = Counter()
    for record in records:
        reasons[record.reason] += record.calls
    divided = reasons.pop("", 0)
    text = f"{divided:,} of {divided + reasons.total():,} calls divided"
    if reasons:
        text += f"; whole: {', '.join(f'{reason} ({count:,})' for reason, count in reasons.most_common(_REASONS))}"
    return text


def advice(rows: int, backwards: int, size: int) -> str:
    """Return a batch size with which calls can be divided.

    Args:
        rows: rows of a call, fewer than ranks.
        backwards: backwards before a step.
        size: number of ranks.
    """
    if backwards == 1:
        return f"calls with {_rows(rows)} cannot be divided between {size} processes: a larger batch size can"
    factors = [factor for factor in range(2, backwards + 1) if backwards % factor == 0]
    factor = next((factor for factor in factors if rows * factor >= size), backwards)
    batch = rows * factor
    used = min(batch, size)
    processes = f"{size} processes" if used == size else f"{used} processes (--processes {used})"
    return (
        f"in place of batch size {rows} with accumulation {backwards}, use batch size {batch} with accumulation "
        f"{backwards // factor}: the same gradients without batch norm, and {_rows(-(-batch // used))} on each of "
        f"{processes}"
    )


def _rows(number: int) -> str:
    if number == 1:
        return "1 row"
    return f"{number:,} rows"
