"""Lock step of the parts of a divided call."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from samestep.view.lockstep import AllHere, OutOfStep, Part, run_in_lockstep

VARIABLE = ContextVar("variable", default=0)


def run(*computes: Callable[[Part], Any]) -> list[Any]:
    parts = [Part(compute, nullcontext) for compute in computes]
    before = threading.active_count()
    try:
        return run_in_lockstep(parts, AllHere())
    finally:
        assert threading.active_count() == before


def test_each_part_gets_the_total() -> None:
    results = run(*(lambda part, n=n: part.total(torch.tensor([n])).item() for n in range(4)))
    assert results == [6, 6, 6, 6]


def test_parts_without_totals_run_to_their_ends() -> None:
    assert run(lambda part: 1, lambda part: 2) == [1, 2]


def test_gradients_go_to_all_parts() -> None:
    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()

    def compute(index: int) -> Callable[[Part], Any]:
        return lambda part: (part.total(x[index] ** 2) * (index + 1)).exp()

    results = run(*(compute(index) for index in range(3)))
    (gradient,) = torch.autograd.grad(results, x)
    (expected,) = torch.autograd.grad(sum(((x**2).sum() * (index + 1)).exp() for index in range(3)), x)
    assert torch.allclose(gradient, expected)


def test_a_part_may_write_into_its_total() -> None:
    assert run(*(lambda part, n=n: part.total(torch.ones(1)).mul_(n).item() for n in (1, 10))) == [2, 20]


def test_no_graph_without_grad() -> None:
    x = torch.ones(1, requires_grad=True)

    def compute(part: Part) -> bool:
        with torch.no_grad():
            return part.total(x).requires_grad

    assert run(compute, compute) == [False, False]


def test_one_part_runs_at_a_time_in_order() -> None:
    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("(")
        yield
        events.append(")")

    def compute(name: str) -> Callable[[Part], None]:
        def run_part(part: Part) -> None:
            events.append(name)
            part.total(torch.ones(1))
            events.append(name.upper())

        return run_part

    run_in_lockstep([Part(compute(name), turn) for name in "abc"], AllHere())
    assert "".join(events) == "(a)(b)(c)(A)(B)(C)"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_failing_part_ends_all(position: int) -> None:
    reached = []

    def compute(index: int) -> Callable[[Part], None]:
        def run_part(part: Part) -> None:
            part.total(torch.ones(1))
            if index == position:
                raise KeyError(index)
            part.total(torch.ones(1))
            reached.append(index)

        return run_part

    with pytest.raises(KeyError):
        run(*(compute(index) for index in range(3)))
    assert not reached


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, 3), (1, 1, 2)])
def test_other_numbers_of_totals_are_refused(counts: tuple[int, ...]) -> None:
    def compute(count: int) -> Callable[[Part], None]:
        return lambda part: [part.total(torch.ones(1)) for _ in range(count)] and None

    with pytest.raises(OutOfStep, match="numbers of values"):
        run(*(compute(count) for count in counts))


@pytest.mark.parametrize("others", [torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_other_shapes_and_dtypes_are_refused(others: torch.Tensor) -> None:
    with pytest.raises(OutOfStep, match="shapes or dtypes"):
        run(lambda part: part.total(torch.ones(1)), lambda part: part.total(others))


def test_a_script_that_catches_everything_ends_too() -> None:
    def stubborn(part: Part) -> None:
        for _ in range(3):
            try:
                part.total(torch.ones(1))
            except BaseException:  # as scripts do
                continue

    def fails(part: Part) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        run(stubborn, fails)


def test_a_failing_turn_ends_all() -> None:
    @contextmanager
    def turn() -> Iterator[None]:
        raise RuntimeError("no turn")
        yield

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no turn"):
        run_in_lockstep(
            [Part(lambda part: part.total(torch.ones(1)), nullcontext), Part(lambda part: None, turn)], AllHere()
        )
    assert threading.active_count() == before


def test_context_variables_of_the_caller_hold_and_those_of_a_part_are_its_own() -> None:
    token = VARIABLE.set(5)

    def compute(part: Part) -> int:
        VARIABLE.set(VARIABLE.get() + 1)
        part.total(torch.ones(1))
        return VARIABLE.get()

    try:
        assert run(compute, compute) == [6, 6]
        assert VARIABLE.get() == 5
    finally:
        VARIABLE.reset(token)
