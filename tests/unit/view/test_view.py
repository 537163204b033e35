"""Words between ranks, and batches of which each rank keeps its own rows."""

import copy
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from helpers.forked_ranks import Job, run_jobs
from samestep.distributed.kernels import EqualKernels, kernel_settings
from samestep.errors import RankDesyncError
from samestep.view.messages import Action, Ranks
from samestep.view.region import Region, inside
from samestep.view.rows_tensor import Rows
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


@pytest.fixture(
    scope="module", params=[pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)]
)
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    jobs = [Job("run_difference", request.param, {"name": name}) for name in CODES]
    found = run_jobs("helpers.compared_calls", *jobs, timeout=400)
    return {job.arguments["name"]: codes for job, codes in zip(jobs, found, strict=True)}


@pytest.mark.parametrize("name", CODES)
def test_a_difference_is_the_same_error_on_all_ranks(results: dict[str, list[Any]], name: str) -> None:
    codes = results[name]
    assert len(codes) in (3, 4)
    assert len(set(codes)) == 1, codes
    assert codes[0] in CODES[name]


@pytest.mark.slow
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


def test_calls_inside_of_a_divided_call_change_nothing() -> None:
    before = kernel_settings()
    view: Any = SimpleNamespace(_equal_kernels=EqualKernels(is_needed=True))
    with inside(Region(4, 0, 2, exchange=None, draw_factors=())):  # type: ignore[arg-type]
        View.use_equal_kernels(view)
    assert kernel_settings() == before


SAMPLES, BATCH = 29, 7  # the last batch is one sample, which two ranks cannot divide


class _Gathers:
    """Counts the gathers of this rank."""

    def __init__(self) -> None:
        self.count = 0
        gather = Ranks.gather_rows

        def counted(*arguments: Any) -> torch.Tensor:
            self.count += 1
            return gather(*arguments)

        Ranks.gather_rows = counted  # type: ignore[method-assign]


def _train(model: nn.Module, batches: Iterable[Any], gathers: _Gathers) -> dict[str, list[Any]]:
    """Train for two epochs; return losses, gathers and kinds of the batches of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: dict[str, list[Any]] = {"losses": [], "gathers": [], "rows": []}
    for _ in range(2):
        for x, y in batches:
            before = gathers.count
            y[y == 3] = 255
            scores = model(x * 2 - 1)
            known = (y != 255).unsqueeze(1)
            dice = (scores.softmax(1) * known).square().sum() / known.sum()
            loss = nn.functional.cross_entropy(scores, y, ignore_index=255) + dice
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = ((scores.argmax(1) == y) & known[:, 0]).sum().item()
            found["losses"] += [loss.item(), right]
            found["gathers"].append(gathers.count - before)
            found["rows"].append([isinstance(x, Rows), isinstance(y, Rows)])
    return found


def train_on_batches(reduction: str) -> dict[str, Any]:
    """Train a plain model, and one with divided calls on batches of `samestep.loader`.

    Args:
        reduction: of the divided calls.
    """
    samestep.init(threads=1, reduction=reduction)  # type: ignore[arg-type]
    View.divides_small_calls = True
    View.output_limit = 1
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(SAMPLES, 3, 40, 40, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES, 40, 40), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    gathers = _Gathers()
    loader = DataLoader(TensorDataset(images, labels), BATCH)
    expected = _train(copy.deepcopy(model), loader, gathers)["losses"]
    model = samestep.parallel(model, reduction=reduction)  # type: ignore[type-var]
    found = _train(model, samestep.loader(loader), gathers)
    return {**found, "expected": expected}


STEPS = -(-SAMPLES // BATCH)


@pytest.mark.parametrize(
    ("ranks", "reduction"),
    [
        (2, "fast"),
        pytest.param(1, "fast", marks=pytest.mark.slow),
        pytest.param(3, "fast", marks=pytest.mark.slow),
        pytest.param(2, "exact", marks=pytest.mark.slow),
    ],
)
def test_large_tensors_of_batches_stay_divided_and_no_step_gathers_them(ranks: int, reduction: str) -> None:
    (found,) = run_jobs("unit.view.test_view", Job("train_on_batches", ranks, {"reduction": reduction}))
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-10)
    keeps = ranks > 1 and reduction == "fast"
    # The first batch of the loader and batches with fewer samples than ranks are read whole.
    divided = [keeps and step not in (0, STEPS - 1, 2 * STEPS - 1) for step in range(2 * STEPS)]
    assert found["rows"] == [[one, one] for one in divided]
    if keeps:
        assert [count for step, count in enumerate(found["gathers"]) if divided[step] and step > 1] == [0] * 6
