"""With `batch_norm: sync` a step is what one process does with the whole batch, whatever its shards."""

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import samestep
from batches import batch_of, random_batch, random_data
from models import Fragile, Normed, Perceptron, Root, Watching, seeded
from samestep.config import StepRules
from samestep.data.batch import Shard
from samestep.engine import observer as observing
from samestep.engine.loss import Loss
from samestep.engine.observer import Observer
from samestep.engine.step import Engine
from samestep.errors import InputError, NonFiniteError
from samestep.runtime.random_state import seed_generators

World = samestep.World


class Deep(nn.Module):
    """Norms on two branches, one of them twice, without anything random."""

    def __init__(self, *, kept: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.norm, self.other = nn.BatchNorm1d(5, momentum=None), nn.BatchNorm1d(5, affine=False)
        self.kept = kept

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.kept:
            return self._rest(hidden)
        outputs: torch.Tensor = checkpoint(self._rest, hidden, use_reentrant=False)
        return outputs

    def _rest(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.norm(hidden))
        hidden = self.norm(self.second(hidden)) + self.other(hidden) + hidden
        outputs: torch.Tensor = self.out(functional.silu(hidden))
        return outputs


class Moody(nn.Module):
    """Skips its second norm layer for shards whose first sample begins with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        hidden = self.second(hidden) if inputs[0, 0] > 0 else hidden * self.second.weight + self.second.bias
        outputs: torch.Tensor = self.out(hidden)
        return outputs


class RootNorm(nn.Sequential):
    """Where an input is zero, its gradient before the norm layer is not finite."""

    def __init__(self) -> None:
        super().__init__(Root(), nn.BatchNorm1d(4), nn.Linear(4, 4))


class NormRoot(nn.Module):
    """Where the second feature of a sample is zero, the gradient behind the norm layer is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.root = nn.BatchNorm1d(6), Root()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.root(torch.where(inputs == 0, 0.0, self.norm(inputs)))
        return outputs


def engine_of(world: World, model: nn.Module, **rules: Any) -> Engine:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    rules = {"batch_norm": "sync", **rules}
    return Engine(model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(**rules))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def shard_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("samestep-shard")]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


# --- what a step computes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("shards", [1, 2, 5, 8])
def test_shards_do_not_matter(alone: World, shards: int, reduction: str) -> None:
    """One process with plain batch norm on the whole batch; also with uneven shards and with empty ones."""
    ours = engine_of(alone, seeded(0, Deep), reduction=reduction)
    whole = engine_of(alone, seeded(0, Deep), batch_norm="shard")
    for step, size in enumerate([19, 16, 3, 9]):
        mine = ours.step(random_batch(alone, size, shards, seed=step))
        reference = whole.step(random_batch(alone, size, 1, seed=step))
        assert mine.loss == pytest.approx(reference.loss, rel=1e-12)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=1e-12)
        gradients = [{n: p.grad for n, p in engine.model.named_parameters()} for engine in (ours, whole)]
        assert_same(*gradients, 1e-12)  # type: ignore[arg-type]
    assert_same(state_of(ours.model), state_of(whole.model), 1e-12)


def test_statistics_by_shard_are_something_else(alone: World) -> None:
    """Else the test above would hold of a program that does not tell them apart."""
    engines = [engine_of(alone, seeded(0, Deep), batch_norm=word) for word in ("sync", "shard")]
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


def test_without_norm_layers_it_is_the_ordinary_step(alone: World) -> None:
    results = []
    for word in ("sync", "shard"):
        engine = engine_of(alone, seeded(0, Perceptron), batch_norm=word)
        engine.step(random_batch(alone, 19, 5))
        results.append(state_of(engine.model))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert shard_threads() == []


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_norm_keeps_its_statistics(alone: World, frozen: bool) -> None:
    model = seeded(0, Deep)
    model.norm.requires_grad_(not frozen)
    before = state_of(model)
    engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert torch.equal(model.norm.running_mean, before["norm.running_mean"]) == frozen
    assert not torch.equal(model.other.running_mean, before["other.running_mean"])


