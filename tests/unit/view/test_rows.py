"""`Rows` on real ranks: every operation of a table, consumers, messages of one rank alone, and divided calls."""

from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs
from workers.rows_table import CASES, FORMS

OPERATIONS = "workers.rows_operations"
CHECKS = "workers.rows_checks"
QUICK_FORMS = ("float16", "int64")


def differences(ranks: int, *forms: str) -> dict[str, Any]:
    """Return the cases that differ between plain tensors and Rows."""
    found: dict[str, Any] = {}
    jobs = [Job("run", ranks, {"form": form}) for form in forms]
    for form, result in zip(forms, run_jobs(OPERATIONS, *jobs, timeout=900), strict=True):
        assert result.pop("cases") == sum(case.form == form for case in CASES)
        found |= result
    return found


def test_table_has_enough_operations() -> None:
    assert sum(case.form == "" for case in CASES) >= 300


def test_operations_on_halves_and_integers_equal_those_of_plain_tensors() -> None:
    assert differences(2, *QUICK_FORMS) == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_equal_those_of_plain_tensors(ranks: int) -> None:
    assert differences(ranks, "") == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form not in QUICK_FORMS])
def test_operations_on_other_forms_equal_those_of_plain_tensors(form: str) -> None:
    assert differences(3 if form == "single rows" else 2, form) == {}


def test_checks_on_two_ranks() -> None:
    """One start of processes for all of them."""
    jobs = [Job(name, 2, {}) for name in ("alone", "in_thread", "divided")]
    alone, in_thread, divided = run_jobs(CHECKS, *jobs)
    assert alone == [["E_RANK_DESYNC"], ["E_RANK_DESYNC"]]
    code, text, shown, *later = in_thread
    assert code == "E_RUN"
    assert "in another thread than the main one" in text
    assert shown == "tensor(shape=[7, 3, 4, 5], dtype=torch.float32, rows 0 to 2 are here)"
    assert later == ["none", ""]
    assert divided["is divided"]
    assert divided["shape"] == [7, 3, 8, 8]
    assert divided["found"] == pytest.approx(divided["expected"], rel=1e-10)


@pytest.mark.slow
def test_consumers_see_the_whole_tensor() -> None:
    for name in ("torchmetrics", "torchvision", "matplotlib", "PIL"):
        pytest.importorskip(name)
    assert run_jobs(CHECKS, Job("consumers", 2, {})) == [[]]
