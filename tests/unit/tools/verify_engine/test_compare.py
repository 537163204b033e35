"""Comparison of records: first difference, verdicts and tolerance."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from samestep.tools.verify_engine.causes import FIXES, Cause
from samestep.tools.verify_engine.compare import QUANTITIES, Comparison, compare
from samestep.tools.verify_engine.trials import Record, join, read_record

Note = dict[str, Any]


def step(number: int, microbatches: tuple[int, ...] = (0, 1)) -> Note:
    """Return the note of a rank with some microbatches on one step."""
    return {
        "kind": "step",
        "step": number,
        "ends_epoch": number == 3,
        "order": [number * 4 + position for position in range(4)],
        "microbatches_of_batch": 2,
        "rates": [0.1],
        "settings": [{"momentum": 0.9}],
        "changed_state": [],
        "threads": 1,
        "before": {"weight": f"w{number - 1}", "mean": f"m{number - 1}"},
        "after": {"weight": f"w{number}", "mean": f"m{number}"},
        "gradients": {"weight": f"g{number}"},
        "optimizer": {"weight/momentum": f"o{number}"},
        "loss": 1.5,
        "count": 4,
        "distances": {},
        "microbatches": {
            str(microbatch): {
                "size": 2,
                "inputs": f"i{number}{microbatch}",
                "targets": f"t{number}{microbatch}",
                "rows": [],
                "modules": [
                    ["first", f"f{number}{microbatch}"],
                    ["second", f"s{number}{microbatch}"],
                    ["", f"x{number}{microbatch}"],
                ],
                "collectives": 0,
                "outputs": f"x{number}{microbatch}",
                "sum": 3.0,
                "count": 2.0,
            }
            for microbatch in microbatches
        },
    }


def record(ranks: int = 1) -> Record:
    """Return a record of three steps and an evaluation, equal on one rank and on two."""
    engine = {"kind": "engine", "parameters": ["weight"], "averaged": ["mean"], "modules": {}}
    evaluation = {"kind": "evaluation", "values": {"loss": 0.5, "samples": 30, "accuracy": 0.8}, "before": {}}
    owned: list[tuple[int, ...]] = [(0, 1)] if ranks == 1 else [(0,), (1,)]
    events = tuple((engine, *(step(number, own) for number in (1, 2, 3)), evaluation) for own in owned)
    return Record(ranks, Path(), copy.deepcopy(events))


def changed(path: tuple[Any, ...], value: Any, ranks: int = 2) -> Comparison:
    """Compare a record with one in which one value is different."""
    other = record(ranks)
    note: Any = other.events
    for key in path[:-1]:
        note = note[key]
    note[path[-1]] = value
    return compare(record(), other, None)


def test_equal_records_on_different_ranks_are_equal() -> None:
    result = compare(record(), record(2), None)
    assert result.first is None
    assert {result.verdict(quantity) for quantity in QUANTITIES} == {"bits"}
    assert result.compared["order"] == 12


CHANGES = {
    "order": (("order",), [9, 9, 9, 9], "order"),
    "rates": (("rates",), [0.2], "rates"),
    "settings": (("settings",), [{"momentum": 0.8}], "rates"),
    "microbatches": (("microbatches_of_batch",), 3, "order"),
    "gradients": (("gradients", "weight"), "else", "gradients"),
    "after": (("after", "weight"), "else", "weights"),
    "statistics": (("after", "mean"), "else", "buffers"),
    "optimizer": (("optimizer", "weight/momentum"), "else", "optimizer"),
    "loss": (("loss",), 1.25, "loss"),
    "count": (("count",), 5, "loss"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_on_all_ranks_is_located(name: str) -> None:
    path, value, quantity = CHANGES[name]
    result = changed((0, 2, *path), value, ranks=1)
    assert result.first is not None
    assert (result.first.step, result.first.quantity) == (2, quantity)
    assert [key for key in QUANTITIES if result.verdict(key) == "differs"] == [quantity]


@pytest.mark.parametrize("name", ["order", "rates", "gradients", "after", "optimizer"])
def test_change_on_one_rank_names_both_ranks(name: str) -> None:
    path, value, quantity = CHANGES[name]
    result = changed((1, 2, *path), value)
    assert result.first is not None
    assert (result.first.step, result.first.quantity, result.first.ranks) == (2, quantity, (0, 1))


@pytest.mark.parametrize("key", ["inputs", "targets", "sum", "count"])
def test_change_of_a_microbatch_names_the_microbatch(key: str) -> None:
    result = changed((1, 2, "microbatches", "1", key), 7.0)
    assert result.first is not None
    assert (result.first.step, result.first.microbatch) == (2, 1)


def test_first_module_with_a_different_output_is_named() -> None:
    other = record(2)
    microbatch = other.events[1][3]["microbatches"]["1"]
    microbatch["modules"] = [["first", "f31"], ["second", "else"], ["", "else"]]
    microbatch["outputs"] = "else"
    first = compare(record(), other, None).first
    assert first is not None
    assert first.location == "step 3, microbatch 1, module second, outputs"


def test_causes_precede_consequences() -> None:
    other = record(2)
    for rank, own in enumerate("01"):
        note = other.events[rank][2]
        note["after"]["weight"] = note["gradients"]["weight"] = "else"
        note["microbatches"][own]["inputs"] = note["microbatches"][own]["outputs"] = "else"
        other.events[rank][3]["before"]["weight"] = "else"
    first = compare(record(), other, None).first
    assert first is not None
    assert (first.step, first.stage, first.microbatch) == (2, "inputs", 0)


def test_missing_steps_and_evaluations_differ() -> None:
    other = record()
    fewer = Record(1, Path(), (other.events[0][:3] + other.events[0][4:],))
    first = compare(record(), fewer, 1e-3).first
    assert first is not None
    assert (first.stage, first.step) == ("steps", 3)
    first = compare(record(), Record(1, Path(), (other.events[0][:-1],)), 1e-3).first
    assert first is not None
    assert first.detail == "1 evaluations and 0"


def test_tolerance_applies_to_measured_distances_only() -> None:
    other = record()
    other.events[0][2]["gradients"]["weight"] = "else"
    assert compare(record(), other, 1e-6).first is not None  # not measured
    for size, fails in [(1e-7, False), (1e-5, True), (math.inf, True)]:
        other.events[0][2]["distances"] = {"gradients": {"weight": size}}
        result = compare(record(), other, 1e-6)
        assert (result.first is not None) is fails
        assert result.verdict("gradients") == ("differs" if fails else "1.0e-07")
        assert result.differences
    other.events[0][2]["order"][0] = 77
    assert compare(record(), other, 1.0).verdict("order") == "differs"


def test_one_sample_across_a_border_is_rounding_and_two_are_not() -> None:
    for accuracy, fails in [(0.8 + 1 / 30, False), (0.8 + 2 / 30, True)]:
        other = record()
        other.events[0][4]["values"]["accuracy"] = accuracy
        assert (compare(record(), other, 1e-6).first is not None) is fails
        assert compare(record(), other, None).first is not None


def test_number_of_samples_is_exact_under_any_tolerance() -> None:
    other = record()
    other.events[0][4]["values"]["samples"] = 31
    first = compare(record(), other, 1.0).first
    assert first is not None
    assert first.detail == "samples 30 and 31"


def test_killed_and_resumed_trials_are_joined() -> None:
    killed, resumed = record(2), record()
    for notes in killed.events:
        notes[2]["loss"] = 9.0  # the resumed trial repeats this step
    first = Record(2, Path(), tuple(notes[:3] for notes in killed.events))
    second = Record(1, Path(), (resumed.events[0][:1] + resumed.events[0][2:],))
    joined = join(first, second, "2, killed in step 2, then 1")
    assert list(joined.steps) == [1, 2, 3]
    assert joined.steps[1].microbatches.keys() == {0, 1}
    assert compare(record(), joined, None).first is None


def test_incomplete_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "engine"}\n{"kind": "st', encoding="utf-8")
    result = read_record(tmp_path, 2)
    assert result.events == (({"kind": "engine"},), ())
    assert result.steps == {}


def test_every_cause_has_a_fix() -> None:
    assert set(FIXES) == set(Cause)