def test_a_model_all_of_whose_norms_are_frozen_takes_the_ordinary_step(alone: World) -> None:
    model = seeded(0, Normed)
    model[1].requires_grad_(False)
    engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert shard_threads() == []


def test_torchs_sync_batch_norm_works_on_a_cpu(alone: World) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(0, Deep))
    engine, plain = engine_of(alone, model), engine_of(alone, seeded(0, Deep))
    for _ in range(2):
        engine.step(random_batch(alone, 19, 5))
        plain.step(random_batch(alone, 19, 5))
    assert all(torch.equal(tensor, plain.model.state_dict()[name]) for name, tensor in state_of(model).items())


def test_what_is_computed_anew_in_backward_meets_again(alone: World) -> None:
    kept, anew = engine_of(alone, seeded(0, Deep)), engine_of(alone, Deep(kept=False).double())
    anew.model.load_state_dict(kept.model.state_dict())
    for engine in (kept, anew):
        engine.step(random_batch(alone, 19, 5))
    found = {name: parameter.detach() for name, parameter in anew.model.named_parameters()}
    assert_same(found, {name: parameter.detach() for name, parameter in kept.model.named_parameters()}, 1e-12)


class Dropping(nn.Sequential):
    """Draws before and after it meets; nothing but dropout makes a zero."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(6), nn.Dropout(), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 4))


def test_shards_draw_what_they_draw_alone(alone: World) -> None:
    masks: dict[str, list[torch.Tensor]] = {}
    for word in ("sync", "shard"):
        model = seeded(0, Dropping)
        seen: dict[int, list[torch.Tensor]] = {1: [], 3: []}
        for place, found in seen.items():
            model[place].register_forward_hook(lambda module, args, output, found=found: found.append(output == 0))
        engine_of(alone, model, seed=3, batch_norm=word).step(random_batch(alone, 19, 4))
        masks[word] = [*seen[1], *seen[3]]
    assert len(masks["sync"]) == 8
    assert all(torch.equal(*pair) for pair in zip(masks["sync"], masks["shard"], strict=True))


def test_what_surrounds_a_step_draws_as_if_there_were_none(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Normed))
    with torch.random.fork_rng(devices=[]):
        seed_generators(1)
        expected = [float(torch.rand(())) for _ in range(2)]
        seed_generators(1)
        drawn = [float(torch.rand(()))]
        engine.step(random_batch(alone, 19, 5))
        assert [*drawn, float(torch.rand(()))] == expected


def test_other_buffers_are_averaged_as_ever(alone: World) -> None:
    class Both(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(Watching(), nn.BatchNorm1d(4))

    inputs, targets = random_data(16)
    results = []
    for word in ("sync", "shard"):
        engine = engine_of(alone, seeded(0, Both), batch_norm=word)
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


def test_a_scaler_that_overflows_skips_and_goes_on(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep, dtype=torch.float32), precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**32})
    inputs, targets = random_data(16)
    results = [engine.step(batch_of(alone, inputs.float(), targets, 4)) for _ in range(20)]
    assert results[0].skipped
    assert not results[-1].skipped


class Listener(Observer):
    """Writes down what it hears of shards."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.threads: dict[int, set[int]] = {}

    def begin_shard(self, part: Shard) -> None:
        self.heard.append(("begin", part.number))
        self.threads.setdefault(part.number, set()).add(threading.get_ident())

    def end_shard(self, part: Shard, outputs: Any, loss: Loss) -> None:
        assert outputs.shape == (part.size, 4)
        assert loss.count == part.size
        self.heard.append(("end", part.number))
        self.threads[part.number].add(threading.get_ident())


