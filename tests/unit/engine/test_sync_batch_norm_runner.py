"""With `batch_norm: sync`, a step equals that of plain batch norm on the whole batch, on any number of ranks."""

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Fragile, Normed, Perceptron, Root, Watching, seeded
from samestep import launch
from samestep.config import StepConfig
from samestep.data.batch import Microbatch
from samestep.distributed.rng import seed_generators
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.errors import InputError, NonFiniteError, UnusedParameterError
from samestep.launcher.launch import RankError
from workers import sync as ranks_sync

World = samestep.World


class Deep(nn.Module):
    """Norm layers on two branches, one called twice; no dropout."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.norm, self.other = nn.BatchNorm1d(5, momentum=None), nn.BatchNorm1d(5, affine=False)
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if not self.recompute:
            return self._rest(hidden)
        outputs: torch.Tensor = checkpoint(self._rest, hidden, use_reentrant=False)
        return outputs

    def _rest(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.norm(hidden))
        hidden = self.norm(self.second(hidden)) + self.other(hidden) + hidden
        outputs: torch.Tensor = self.out(functional.silu(hidden))
        return outputs


class ConditionalNorm(nn.Module):
    """Skips the second norm layer if the first value of the first sample is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        hidden = self.second(hidden) if inputs[0, 0] > 0 else hidden * self.second.weight + self.second.bias
        outputs: torch.Tensor = self.out(hidden)
        return outputs


class RootNorm(nn.Sequential):
    """The gradient of a zero input is not finite before the norm layer."""

    def __init__(self) -> None:
        super().__init__(Root(), nn.BatchNorm1d(4), nn.Linear(4, 4))


class NormRoot(nn.Module):
    """The gradient of a zero input is not finite after the norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.root = nn.BatchNorm1d(6), Root()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.root(torch.where(inputs == 0, 0.0, self.norm(inputs)))
        return outputs


def engine_of(world: World, model: nn.Module, *, callbacks: Sequence[Callback] = (), **options: Any) -> Engine:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    config = StepConfig(**{"batch_norm": "sync", **options})
    return Engine(model, optimizer, samestep.cross_entropy, world=world, config=config, callbacks=callbacks)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def microbatch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("samestep-microbatch")]


def assert_close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


# --- results of a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_result_does_not_depend_on_microbatches(alone: World, microbatches: int, reduction: str) -> None:
    """The reference is plain batch norm on the whole batch; some microbatches are uneven or empty."""
    synchronized = engine_of(alone, seeded(0, Deep), reduction=reduction)
    whole = engine_of(alone, seeded(0, Deep), batch_norm="microbatch")
    for step, size in enumerate([19, 16, 3, 9]):
        result = synchronized.step(random_batch(alone, size, microbatches, seed=step))
        reference = whole.step(random_batch(alone, size, 1, seed=step))
        assert result.loss == pytest.approx(reference.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-12)
        gradients = [{n: p.grad for n, p in engine.model.named_parameters()} for engine in (synchronized, whole)]
        assert_close(*gradients, 1e-12)  # type: ignore[arg-type]
    assert_close(state_of(synchronized.model), state_of(whole.model), 1e-12)


def test_statistics_per_microbatch_give_another_loss(alone: World) -> None:
    """Control for the test above: the two kinds of statistics are distinguishable."""
    engines = [engine_of(alone, seeded(0, Deep), batch_norm=batch_norm) for batch_norm in ("sync", "microbatch")]
    losses = [engine.step(random_batch(alone, 19, 5)).loss for engine in engines]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_evaluation_uses_running_statistics(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep))
    engine.step(random_batch(alone, 19, 5))
    inputs, targets = random_data(19)
    values = engine.evaluate([random_batch(alone, 19, 5)])
    with torch.no_grad():
        expected = functional.cross_entropy(engine.model.eval()(inputs), targets)
    assert values["loss"] == pytest.approx(float(expected), rel=1e-12)


def test_model_without_norm_layers_uses_the_sequential_runner(alone: World) -> None:
    results = []
    for batch_norm in ("sync", "microbatch"):
        engine = engine_of(alone, seeded(0, Perceptron), batch_norm=batch_norm)
        engine.step(random_batch(alone, 19, 5))
        results.append(state_of(engine.model))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert microbatch_threads() == []


@pytest.mark.parametrize("frozen", [True, False])
def test_norm_layer_in_evaluation_mode_keeps_its_statistics(alone: World, frozen: bool) -> None:
    model = seeded(0, Deep)
    model.norm.train(not frozen)
    before = state_of(model)
    engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert torch.equal(model.norm.running_mean, before["norm.running_mean"]) == frozen
    assert not torch.equal(model.other.running_mean, before["other.running_mean"])


def test_sync_batch_norm_of_torch_works_on_a_cpu(alone: World) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(0, Deep))
    engine, plain = engine_of(alone, model), engine_of(alone, seeded(0, Deep))
    for _ in range(2):
        engine.step(random_batch(alone, 19, 5))
        plain.step(random_batch(alone, 19, 5))
    assert all(torch.equal(tensor, plain.model.state_dict()[name]) for name, tensor in state_of(model).items())


def test_activation_checkpointing_exchanges_statistics_again(alone: World) -> None:
    plain, recomputing = engine_of(alone, seeded(0, Deep)), engine_of(alone, Deep(recompute=True).double())
    recomputing.model.load_state_dict(plain.model.state_dict())
    for engine in (plain, recomputing):
        engine.step(random_batch(alone, 19, 5))
    parameters = {name: parameter.detach() for name, parameter in recomputing.model.named_parameters()}
    assert_close(parameters, {name: parameter.detach() for name, parameter in plain.model.named_parameters()}, 1e-12)


class TwoDropouts(nn.Sequential):
    """Dropout before and after an exchange; only dropout sets values to zero."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(6), nn.Dropout(), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 4))


