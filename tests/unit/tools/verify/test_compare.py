"""The first difference is the cause of the others, and only what is allowed passes."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from samestep.tools.verify.causes import ADVICE, Cause, where
from samestep.tools.verify.compare import compare
from samestep.tools.verify.difference import QUANTITIES, Comparison
from samestep.tools.verify.record import Record, joined, read_record

Notes = dict[str, Any]


def step(number: int, shards: tuple[int, ...] = (0, 1)) -> Notes:
    """A step as a rank with some shards notes it."""
    return {
        "kind": "step",
        "step": number,
        "ends_epoch": number == 3,
        "order": [number * 4 + place for place in range(4)],
        "shards_of_batch": 2,
        "rates": [0.1],
        "settings": [{"momentum": 0.9}],
        "remembered": [],
        "threads": 1,
        "before": {"weight": f"w{number - 1}", "mean": f"m{number - 1}"},
        "after": {"weight": f"w{number}", "mean": f"m{number}"},
        "gradients": {"weight": f"g{number}"},
        "optimizer": {"weight/momentum": f"o{number}"},
        "loss": 1.5,
        "count": 4,
        "distances": {},
        "shards": {
            str(shard): {
                "size": 2,
                "inputs": f"i{number}{shard}",
                "targets": f"t{number}{shard}",
                "rows": [],
                "modules": [["first", f"f{number}{shard}"], ["second", f"s{number}{shard}"], ["", f"x{number}{shard}"]],
                "collectives": 0,
                "outputs": f"x{number}{shard}",
                "sum": 3.0,
                "count": 2.0,
            }
            for shard in shards
        },
    }


def record(ranks: int = 1) -> Record:
    """A record of three steps and an evaluation that is the same on one rank and on two."""
    engine = {"kind": "engine", "parameters": ["weight"], "averaged": ["mean"], "modules": {}}
    evaluation = {"kind": "evaluation", "values": {"loss": 0.5, "samples": 30, "accuracy": 0.8}, "before": {}}
    owned: list[tuple[int, ...]] = [(0, 1)] if ranks == 1 else [(0,), (1,)]
    events = tuple((engine, *(step(number, own) for number in (1, 2, 3)), evaluation) for own in owned)
    return Record(ranks, Path(), copy.deepcopy(events))


def changed(path: tuple[Any, ...], value: Any, ranks: int = 2) -> Comparison:
    """What is found when one value of the second of two records is another."""
    other = record(ranks)
    place: Any = other.events
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return compare(record(), other, None)


def test_the_same_is_the_same_on_any_ranks() -> None:
    found = compare(record(), record(2), None)
    assert found.first is None
    assert {found.verdict(quantity) for quantity in QUANTITIES} == {"bits"}
    assert found.compared["order"] == 12


CHANGES = {
    "order": (("order",), [9, 9, 9, 9], "order"),
    "rates": (("rates",), [0.2], "rates"),
    "settings": (("settings",), [{"momentum": 0.8}], "rates"),
    "shards": (("shards_of_batch",), 3, "order"),
    "gradients": (("gradients", "weight"), "else", "gradients"),
    "after": (("after", "weight"), "else", "weights"),
    "statistics": (("after", "mean"), "else", "buffers"),
    "optimizer": (("optimizer", "weight/momentum"), "else", "optimizer"),
    "loss": (("loss",), 1.25, "loss"),
    "count": (("count",), 5, "loss"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_all_ranks_is_found_where_it_is(name: str) -> None:
    path, value, quantity = CHANGES[name]
    found = changed((0, 2, *path), value, ranks=1)
    assert found.first is not None
    assert (found.first.step, found.first.quantity) == (2, quantity)
    assert [each for each in QUANTITIES if found.verdict(each) == "differs"] == [quantity]


@pytest.mark.parametrize("name", ["order", "rates", "gradients", "after", "optimizer"])
def test_a_change_on_one_rank_names_both(name: str) -> None:
    path, value, quantity = CHANGES[name]
    found = changed((1, 2, *path), value)
    assert found.first is not None
    assert (found.first.step, found.first.quantity, found.first.ranks) == (2, quantity, (0, 1))


@pytest.mark.parametrize("key", ["inputs", "targets", "sum", "count"])
def test_a_change_of_a_shard_names_it(key: str) -> None:
    found = changed((1, 2, "shards", "1", key), 7.0)
    assert found.first is not None
    assert (found.first.step, found.first.shard) == (2, 1)


def test_the_first_module_whose_output_differs_is_named() -> None:
    other = record(2)
    shard = other.events[1][3]["shards"]["1"]
    shard["modules"] = [["first", "f31"], ["second", "else"], ["", "else"]]
    shard["outputs"] = "else"
    first = compare(record(), other, None).first
    assert first is not None
    assert where(first) == "step 3, shard 1, module second, outputs"


def test_causes_come_before_their_consequences() -> None:
    other = record(2)
    for rank, own in enumerate("01"):
        note = other.events[rank][2]
        note["after"]["weight"] = note["gradients"]["weight"] = "else"
        note["shards"][own]["inputs"] = note["shards"][own]["outputs"] = "else"
        other.events[rank][3]["before"]["weight"] = "else"
    first = compare(record(), other, None).first
    assert first is not None
    assert (first.step, first.stage, first.shard) == (2, "inputs", 0)


def test_steps_that_are_missing_and_evaluations_that_differ() -> None:
    other = record()
    fewer = Record(1, Path(), (other.events[0][:3] + other.events[0][4:],))
    first = compare(record(), fewer, 1e-3).first
    assert first is not None
    assert (first.stage, first.step) == ("steps", 3)
    first = compare(record(), Record(1, Path(), (other.events[0][:-1],)), 1e-3).first
    assert first is not None
    assert first.detail == "1 evaluations and 0"


def test_tolerance_takes_measured_distances_and_nothing_else() -> None:
    other = record()
    other.events[0][2]["gradients"]["weight"] = "else"
    assert compare(record(), other, 1e-6).first is not None  # nobody measured it
    for size, fails in [(1e-7, False), (1e-5, True), (math.inf, True)]:
        other.events[0][2]["distances"] = {"gradients": {"weight": size}}
        found = compare(record(), other, 1e-6)
        assert (found.first is not None) is fails
        assert found.verdict("gradients") == ("differs" if fails else "1.0e-07")
        assert found.seen is not None
    other.events[0][2]["order"][0] = 77
    assert compare(record(), other, 1.0).verdict("order") == "differs"


def test_one_sample_on_the_border_is_rounding_and_two_are_not() -> None:
    for accuracy, fails in [(0.8 + 1 / 30, False), (0.8 + 2 / 30, True)]:
        other = record()
        other.events[0][4]["values"]["accuracy"] = accuracy
        assert (compare(record(), other, 1e-6).first is not None) is fails
        assert compare(record(), other, None).first is not None


def test_samples_are_counted_under_any_tolerance() -> None:
    other = record()
    other.events[0][4]["values"]["samples"] = 31
    first = compare(record(), other, 1.0).first
    assert first is not None
    assert first.detail == "samples 30 and 31"


def test_what_was_killed_and_resumed_is_one_record() -> None:
    killed, resumed = record(2), record()
    for notes in killed.events:
        notes[2]["loss"] = 9.0  # the step is made again
    first = Record(2, Path(), tuple(notes[:3] for notes in killed.events))
    second = Record(1, Path(), (resumed.events[0][:1] + resumed.events[0][2:],))
    whole = joined(first, second, "2, killed in step 2, then 1")
    assert list(whole.steps) == [1, 2, 3]
    assert whole.steps[1].shards.keys() == {0, 1}
    assert compare(record(), whole, None).first is None


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "engine"}\n{"kind": "st', encoding="utf-8")
    found = read_record(tmp_path, 2)
    assert found.events == (({"kind": "engine"},), ())
    assert found.steps == {}


def test_every_cause_has_a_way_out() -> None:
    assert set(ADVICE) == set(Cause)
