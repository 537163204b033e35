"""Calls with parameters that are divided between real ranks, compared with the plain loop."""

from pathlib import Path
from typing import Any

import pytest

import samestep
from helpers.compared_calls import COMPARED, SEVERAL, TOLERANCE, require_forms, require_gradients, results_of_ranks
from helpers.forked_ranks import Job, run_jobs
from workers import sharded_state

LAYOUTS = [
    pytest.param((2, "fsdp", 1)),
    pytest.param((3, "fsdp", 1), marks=pytest.mark.slow),
    pytest.param((4, "hsdp", 2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=[pytest.param(layout.values[0], marks=pytest.mark.slow) for layout in LAYOUTS])
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    ranks, strategy, replicate = request.param
    names = [*COMPARED, *SEVERAL, "a_row_that_fails"]
    return results_of_ranks(ranks, names, strategy=strategy, replicate=replicate)


@pytest.mark.parametrize("name", COMPARED)
def test_gradients_are_those_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_gradients(results[name], *COMPARED[name])


@pytest.mark.parametrize("name", SEVERAL)
def test_variants_have_the_gradients_of_the_plain_loop(results: dict[str, list[Any]], name: str) -> None:
    require_forms(results[name], SEVERAL[name], divided=3)


def test_a_row_that_fails_ends_no_rank(results: dict[str, list[Any]]) -> None:
    for found in results["a_row_that_fails"]:
        assert isinstance(found, list), found
        for deviation, divided, _ in found:
            assert deviation <= TOLERANCE
            assert divided >= 9


@pytest.fixture(scope="module", params=LAYOUTS)
def states(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    ranks, strategy, replicate = request.param
    job = Job("run", ranks, {"strategy": strategy, "replicate": replicate})
    (found,) = run_jobs("workers.sharded_state", job, timeout=400)
    return ranks // replicate, found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full_state", [True, True, True, True]),
        ("gradient_norm", True),
        ("stale_optimizer", "E_OPTIMIZER"),
        ("divided_twice", "E_INCOMPATIBLE"),
        ("replaced_parameter", "E_INCOMPATIBLE"),
        ("unused_backward", True),
    ],
)
def test_state_of_divided_parameters(states: tuple[int, dict[str, list[Any]]], name: str, expected: Any) -> None:
    for found in states[1][name]:
        assert found == expected, found


def test_each_rank_has_a_part(states: tuple[int, dict[str, list[Any]]]) -> None:
    shards, found = states
    rows = {2: [4, 4], 3: [3, 3, 2]}[shards]
    for rank, (elements, has_values, same_class, name) in enumerate(found["parts"]):
        assert elements == 6 * rows[rank % shards]
        assert (has_values, same_class, name) == (True, False, "Sequential")


@pytest.mark.slow
def test_checkpoints_resume_under_another_layout(tmp_path: Path) -> None:
    arguments = [("ddp", 1, 5, 2), ("fsdp", 1, 5, 3), ("hsdp", 2, 2, 4), ("ddp", 1, 4, 2)]
    plain = samestep.launch(sharded_state.train, tmp_path / "plain", "ddp", 1, 12, processes=1)
    losses: list[float] = []
    for strategy, replicate, steps, ranks in arguments:
        own = samestep.launch(sharded_state.train, tmp_path / "run", strategy, replicate, steps, processes=ranks)
        epoch = 4 * (len(losses) // 4)  # saved at the end of each epoch
        losses = losses[:epoch] + own
    assert losses == pytest.approx(plain, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"offload": True}, {"meta": True}])
def test_options_change_no_result(options: dict[str, Any]) -> None:
    plain, divided = (samestep.launch(sharded_state.losses_with, options, processes=size) for size in (1, 2))
    assert divided == pytest.approx(plain, abs=1e-10)