def test_dropout_masks_equal_those_of_sequential_microbatches(alone: World) -> None:
    masks: dict[str, list[torch.Tensor]] = {}
    for batch_norm in ("sync", "microbatch"):
        model = seeded(0, TwoDropouts)
        zeros: dict[int, list[torch.Tensor]] = {1: [], 3: []}
        for index, outputs in zeros.items():
            model[index].register_forward_hook(
                lambda module, args, output, outputs=outputs: outputs.append(output == 0)
            )
        engine_of(alone, model, seed=3, batch_norm=batch_norm).step(random_batch(alone, 19, 4))
        masks[batch_norm] = [*zeros[1], *zeros[3]]
    assert len(masks["sync"]) == 8
    assert all(torch.equal(*pair) for pair in zip(masks["sync"], masks["microbatch"], strict=True))


def test_step_leaves_the_generator_unchanged(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with torch.random.fork_rng(devices=[]):
        seed_generators(1)
        expected = [float(torch.rand(())) for _ in range(2)]
        seed_generators(1)
        drawn = [float(torch.rand(()))]
        engine.step(random_batch(alone, 19, 5))
        assert [*drawn, float(torch.rand(()))] == expected


def test_other_buffers_are_averaged(alone: World) -> None:
    class WatchingNormed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(Watching(), nn.BatchNorm1d(4))

    inputs, targets = random_data(16)
    results = []
    for batch_norm in ("sync", "microbatch"):
        engine = engine_of(alone, seeded(0, WatchingNormed), batch_norm=batch_norm)
        for _ in range(2):
            engine.step(batch_of(alone, inputs, targets, 4))
        results.append(engine.model[0])
    assert int(results[0].forwards) == int(results[1].forwards) == 2
    torch.testing.assert_close(results[0].last, inputs.sum(0) / 4, rtol=1e-12, atol=1e-12)
    assert torch.equal(results[0].last, results[1].last)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_like_full_precision(alone: World, precision: str) -> None:
    inputs, targets = random_data(16)
    batch = batch_of(alone, inputs.float(), targets, 4)
    engines = [engine_of(alone, seeded(0, Deep, dtype=torch.float32), precision=p) for p in ("fp32", precision)]
    for _ in range(4):
        full, low = (engine.step(batch).loss for engine in engines)
    assert low == pytest.approx(full, rel=0.05)
    assert low != full


def test_overflow_of_the_scaler_skips_steps(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep, dtype=torch.float32), precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**32})
    inputs, targets = random_data(16)
    results = [engine.step(batch_of(alone, inputs.float(), targets, 4)) for _ in range(20)]
    assert results[0].skipped
    assert not results[-1].skipped


