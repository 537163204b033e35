"""First difference between two trainings, from their events, and commands on another number of processes."""

from typing import Any

import pytest

from samestep.tools.audit.comparison import Trace, first_difference, reference_command
from samestep.tools.audit.worlds import World
from samestep.tools.verify.causes import Cause

Event = dict[str, Any]


def update(step: int, value: float, gradient: float = 1.0, rate: float = 0.1) -> Event:
    summaries = {"values": {"weight": [value, value]}, "gradients": {"weight": [gradient, gradient]}}
    return {"kind": "update", "step": step, "optimizer": 0, "rates": [rate], **summaries}


def trace(*ranks: list[Event]) -> Trace:
    world = World(len(ranks), "train.py")
    world.ranks.update(enumerate(ranks))
    return Trace.of(world)


def first(reference: Trace, other: Trace) -> tuple[str, int, str] | None:
    difference = first_difference(reference, other)
    return difference and (difference.quantity, difference.step, difference.cause)


def test_equal_runs_and_rounding() -> None:
    one = [update(step, 1.0 + step) for step in range(3)]
    assert first(trace(one), trace(one, one)) is None
    assert first(trace(one), trace([update(step, 1.0 + step + 1e-6) for step in range(3)])) is None


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (update(0, 1.1), ("parameters", 0, Cause.INITIAL_WEIGHTS)),
        (update(0, 1.0, gradient=2.0), ("gradients", 0, Cause.LOSS)),  # twice as long on twice as many ranks
        (update(0, 1.0, gradient=1.3), ("gradients", 0, Cause.UNKNOWN)),
        (update(0, 1.0, rate=0.2), ("learning rates", 0, Cause.LEARNING_RATE)),
    ],
)
def test_quantity_and_cause(event: Event, expected: tuple[str, int, str]) -> None:
    assert first(trace([update(0, 1.0)]), trace([event], [event])) == expected


def test_gradients_that_differ_between_ranks() -> None:
    other = trace([update(0, 1.0, gradient=1.3)], [update(0, 1.0, gradient=0.7)])
    assert first(trace([update(0, 1.0)]), other) == ("gradients", 0, Cause.UNSYNCHRONISED)


def test_number_of_steps_and_counts_of_evaluations() -> None:
    one, other = [update(0, 1.0), update(1, 1.0)], [update(0, 1.0)]
    assert first(trace(one), trace(other, other)) == ("number of steps", 1, Cause.LAST_BATCH)
    count = {"kind": "count", "step": 1, "samples": 19}
    reference, padded = trace([*one, {**count, "samples": 37}]), trace([*one, count], [*one, count])
    assert first(reference, padded) == ("evaluation", 1, Cause.EVALUATION)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "--nproc-per-node", "4", "train.py"], ["torchrun", "--nproc-per-node", "1", "train.py"]),
        (["torchrun", "--nproc_per_node=gpu", "train.py"], ["torchrun", "--nproc_per_node=1", "train.py"]),
        (
            ["accelerate", "launch", "--num_processes=4", "train.py"],
            ["accelerate", "launch", "--num_processes=1", "train.py"],
        ),
    ],
)
def test_number_of_processes_is_replaced(command: list[str], expected: list[str]) -> None:
    assert reference_command(command, 1) == expected
