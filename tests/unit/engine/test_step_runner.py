"""Steps on several ranks, and steps under each precision."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Perceptron, seeded
from samestep import launch
from samestep.config import StepConfig
from samestep.engine.engine import Engine
from samestep.errors import NonFiniteError
from samestep.launcher.launch import RankError
from workers import step as ranks_step

RANKS = [1, 3, 4]
ByRank = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> dict[int, ByRank]:
    """Return the results of every check by the number of ranks."""
    return {ranks: launch(ranks_step.run_checks, processes=ranks) for ranks in RANKS}


def all_ranks(results: dict[int, ByRank], check: str) -> list[Any]:
    """Return the results of `check` on all ranks of all worlds."""
    return [value for ranks in RANKS for value in results[ranks][check]]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_bad_loss_is_reported_equally_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    errors = all_ranks(results, f"stop {reduction} loss")
    assert {text.splitlines()[0] for text, _ in errors} == {
        "step 2: the loss of microbatches 1, 7 is not finite (loss nan; samples 102, 103, 116, 117, 118) [E_NONFINITE]"
    }
    assert len({text for text, _ in errors}) == 1


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_bad_gradient_is_reported_equally_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    errors = all_ranks(results, f"stop {reduction} gradient")
    assert {text.splitlines()[0] for text, _ in errors} == {
        "step 2: the gradient of parameter scale is not finite, from microbatches 1, 7 "
        "(samples 102, 103, 116, 117, 118) [E_NONFINITE]"
    }
    assert len({text for text, _ in errors}) == 1


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_stop_leaves_every_rank_unchanged(results: dict[int, ByRank], reduction: str, kind: str) -> None:
    assert all(unchanged for _, unchanged in all_ranks(results, f"stop {reduction} {kind}"))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_give_the_same_bits_on_any_number_of_ranks(results: dict[int, ByRank], kind: str) -> None:
    first, *others = all_ranks(results, f"skip exact {kind}")
    assert [skipped for *_, skipped in first[0]] == [False, True, False]
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_are_equal_on_all_ranks_with_fast_reduction(results: dict[int, ByRank], kind: str) -> None:
    for ranks in RANKS:
        first, *others = results[ranks][f"skip fast {kind}"]
        assert [skipped for *_, skipped in first[0]] == [False, True, False]
        assert all(other == first for other in others)


def test_loss_scaling_is_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    first, *others = all_ranks(results, "reduced scale")
    skipped = [flag for _, flag in first[0]]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert all(other == first for other in others)


def test_microbatches_draw_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    alone = results[1]["draw"][0]
    assert len(set(alone.values())) == ranks_step.MICROBATCHES
    for ranks in RANKS:
        together = [entry for drawn in results[ranks]["draw"] for entry in drawn.items()]
        assert len(together) == ranks_step.MICROBATCHES
        assert dict(together) == alone


def test_draws_between_steps_are_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    first, *others = all_ranks(results, "draw between steps")
    assert len(set(first)) == 3
    assert all(other == first for other in others)


def test_stop_request_of_one_rank_reaches_all_ranks(results: dict[int, ByRank]) -> None:
    assert all(stops == [False, True] for stops in all_ranks(results, "stop request"))


def test_save_request_of_rank_0_reaches_all_ranks(results: dict[int, ByRank]) -> None:
    assert all(saves == [False, True, False] for saves in all_ranks(results, "save request"))


@pytest.mark.parametrize("check", ["stopped evaluation", "stopped evaluation of a global loss"])
def test_stop_request_of_one_rank_ends_the_evaluation_on_all_ranks(results: dict[int, ByRank], check: str) -> None:
    first, *others = all_ranks(results, check)
    assert first[0] is None
    assert first[1]["samples"] == 3 * ranks_step.SIZE
    assert all(other == first for other in others)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_unused_parameter_is_refused_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    ((code, value),) = set(all_ranks(results, f"idle parameter {reduction}"))
    assert code == "E_UNUSED_PARAMETER"
    assert value.endswith(": idle")


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(
    ("used", "size"),
    [
        pytest.param([0], 16, id="first"),
        pytest.param([7], 16, id="last"),
        pytest.param([0, 2, 3, 5, 6], 16, id="all but the last of each rank"),
        pytest.param([1, 3, 4, 6, 7], 16, id="all but the first of each rank"),
        pytest.param([2, 5], 3, id="two of three microbatches with samples"),
    ],
)
def test_layer_used_by_some_microbatches_only_is_refused(used: list[int], size: int, reduction: str) -> None:
    with pytest.raises(RankError, match=r": sometimes.weight, sometimes.bias \[E_UNUSED_PARAMETER\]") as error:
        launch(ranks_step.use_layer_in, used, reduction, size, processes=3)
    assert error.value.exit_code == 2


World = samestep.World


def engine_of(world: World, precision: str, **options: Any) -> Engine:
    model = seeded(0, Perceptron, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Engine(
        model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(precision=precision, **options)
    )


def batch_for(world: World, scale: float = 1.0) -> Any:
    inputs, targets = random_data(16)
    return batch_of(world, inputs.float() * scale, targets, 4)


def weights_of(engine: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_low_precision_trains_like_full_precision(
    alone: World, precision: str, tolerance: float, reduction: str
) -> None:
    full, low = engine_of(alone, "fp32"), engine_of(alone, precision, reduction=reduction)
    start = weights_of(full)
    for _ in range(5):
        results = [engine.step(batch_for(alone)) for engine in (full, low)]
    assert results[1].loss == pytest.approx(results[0].loss, rel=tolerance)
    assert not torch.equal(weights_of(low), weights_of(full))
    torch.testing.assert_close(weights_of(low) - start, weights_of(full) - start, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_outputs_have_the_configured_precision(alone: World, precision: str, dtype: torch.dtype) -> None:
    types = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        types.append(outputs.dtype)
        return samestep.cross_entropy(outputs, targets)

    model = seeded(0, Perceptron, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(model, optimizer, loss, world=alone, config=StepConfig(precision=precision))
    engine.step(batch_for(alone))
    engine.evaluate([batch_for(alone)])
    assert set(types) == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_result_has_the_norm_of_the_unscaled_gradient(alone: World) -> None:
    full, low = engine_of(alone, "fp32"), engine_of(alone, "fp16")
    norms = [engine.step(batch_for(alone)).grad_norm for engine in (full, low)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


def test_unscaled_gradient_is_clipped(alone: World) -> None:
    engine = engine_of(alone, "fp16", clip_norm=0.01)
    before = weights_of(engine)
    engine.step(batch_for(alone))
    assert float((weights_of(engine) - before).norm()) == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_overflow_skips_the_step_and_reduces_the_scale(alone: World, non_finite: str) -> None:
    engine = engine_of(alone, "fp16", non_finite=non_finite)
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**40})
    before = weights_of(engine)
    result = engine.step(batch_for(alone))
    assert (result.skipped, result.step) == (True, 1)
    assert math.isfinite(result.loss)
    assert torch.equal(weights_of(engine), before)
    assert engine.scaler.get_scale() == 2.0**39
    while engine.step(batch_for(alone)).skipped:
        assert torch.equal(weights_of(engine), before)
    assert not torch.equal(weights_of(engine), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_non_finite_loss_is_an_error_in_every_precision(alone: World, precision: str) -> None:
    engine = engine_of(alone, precision)
    with pytest.raises(NonFiniteError, match="microbatches 0, 1, 2, 3 "):
        engine.step(batch_for(alone, math.inf))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_can_continue_after_a_caught_error(alone: World, precision: str) -> None:
    engine = engine_of(alone, precision)
    with pytest.raises(NonFiniteError):
        engine.step(batch_for(alone, math.nan))
    result = engine.step(batch_for(alone))
    assert (result.step, result.skipped) == (1, False)


def test_non_finite_loss_can_be_skipped_with_fp16(alone: World) -> None:
    engine = engine_of(alone, "fp16", non_finite="skip")
    before = weights_of(engine)
    assert engine.step(batch_for(alone, math.nan)).skipped
    assert torch.equal(weights_of(engine), before)
    assert not engine.step(batch_for(alone)).skipped


def test_overflow_without_loss_scaling_is_an_error(alone: World) -> None:
    """bf16 has the range of fp32 and uses no loss scaling."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(model, optimizer, functional.mse_loss, world=alone, config=StepConfig(precision="bf16"))
    inputs = torch.full((4, 1), 1e30)
    with pytest.raises(NonFiniteError, match="gradient"):
        engine.step(batch_of(alone, inputs, torch.full((4, 1), 1e15), 2))
