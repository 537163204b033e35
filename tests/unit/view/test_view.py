"""Words between ranks: actions of ranks must be the same."""

from pathlib import Path
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs
from samestep.errors import RankDesyncError
from samestep.view.actions import Action
from samestep.view.view import ModuleSummary, View

CODES = {
    "other_action": {"E_RANK_DESYNC"},
    "other_backward": {"E_RANK_DESYNC"},
    "other_values": {"E_RANK_BATCH"},
    "other_kind": {"E_RANK_DESYNC", "E_RANK_MISMATCH", "E_RANK_BATCH"},
    "other_mode": {"E_RANK_SETTINGS"},
    "other_loss": {"E_RANK_MISMATCH"},
    "other_rate": {"E_RANK_SETTINGS"},
    "other_parameters": {"E_RANK_MISMATCH"},
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    jobs = [Job("run_difference", size, {"name": name}) for size in (3, 4) for name in CODES]
    found = run_jobs("helpers.compared_calls", *jobs, timeout=400)
    return {f"{job.arguments['name']} {job.ranks}": codes for job, codes in zip(jobs, found, strict=True)}


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", CODES)
def test_a_difference_is_the_same_error_on_all_ranks(results: dict[str, list[Any]], name: str, size: int) -> None:
    codes = results[f"{name} {size}"]
    assert len(codes) == size
    assert len(set(codes)) == 1, codes
    assert codes[0] in CODES[name]


@pytest.mark.parametrize(("name", "code"), [("end_of_one_rank", "E_RANK_DESYNC"), ("end_of_all_ranks", "none")])
def test_ends(tmp_path: Path, name: str, code: str) -> None:
    run_jobs("helpers.compared_calls", Job("run_end", 4, {"name": name, "folder": str(tmp_path)}))
    assert [path.read_text() for path in tmp_path.iterdir()] == [code] * 4


def word(action: int, number: int, *fields: int) -> list[int]:
    return [action, number, *fields]


def require_same(*words: list[int]) -> None:
    View.require_same_action(None, words)


def test_words_of_one_action_may_have_other_fields() -> None:
    require_same(word(Action.END_CALL, 7, 1, 2), word(Action.END_CALL, 7, 3, 4))


@pytest.mark.parametrize(
    "others",
    [[(Action.STEP, 7), (Action.BACKWARD, 7)], [(Action.BACKWARD, 7), (Action.STEP, 7)], [(Action.BACKWARD, 8)]],
)
def test_words_of_other_actions_are_errors(others: list[tuple[int, int]]) -> None:
    with pytest.raises(RankDesyncError) as caught:
        require_same(word(Action.BACKWARD, 7), *[word(*other) for other in others])
    assert caught.value.code == "E_RANK_DESYNC"


def test_reasons_are_kept_once_in_order() -> None:
    summary = ModuleSummary("Linear")
    for reason in ("a", "b", "a"):
        summary.add_reason(reason)
    assert summary.reasons == ["a", "b"]
