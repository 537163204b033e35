"""Calls of a module that ranks divide, compared with the plain loop on real ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from helpers.compared_calls import COMPARED, SEVERAL, TOLERANCE, require_forms, require_gradients, results_of_ranks
from samestep.view.first_calls import _MOST_SURPRISES
from samestep.view.view import View

# Of replicas, besides the checks of all strategies.
REPLICATED = COMPARED | {
    "unused_parameters_with_no_sync": (11, 0),
    "gradients_zeroed_in_place_before_no_sync": (11, 0),
    "changed_module": (9, 0),
}
FORMS = SEVERAL | {"zeroed_inside_of_no_sync": 2}
OTHERS = [
    "gradients_of_inputs_start_no_sum",
    "gradients_are_buckets",
    "step_with_pending_gradients",
    "a_row_that_fails",
    "small_batches",
    "strict",
    "local_batch_norm",
]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.long)])
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return results_of_ranks(request.param, [*REPLICATED, *FORMS, *OTHERS])


@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_are_those_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_gradients(results[name], *REPLICATED[name])


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_each_form_are_those_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_forms(results[name], FORMS[name], divided=6)


def test_gradients_of_inputs_start_no_sum(results: dict[str, list[Any]]) -> None:
    for (difference, divided, _), counts in results["gradients_of_inputs_start_no_sum"]:
        assert difference <= TOLERANCE
        assert divided >= 6
        assert counts == [0, 1, 0, 1]


def test_gradients_are_memory_of_the_buckets(results: dict[str, list[Any]]) -> None:
    assert all(found == [True] * 6 for found in results["gradients_are_buckets"])


def test_a_step_with_pending_gradients_is_an_error(results: dict[str, list[Any]]) -> None:
    assert all(found == ["E_RUN", "none"] for found in results["step_with_pending_gradients"])


def test_a_row_that_fails_is_the_exception_of_the_script_on_all_ranks(results: dict[str, list[Any]]) -> None:
    for found in results["a_row_that_fails"]:
        assert isinstance(found, list), found
        for difference, divided, _ in found:
            assert difference <= TOLERANCE
            assert divided >= 3


def test_a_batch_with_fewer_rows_than_ranks_is_whole(results: dict[str, list[Any]]) -> None:
    assert all(found == [True, 0, 1] for found in results["small_batches"])


def test_strict_makes_whole_calls_errors(results: dict[str, list[Any]]) -> None:
    for found in results["strict"]:
        assert found == ["none", *["E_INCOMPATIBLE"] * 2, *["none"] * 3, "E_INCOMPATIBLE"]


def test_local_batch_norm(results: dict[str, list[Any]]) -> None:
    for divided, difference in results["local_batch_norm"]:
        assert divided == 2
        assert difference <= TOLERANCE


class Masked(nn.Module):
    """Mean over the columns of a mask, with other operations for a batch without padding, as of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.all()):
            return self.layer(rows)
        return self.layer(rows * mask)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    monkeypatch.setattr(View, "divides_small_calls", True)
    try:
        with samestep.init(device="cpu", reduction="exact"):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def calls(masks: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return output and gradient of each call of a new module under `exact`."""
    torch.manual_seed(1)
    module = samestep.parallel(Masked(), reduction="exact", microbatches=4)
    results = []
    for mask in masks:
        rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
        module.zero_grad()
        outputs = module(rows, mask)
        outputs.square().sum().backward()
        results.append([outputs.detach().clone(), module.layer.weight.grad.clone()])
    return results


def test_calls_are_decided_without_those_before_under_exact(exact: None) -> None:
    padded = torch.ones(16, 6)
    padded[3, 4:] = 0
    full = torch.ones(16, 6)
    every = padded.clone()
    every[:, 5] = 0
    many = [padded] * (_MOST_SURPRISES + 2)
    orders = ([full, *many, every, full], [padded, every, full, padded, full], [every, full])
    alone = {id(mask): calls([mask])[0] for mask in (padded, full, every)}
    for masks in orders:
        for number, (mask, result) in enumerate(zip(masks, calls(masks), strict=True)):
            for one, other in zip(result, alone[id(mask)], strict=True):
                assert torch.equal(one, other), number
