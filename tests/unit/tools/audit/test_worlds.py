"""Grouping of events by world, and rules against false alarms that need no training."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from samestep.tools.audit.data_findings import data_findings
from samestep.tools.audit.events import EventWriter
from samestep.tools.audit.step_findings import differs, step_findings
from samestep.tools.audit.worlds import World, group_worlds, matching_passes, read_events

Event = dict[str, Any]


def process(pid: int, world: list[Any] | None = None) -> Event:
    return {"kind": "process", "pid": pid, "world": world, "program": "train.py"}


def update(step: int, value: float, gradient: float = 1.0, rate: float = 0.1, replicated: bool = True) -> Event:
    return {
        "kind": "update",
        "step": step,
        "optimizer": 0,
        "rates": [rate],
        "replicated": replicated,
        "hooked": False,
        "shapes": [["weight", [2]]],
        "values": {"weight": [value, value]},
        "gradients": {"weight": [gradient, gradient]},
        "line": f"train.py:{step}",
    }


def names(*ranks: list[Event]) -> list[str]:
    world = World(len(ranks), "train.py")
    world.ranks.update(enumerate(ranks))
    return [finding.name for finding in step_findings(world)]


def test_two_groups_of_one_command_are_two_worlds() -> None:
    events = [
        [process(rank), {"kind": "file"}]
        + [e for name in "ab" for e in ({"kind": "world", "world": [name, rank, 2]}, {"kind": "update", "in": name})]
        for rank in range(2)
    ]
    first, second = group_worlds(events)
    assert [e.get("in") for e in first.ranks[1]] == [None, "a"]  # with the event before the group
    assert [e["in"] for e in second.ranks[1]] == ["b"]


def test_process_without_group_is_a_world_and_its_worker_no_rank() -> None:
    worlds = group_worlds([[process(1), {"kind": "update"}], [process(2, ["a", 0, 1]), {"kind": "fetch_draws"}]])
    assert [world.size for world in worlds] == [1]


def test_forked_worker_belongs_to_its_rank() -> None:
    rank = [process(1), {"kind": "world", "world": ["a", 0, 1]}, {"kind": "update"}]
    [world] = group_worlds([rank, [process(2, ["a", 0, 1]), {"kind": "fetch_draws"}]])
    assert [e["kind"] for e in world.children[0]] == ["fetch_draws"]
    assert [e["kind"] for e in world.ranks[0]] == ["update"]


def test_passes_at_different_steps_do_not_match() -> None:
    world = World(2, "train.py")
    for rank in range(2):
        info = {"kind": "pass", "number": 1, "loader": 0, "line": "train.py:1", "dataset": "Data", "step": rank}
        world.ranks[rank] = [info]
    assert not list(matching_passes(world))
    assert not list(data_findings(World(1, "train.py", {0: []})))


def test_finding_of_different_parameters_and_of_gradients() -> None:
    assert names([update(0, 1.0)], [update(0, 1.1)]) == ["different-parameters"]
    assert names([update(0, 1.0)], [update(0, 1.0, gradient=2.0)]) == ["unreduced-gradients"]


def test_rounding_is_no_difference() -> None:
    assert names([update(0, 1.0)], [update(0, 1.0 + 1e-6, gradient=1.0 - 1e-6)]) == []


def test_averaged_parameters_have_no_finding() -> None:
    first = [update(0, 1.0, 1.0), update(1, 2.0, 1.0), update(2, 1.5)]
    second = [update(0, 1.0, 3.0), update(1, 3.0, 3.0), update(2, 1.5)]
    assert names(first, second) == []
    assert names(first[:2], second[:2]) == ["unreduced-gradients"]


def test_different_models_have_no_finding() -> None:
    first = [update(step, 1.0, 1.0, replicated=False) for step in range(4)]
    second = [update(step, 2.0, 2.0, rate=0.2, replicated=False) for step in range(4)]
    assert names(first, second) == []


def test_learning_rate_is_the_cause_of_different_parameters() -> None:
    assert names([update(0, 1.0), update(1, 2.0)], [update(0, 1.0, rate=0.2), update(1, 3.0, rate=0.2)]) == [
        "different-learning-rates"
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_compared(value: float) -> None:
    assert not differs([value, value], [1.0, 1.0])
    assert not differs(None, [1.0, 1.0])
    assert differs([1.0, 1.0], [2.0, 1.0])


def test_writer_of_a_forked_process_has_its_own_file(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path))
    writer.set_world("a", 0, 1)
    pid = os.fork()
    if pid == 0:
        writer.write("child")
        os._exit(0)
    os.waitpid(pid, 0)
    writer.write("parent")
    parent, child = read_events(tmp_path)
    assert [e["kind"] for e in parent] == ["process", "world", "parent"]
    assert [e["kind"] for e in child] == ["process", "child"]
    assert child[0]["world"] == ["a", 0, 1]


def test_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps(process(1)) + '\n{"kind": "upd')
    assert [len(events) for events in read_events(tmp_path)] == [1]