class Recorder(Callback):
    """Records the microbatch hooks and their threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.threads: dict[int, set[int]] = {}

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        self.calls.append(("begin", microbatch.number))
        self.threads.setdefault(microbatch.number, set()).add(threading.get_ident())

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        assert outputs.shape == (microbatch.size, 4)
        assert loss.count == microbatch.size
        self.calls.append(("end", microbatch.number))
        self.threads[microbatch.number].add(threading.get_ident())


def test_callbacks_receive_every_microbatch_in_order(alone: World) -> None:
    recorder = Recorder()
    engine_of(alone, seeded(0, Deep), callbacks=[recorder]).step(random_batch(alone, 19, 4))
    assert recorder.calls == [(word, number) for word in ("begin", "end") for number in range(4)]
    assert all(len(threads) == 1 for threads in recorder.threads.values())


# --- failures --------------------------------------------------------------------------------------


def test_failure_leaves_the_state_unchanged(alone: World) -> None:
    model = seeded(0, Fragile)
    engine, twin = engine_of(alone, model), engine_of(alone, seeded(0, Fragile))
    twin.number = 0  # the random numbers of the first engine
    inputs, targets = random_data(19)
    bad = inputs.clone()
    bad[9] = 2000
    for current in (engine, twin):
        current.step(batch_of(alone, inputs, targets, 5))
    before = state_of(model)
    with pytest.raises(ArithmeticError, match="too large"):
        engine.step(batch_of(alone, bad, targets, 5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for current in (engine, twin):
        current.step(batch_of(alone, inputs, targets, 5))
    assert all(torch.equal(tensor, twin.model.state_dict()[name]) for name, tensor in state_of(model).items())


def test_failure_leaves_no_thread(alone: World) -> None:
    inputs, targets = random_data(19)
    inputs[9] = 2000
    engine = engine_of(alone, seeded(0, Fragile))
    with pytest.raises(ArithmeticError):
        engine.step(batch_of(alone, inputs, targets, 5))
    assert microbatch_threads() == []


def test_skipped_norm_layer_is_reported_with_its_microbatches(alone: World) -> None:
    inputs, targets = random_data(16)
    inputs[:, 0] = 1
    inputs[4:8, 0] = -1
    engine = engine_of(alone, seeded(0, ConditionalNorm))
    with pytest.raises(InputError) as error:
        engine.step(batch_of(alone, inputs, targets, 4))
    assert error.value.code == "E_BATCH_NORM"
    assert error.value.value == ("microbatch 0 is at the forward of the norm layer 'second' while microbatch 1 is done")
    assert microbatch_threads() == []


def test_unused_parameter_is_refused(alone: World) -> None:
    model = seeded(0, Deep)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnusedParameterError, match=": idle"):
        engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert microbatch_threads() == []


def test_batch_of_one_sample_is_refused(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep))
    with pytest.raises(InputError, match=r"'norm' .* one value per channel") as error:
        engine.step(random_batch(alone, 1, 5))
    assert error.value.code == "E_BATCH_NORM"


def test_forward_bound_to_the_model_is_refused(alone: World) -> None:
    model = seeded(0, Deep)
    layer = model.second
    model.second = nn.Identity()
    model.extra = layer
    model.forward = lambda inputs: Deep.forward(model, inputs)
    with pytest.raises(InputError) as error:
        engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert error.value.code == "E_INCOMPATIBLE"


def test_non_finite_loss_is_traced_to_its_microbatches(alone: World) -> None:
    """All microbatches share the statistics, so all losses are bad; the error names the first cause."""
    engine = engine_of(alone, seeded(0, Deep))
    engine.step(random_batch(alone, 19, 8))
    before = state_of(engine.model)
    inputs, targets = random_data(19)
    inputs[[3, 17]] = math.nan
    with pytest.raises(NonFiniteError) as error:
        engine.step(batch_of(alone, inputs, targets, 8))
    assert error.value.value.startswith(
        "step 2: the loss of microbatches 1, 7 is not finite (loss nan; samples 102, 103,"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine.model).items())


@pytest.mark.parametrize("model", [RootNorm, NormRoot])
def test_non_finite_gradient_is_traced_to_its_microbatches(alone: World, model: type[nn.Module]) -> None:
    """Before the norm layer the gradients identify the microbatches; after it, the statistics of the exchange do."""
    engine = engine_of(alone, seeded(0, model))
    inputs, targets = random_data(19)
    inputs[[3, 17], 0] = 0
    with pytest.raises(NonFiniteError) as error:
        engine.step(batch_of(alone, inputs, targets, 8))
    assert "from microbatches 1, 7 (samples 102, 103, 116, 117, 118)" in error.value.value


def test_non_finite_step_can_be_skipped(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep), non_finite="skip")
    inputs, targets = random_data(19)
    inputs[3] = math.nan
    before = state_of(engine.model)
    assert engine.step(batch_of(alone, inputs, targets, 8)).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine.model).items())
    assert not engine.step(random_batch(alone, 19, 8)).skipped


RANKS = [1, 3, 4, 8]
ByRank = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> dict[int, ByRank]:
    """Return the results of every check by the number of ranks."""
    return {ranks: launch(ranks_sync.run_checks, processes=ranks) for ranks in RANKS}


def all_ranks(results: dict[int, ByRank], check: str) -> list[Any]:
    """Return the results of `check` on all ranks of all worlds."""
    return [value for ranks in RANKS for value in results[ranks][check]]


def test_bad_loss_is_traced_to_the_same_microbatches(results: dict[int, ByRank]) -> None:
    errors = all_ranks(results, "stop loss")
    (title,) = {text.splitlines()[0] for text, _ in errors}
    assert "microbatches 1, 7 " in title
    assert title.endswith("samples 102, 103, 116, 117, 118) [E_NONFINITE]")
    assert all(unchanged for _, unchanged in errors)


def test_bad_gradient_is_traced_to_the_same_microbatches(results: dict[int, ByRank]) -> None:
    errors = all_ranks(results, "stop gradient")
    (title,) = {text.splitlines()[0] for text, _ in errors}
    assert title.startswith("step 2: the gradient of parameter ")
    assert title.endswith("from microbatches 1, 7 (samples 102, 103, 116, 117, 118) [E_NONFINITE]")
    assert all(unchanged for _, unchanged in errors)


def test_small_batches_give_the_same_bits_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    states = [state for state, _ in all_ranks(results, "small batches")]
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize(("check", "other"), [("last microbatch", 7), ("second half", 4), ("last microbatch later", 7)])
def test_microbatches_of_other_ranks_at_other_layers_are_reported(
    results: dict[int, ByRank], check: str, other: int
) -> None:
    ((code, value),) = set(all_ranks(results, check))
    assert code == "E_BATCH_NORM"
    assert value == (
        "microbatch 0 is at the forward of the norm layer 'one' "
        f"while microbatch {other} is at the forward of the norm layer 'two'"
    )


@pytest.mark.parametrize("check", ["skipped layer", "skipped layer later"])
def test_skipped_layer_of_another_rank_is_reported(results: dict[int, ByRank], check: str) -> None:
    # The only microbatch of a rank does not begin its backward before all others; the first step is in lockstep.
    place = {1: "done", 3: "done", 4: "done", 8: "at the end of its forward" if "later" in check else "done"}
    for ranks in RANKS:
        error = f"microbatch 0 is at the forward of the norm layer 'two' while microbatch 7 is {place[ranks]}"
        assert set(results[ranks][check]) == {("E_BATCH_NORM", error)}


def test_models_of_different_shapes_are_refused(results: dict[int, ByRank]) -> None:
    for ranks in RANKS[1:]:
        assert set(results[ranks]["different models"]) == {"E_RANK_MISMATCH"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_batch_of_one_sample_is_refused_on_any_number_of_ranks(ranks: int) -> None:
    with pytest.raises(RankError, match="E_BATCH_NORM"):
        launch(ranks_sync.step_of_one_sample, processes=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_failure_of_one_microbatch_is_reported(ranks: int) -> None:
    with pytest.raises(RankError, match="too large"):
        launch(ranks_sync.failing_step, processes=ranks)
