"""`samestep.parallel`: the module stays the same object for a script."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from helpers.compared_calls import results_of_ranks
from samestep.errors import InputError
from samestep.global_view import _require_arguments, no_sync, parallel_module
from samestep.view.ranks import require_microbatches

NAMES = [
    "copies",
    "pickled",
    "appearance",
    "hooks_of_the_outermost_module",
    "two_models",
    "deleted_models_are_freed",
    "arguments_are_not_kept_by_a_loss",
    "refusals",
    "places_where_calls_stay_whole",
]


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.slow), 4])
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return results_of_ranks(request.param, NAMES)


EXPECTED: dict[str, list[Any]] = {
    "copies": [True, True, True, 3, True, True, True, "Sequential"],
    "pickled": [False, True, True, True, [0, 0, 0], True],
    "appearance": [True] * 9,
    "hooks_of_the_outermost_module": [[11, [11, 11], 11], 2],
    "deleted_models_are_freed": [True] * 5,
    "arguments_are_not_kept_by_a_loss": [True, True],
    "refusals": ["E_TOO_MANY_RANKS", "E_VALUE", "E_WRAPPED_MODEL", "E_VALUE", "E_VALUE", "E_VALUE", True],
    "places_where_calls_stay_whole": [2, 0, 0, 0, 0, 0, 0, 1],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_module_is_the_same_for_a_script(results: dict[str, list[Any]], name: str) -> None:
    for found in results[name]:
        assert found == EXPECTED[name]


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [("ddp", "fast"), ("ddp", "exact"), pytest.param("fsdp", "exact", marks=pytest.mark.slow)],
)
def test_no_tensor_waits_for_the_garbage_collector(strategy: str, reduction: str) -> None:
    results = results_of_ranks(2, ["cycles_have_no_tensors"], strategy=strategy, reduction=reduction)
    assert results["cycles_have_no_tensors"] == [0, 0]


def test_sums_of_two_models_are_not_mixed_up(results: dict[str, list[Any]]) -> None:
    assert all(difference <= 1e-12 for difference in results["two_models"])


@pytest.mark.parametrize(("microbatches", "size"), [(None, 9), (4, 5), (1, 2)])
def test_more_ranks_than_microbatches_are_refused(microbatches: int | None, size: int) -> None:
    with pytest.raises(InputError) as caught:
        require_microbatches(microbatches, size)
    assert caught.value.code == "E_TOO_MANY_RANKS"


@pytest.mark.parametrize(("microbatches", "size"), [(None, 8), (9, 9), (16, 5), (None, 1)])
def test_a_microbatch_for_each_rank_is_enough(microbatches: int | None, size: int) -> None:
    require_microbatches(microbatches, size)


def test_scripted_modules_are_refused() -> None:
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InputError) as caught:
        _require_arguments(scripted, "fast", "global")
    assert caught.value.code == "E_WRAPPED_MODEL"


def test_no_sync_of_a_module_that_is_not_divided_changes_nothing() -> None:
    module = nn.Linear(2, 1)
    with no_sync(module):
        module(torch.ones(3, 2)).sum().backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [3.0]
    assert parallel_module(module) is None


def test_public_names() -> None:
    assert samestep.no_sync is no_sync


EXACT = """
import torch
import samestep
from samestep.global_view import parallel_module

model = samestep.parallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)), reduction="exact")
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
summary = parallel_module(model).summary
parallel_module(model).view.divides_small_calls = True
x = torch.randn(9, 3)
for rows in (1, 9, 9, 9, 5):
    state = torch.get_rng_state()
    model(x[:rows]).sum().backward()
    print(rows, summary.watched, summary.divided, summary.whole, torch.equal(state, torch.get_rng_state()))
with samestep.no_sync(model):
    model.zero_grad()
    model(x).sum().backward()
    print(bool(model[0].weight.grad.any()))
whole = samestep.parallel(torch.nn.Linear(3, 2), reduction="exact", microbatches=1)
print(parallel_module(whole), type(whole) is torch.nn.Linear)
"""


def test_exact_divides_on_one_process() -> None:
    """Into 8 microbatches; smaller batches are whole. Divided calls take one number of the script's stream.

    With one microbatch the module is its own.
    """
    done = subprocess.run([sys.executable, "-c", EXACT], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "1 True",
        "1 0 0 1 False",
        "9 1 1 1 False",
        "9 1 2 1 False",
        "9 1 3 1 False",
        "5 1 3 2 False",
        "True",
        "None True",
    ]
