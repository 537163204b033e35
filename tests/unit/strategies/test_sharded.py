"""Calls with parameters that are divided between real ranks, compared with the plain loop."""

from pathlib import Path
from typing import Any

import pytest

import samestep
from helpers.compared_calls import COMPARED, SEVERAL, TOLERANCE, require_forms, require_gradients, results_of_ranks
from helpers.forked_ranks import Job, run_jobs
from samestep.errors import SamestepError
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
        ("numbers_of_parameters", True),
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


def exact_job(ranks: int, strategy: str, replicate: int = 1) -> Job:
    return Job("run_exact", ranks, {"strategy": strategy, "replicate": replicate})


def test_exact_has_the_bits_of_one_process() -> None:
    jobs = [exact_job(1, "ddp"), exact_job(2, "fsdp"), exact_job(4, "hsdp", 2)]
    require_same_bits(*run_jobs("workers.sharded_state", *jobs, timeout=400))


@pytest.mark.slow
def test_exact_has_the_same_bits_on_more_ranks() -> None:
    jobs = [exact_job(8, "ddp"), exact_job(3, "fsdp"), exact_job(5, "fsdp")]
    require_same_bits(*run_jobs("workers.sharded_state", *jobs, timeout=400))


def require_same_bits(first: dict[str, list[Any]], *others: dict[str, list[Any]]) -> None:
    """Require equal results without failures, divided calls, and no complete parameters after the last call."""
    assert first["stale_graph"][0] == "RuntimeError"
    for name in ("training", "gradients_of_gradients", "halves"):
        assert isinstance(first[name][0], list), first[name][0]
        assert first[name][0][2] >= 4  # divided calls
        assert first[name][0][4:] in ([], [0])
    for found in others:
        for name, expected in first.items():
            assert found[name] == [expected[0]] * len(found[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPARED if name != "random_layers"])
def test_exact_gradients_are_those_of_the_plain_loop(exact: dict[str, list[Any]], name: str) -> None:
    require_gradients(exact[name], *COMPARED[name])


@pytest.fixture(scope="module")
def exact() -> dict[str, list[Any]]:
    names = [*COMPARED, *SEVERAL]
    return results_of_ranks(3, names, strategy="fsdp", reduction="exact")


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
    exact = [samestep.launch(sharded_state.losses_with, options, "exact", processes=size) for size in (1, 2)]
    assert exact[0] == exact[1]
    assert exact[0] == pytest.approx(plain, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"), [({"gather": "bf16"}, "gather='bf16'"), ({"name": "ddp", "hook": "bf16"}, "hook='bf16'")]
)
def test_exact_refuses_rounded_parameters_and_gradients(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SamestepError, match=text):
        samestep.launch(sharded_state.losses_with, options, "exact", processes=2)


@pytest.mark.slow
def test_shards_refuse_slices_of_products() -> None:
    with pytest.raises(SamestepError, match="tensor_slices=2 with strategy='fsdp'"):
        samestep.launch(sharded_state.losses_with, {}, "fast", 2, processes=2)