def test_observers_hear_of_every_shard_in_order(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    monkeypatch.setattr(observing, "_observers", [listener])
    engine_of(alone, seeded(0, Deep)).step(random_batch(alone, 19, 4))
    assert listener.heard == [(word, number) for word in ("begin", "end") for number in range(4)]
    assert all(len(threads) == 1 for threads in listener.threads.values())


# --- what goes wrong --------------------------------------------------------------------------------------


def test_a_failure_leaves_everything_as_it_was(alone: World) -> None:
    model = seeded(0, Fragile)
    engine, twin = engine_of(alone, model), engine_of(alone, seeded(0, Fragile))
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


def test_a_failure_leaves_no_thread(alone: World) -> None:
    inputs, targets = random_data(19)
    inputs[9] = 2000
    engine = engine_of(alone, seeded(0, Fragile))
    with pytest.raises(ArithmeticError):
        engine.step(batch_of(alone, inputs, targets, 5))
    assert shard_threads() == []


def test_shards_that_skip_a_norm_layer_are_named(alone: World) -> None:
    inputs, targets = random_data(16)
    inputs[:, 0] = 1
    inputs[4:8, 0] = -1
    engine = engine_of(alone, seeded(0, Moody))
    with pytest.raises(InputError) as refused:
        engine.step(batch_of(alone, inputs, targets, 4))
    assert refused.value.value == ("shard 0 is at the forward of the norm layer 'second' while shard 1 is done")
    assert shard_threads() == []


def test_an_unused_parameter_is_named(alone: World) -> None:
    model = seeded(0, Deep)
    model.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    with pytest.raises(InputError, match="1 trained parameters took no part in the loss: idle"):
        engine_of(alone, model).step(random_batch(alone, 19, 5))
    assert shard_threads() == []


def test_a_batch_of_one_sample_is_refused(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep))
    with pytest.raises(InputError, match="the norm layer 'norm' gets one value a channel from the whole global batch"):
        engine.step(random_batch(alone, 1, 5))


def test_a_module_that_is_hidden_from_its_parent_is_refused(alone: World) -> None:
    model = seeded(0, Deep)
    layer = model.second
    model.second = nn.Identity()
    model.extra = layer
    model.forward = lambda inputs: Deep.forward(model, inputs)
    with pytest.raises(InputError, match="reached the model's own parameters"):
        engine_of(alone, model).step(random_batch(alone, 19, 5))


def test_a_loss_that_is_not_finite_is_traced_to_its_shards(alone: World) -> None:
    """All shards share the statistics, so all losses are bad; what began it is told."""
    engine = engine_of(alone, seeded(0, Deep))
    engine.step(random_batch(alone, 19, 8))
    before = state_of(engine.model)
    inputs, targets = random_data(19)
    inputs[[3, 17]] = math.nan
    with pytest.raises(NonFiniteError) as stopped:
        engine.step(batch_of(alone, inputs, targets, 8))
    assert stopped.value.value.startswith("step 2: the loss of shards 1, 7 is not finite (loss nan; samples 102, 103,")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine.model).items())


@pytest.mark.parametrize("model", [RootNorm, NormRoot])
def test_a_gradient_that_is_not_finite_is_traced_to_its_shards(alone: World, model: type[nn.Module]) -> None:
    """Before the norm layer each shard's own gradient tells; behind it, what the shard brings to the meeting."""
    engine = engine_of(alone, seeded(0, model))
    inputs, targets = random_data(19)
    inputs[[3, 17], 0] = 0
    with pytest.raises(NonFiniteError) as stopped:
        engine.step(batch_of(alone, inputs, targets, 8))
    assert "from shards 1, 7 (samples 102, 103, 116, 117, 118)" in stopped.value.value


def test_a_bad_step_can_be_skipped(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Deep), non_finite="skip")
    inputs, targets = random_data(19)
    inputs[3] = math.nan
    before = state_of(engine.model)
    assert engine.step(batch_of(alone, inputs, targets, 8)).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine.model).items())
    assert not engine.step(random_batch(alone, 19, 8)).skipped
