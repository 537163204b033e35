"""Comparison of records: first difference, verdicts and tolerance."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from samestep.launcher.failure import Failure, RankError
from samestep.tools.verify.causes import FIXES, Cause
from samestep.tools.verify.compare import QUANTITIES, Comparison, Tolerance, accepted, compare
from samestep.tools.verify.texts import Printed
from samestep.tools.verify.trials import Record, join, read_record, steps_before

Note = dict[str, Any]


def batch(name: str, *, evaluation: bool = False) -> Note:
    return {
        "order": [1, 2],
        "size": 2,
        "inputs": f"i{name}",
        "rows": ["a", "b"],
        "targets": f"t{name}",
        "is_last": False,
        "evaluation": evaluation,
    }


def call(name: str, key: str, *, evaluation: bool = False) -> Note:
    return {"module": "Net", "key": key, "evaluation": evaluation, "arguments": f"a{name}", "outputs": f"o{name}"}


def step(number: int) -> Note:
    """Return the note of a rank on a step: an evaluation before it, and one training call."""
    return {
        "kind": "step",
        "step": number,
        "before": {"weight": f"w{number - 1}", "mean": f"m{number - 1}"},
        "batches": [batch(f"e{number}", evaluation=True), batch(str(number))],
        "calls": [call(f"e{number}", "evaluation 0", evaluation=True), call(str(number), "call 0")],
        "losses": [1.5],
        "rates": [0.1],
        "settings": [{"momentum": 0.9}],
        "gradients": {"weight": f"g{number}"},
        "norm": 1.0,
        "threads": 1,
        "after": {"weight": f"w{number}", "mean": f"m{number}"},
        "weights": {"weight": f"w{number}"},
        "optimizer": {"weight/momentum": f"o{number}"},
        "distances": {},
    }


FAILURE = Failure.of_exit(0, 1)


def record(ranks: int = 1, folder: Path = Path()) -> Record:
    """Return a record of three steps, equal on any number of ranks."""
    module = {"kind": "module", "name": "Net", "options": {"reduction": "exact"}, "before": {"weight": "w0"}}
    end = {"kind": "end", "step": 4, "before": None, "batches": [], "calls": [], "losses": [], "distances": {}}
    events = (module, *(step(number) for number in (1, 2, 3)), {**end, "eps": 1e-7})
    return Record(ranks, folder, tuple(copy.deepcopy(events) for _ in range(ranks)))


def changed(path: tuple[Any, ...], value: Any, ranks: int = 1) -> Comparison:
    """Compare a record with one in which one value of the last rank is different."""
    other = record(ranks)
    note: Any = other.events[-1]
    for key in path[:-1]:
        note = note[key]
    note[path[-1]] = value
    return compare(record(), other, None)


def test_equal_records_on_different_ranks_are_equal() -> None:
    result = compare(record(), record(2), None)
    assert result.first is None
    assert {result.verdict(quantity) for quantity in QUANTITIES} == {"bits", "-"}
    assert result.compared["order"] == 12
    assert [quantity for quantity in QUANTITIES if result.verdict(quantity) == "-"] == ["printed", "files"]


CHANGES = {
    "order": (("batches", 1, "order"), [2, 1], "order"),
    "inputs": (("batches", 1, "inputs"), "else", "inputs"),
    "targets": (("batches", 1, "targets"), "else", "targets"),
    "rates": (("rates",), [0.2], "rates"),
    "settings": (("settings",), [{"momentum": 0.8}], "rates"),
    "arguments": (("calls", 1, "arguments"), "else", "arguments"),
    "outputs": (("calls", 1, "outputs"), "else", "outputs"),
    "evaluation": (("calls", 0, "outputs"), "else", "evaluation"),
    "samples of the evaluation": (("batches", 0, "order"), [1, 3], "evaluation"),
    "loss": (("losses",), [1.25], "loss"),
    "gradients": (("gradients", "weight"), "else", "gradients"),
    "after": (("after", "weight"), "else", "weights"),
    "statistics": (("after", "mean"), "else", "buffers"),
    "optimizer": (("optimizer", "weight/momentum"), "else", "optimizer"),
}


@pytest.mark.parametrize(("ranks", "named"), [(1, None), (2, (0, 1))])
@pytest.mark.parametrize("name", CHANGES)
def test_change_is_located(name: str, ranks: int, named: tuple[int, int] | None) -> None:
    path, value, quantity = CHANGES[name]
    result = changed((2, *path), value, ranks)
    assert result.first is not None
    assert (result.first.step, result.first.quantity, result.first.ranks) == (2, quantity, named)
    assert [key for key in QUANTITIES if result.verdict(key) == "differs"] == [quantity]


def test_causes_precede_consequences() -> None:
    other = record()
    note: Any = other.events[0][2]
    note["after"]["weight"] = note["gradients"]["weight"] = note["calls"][1]["outputs"] = "else"
    note["calls"].append({**call("2", "call 1"), "arguments": "of the first call"})
    later: Any = other.events[0][3]
    later["before"]["weight"] = later["batches"][1]["inputs"] = "else"
    reference = record()
    reference.events[0][2]["calls"].append(call("2", "call 1"))  # type: ignore[attr-defined]
    first = compare(reference, other, None).first
    assert first is not None
    assert first.location == "step 2, call 2 of Net, outputs"


def test_missing_steps_and_other_calls_differ() -> None:
    other = record()
    fewer = Record(1, Path(), (other.events[0][:3] + other.events[0][4:],))
    first = compare(record(), fewer, None).first
    assert first is not None
    assert (first.stage, first.step) == ("steps", 3)
    other.events[0][1]["calls"].pop()  # type: ignore[attr-defined]
    first = compare(record(), other, None).first
    assert first is not None
    assert (first.stage, first.detail) == ("calls", "2 calls and 1")


def test_tolerance_is_measured_by_a_perturbed_run_and_at_most_half_of_the_digits() -> None:
    perturbed = record()
    for number, size in ((1, 1e-6), (2, 1e-3)):
        note: Any = perturbed.events[0][number]
        note["gradients"]["weight"] = "else"
        note["distances"] = {"gradients": {"weight": size}}
    tolerance = Tolerance.of(record(), perturbed)
    assert tolerance.at("gradients", 1) == pytest.approx(16e-6)
    assert tolerance.at("gradients", 3) == tolerance.at("printed", 3) == pytest.approx(math.sqrt(1e-7))
    assert tolerance.at("loss", 3) == pytest.approx(4e-7)
    for size, fails in [(1.5e-5, False), (1.7e-5, True), (math.inf, True)]:
        other = record()
        changed_note: Any = other.events[0][1]
        changed_note["gradients"]["weight"] = "else"
        changed_note["distances"] = {"gradients": {"weight": size}}
        result = compare(record(), other, tolerance)
        assert (result.first is not None) is fails
        assert result.verdict("gradients") == ("differs" if fails else "1.5e-05")


def test_measured_differences_are_accepted_if_those_in_float64_are_rounding() -> None:
    other = record()
    note: Any = other.events[0][1]
    note["losses"] = [1.6]
    failing, exact = compare(record(), other, Tolerance({}, 1e-7)), compare(record(), record(), None)
    assert accepted(failing, exact).first is None
    assert accepted(failing, failing).first is not None
    for loss, is_rounding in ((1.5 + 1e-10, True), (1.5 + 1e-8, False)):
        note["losses"] = [loss]
        small = compare(record(), other, Tolerance({}, 1e-16))
        assert small.first is not None
        assert (accepted(failing, small).first is None) is is_rounding
    note["losses"] = [1.6]
    note["batches"][1]["inputs"] = "else"  # has no distance
    assert accepted(compare(record(), other, Tolerance({}, 1e-7)), exact).first is not None


def test_printed_numbers_are_compared(tmp_path: Path) -> None:
    records = []
    for name, text in (("one", "accuracy 0.75\n"), ("other", "accuracy 0.76\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "output-0.log").write_text(text, encoding="utf-8")
        records.append(record(folder=tmp_path / name))
    one, other = records
    lines = one.texts["printed"]
    texts = {"printed": Printed(lines, lines)}
    result = compare(one, other, None, texts)
    assert result.first is not None
    assert result.first.location == "printed numbers: 'accuracy 0.75' and 'accuracy 0.76'"
    assert compare(one, one, None, texts).verdict("printed") == "bits"


def test_failure_on_ranks_is_compared_up_to_it() -> None:
    other = record(2)
    events = []
    for rank, notes in enumerate(other.events):
        unfinished = {**step(2), "kind": "unfinished"}
        for key in ("rates", "settings", "gradients", "after", "weights", "optimizer"):
            del unfinished[key]
        unfinished["batches"][1]["inputs"] = f"of rank {rank}" if rank else "i2"
        events.append((*notes[:2], unfinished))
    first = compare(record(), Record(2, Path(), tuple(events), failure=object()), None).first  # type: ignore[arg-type]
    assert first is not None
    assert first.location == "step 2, batch 2, inputs, ranks 0 and 1"


def test_killed_and_resumed_trials_are_joined(tmp_path: Path) -> None:
    killed, resumed = record(2), record()
    resumed.events[0][2]["calls"].pop(0)  # type: ignore[attr-defined]  # evaluated before the kill
    resumed.events[0][2]["batches"].pop(0)  # type: ignore[attr-defined]
    first = Record(2, Path(), tuple(notes[:2] for notes in killed.events))
    second = Record(1, Path(), (resumed.events[0][:1] + resumed.events[0][2:],))
    joined = join(first, second, "2, killed in step 2, then 1")
    assert (list(joined.steps), joined.resumed_at) == ([1, 2, 3], 2)
    assert compare(record(), joined, None).first is None


def test_step_of_a_resumption_is_found_by_its_weights(tmp_path: Path) -> None:
    import json

    lines = [json.dumps(note) for note in record().events[0]]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert steps_before(tmp_path, {"weight": "w2", "mean": "lost"}) == 2
    assert steps_before(tmp_path, {"weight": "w0"}) == 0


def test_incomplete_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "module"}\n{"kind": "st', encoding="utf-8")
    result = read_record(tmp_path, 2)
    assert result.events == (({"kind": "module"},), ())
    assert result.steps == {}


def test_every_cause_has_a_fix() -> None:
    assert set(FIXES) == set(Cause)


def test_failed_run_is_neither_equal_nor_different() -> None:
    whole = record()
    failed = Record(1, Path(), (whole.events[0][:2],), FAILURE)  # it ended in step 2
    for one, other in ((whole, failed), (failed, whole), (failed, failed)):
        comparison = compare(one, other, None)
        assert not comparison.holds
        assert {comparison.verdict(quantity) for quantity in QUANTITIES} == {"failed"}
    assert compare(whole, failed, None).first is None
    assert compare(whole, record(), None).holds
    with pytest.raises(RankError):
        failed.completed()
    assert whole.completed() is whole


def test_rounding_is_not_accepted_from_a_failed_run_in_float64() -> None:
    failed = Record(1, Path(), (), FAILURE)
    different = Comparison("2 processes")
    assert accepted(different, compare(failed, failed, None)) is different
