"""Microbatches that are computed together have the bits of each alone; otherwise they are computed one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import samestep
from helpers.batches import batch_of
from samestep import launch
from samestep.engine import exact_batching
from samestep.engine.engine import Engine
from workers import batched as ranks_batched
from workers.batched import SAMPLES, changed, train


@pytest.fixture(scope="module")
def world() -> Iterator[samestep.World]:
    times = exact_batching.BatchedRunner._times
    ranks_batched.use_always()
    with samestep.start(device="cpu") as one:
        yield one
    exact_batching.BatchedRunner._times = times  # type: ignore[method-assign]


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("name", ["gpt", "perceptron"])
def test_bits_are_equal_together_and_alone(world: samestep.World, name: str, microbatches: int) -> None:
    alone, _, _ = train(world, name, microbatches, together=False)
    together, is_together, reason = train(world, name, microbatches, together=True)
    assert (is_together, reason) == (True, None)
    assert together == alone


def test_bits_are_equal_on_1_2_and_3_processes(world: samestep.World) -> None:
    alone = [train(world, name, 8, together=False)[0] for name in ("gpt", "perceptron")]
    for processes, sizes in ((2, (4, 4)), (3, (2, 3, 3))):
        ranks = launch(ranks_batched.run, processes=processes)
        for local, results in zip(sizes, ranks, strict=True):
            assert [tuple(result) for result in results] == [
                # The backward of the last microbatch of a rank reduces gradients, so that it is computed alone.
                (digest, True if local > 2 else None, None)
                for digest in alone
            ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("convolution", "conv1d with a trained parameter"),
        ("dropout", "dropout draws random numbers"),
        ("branch", "max may combine samples, or depend on their values"),
        ("mean", "mean may combine samples, or depend on their values"),
        ("softmax", "softmax may combine samples, or depend on their values"),
        ("rows", "other bits of outputs"),
        ("batch norm", "the forward changes the state of the model"),
    ],
)
def test_other_models_are_computed_one_by_one(world: samestep.World, name: str, reason: str) -> None:
    alone, _, _ = train(world, name, 4, together=False)
    assert train(world, name, 4, together=True) == (alone, False, reason)


REASONS = {
    "mean over samples": "mean may combine samples, or depend on their values",
    "hook of a parameter": "the parameter last.weight has hooks",
    "hook of a module": "the module 'norm' has hooks",
}


@pytest.mark.parametrize("name", ranks_batched.CHANGES)
def test_a_change_of_the_model_repeats_the_decision(world: samestep.World, name: str) -> None:
    alone, _, _ = changed(world, name, together=False)
    assert changed(world, name, together=True) == (alone, False, REASONS.get(name, "other bits of outputs"))


def test_a_hook_of_all_modules_repeats_the_decision(world: samestep.World) -> None:
    handles = []

    def add_hook(engine: Engine, step: int) -> None:
        if step == 3:
            handles.append(register_module_forward_hook(lambda module, inputs, rows: ranks_batched.by_size(rows)))

    results = []
    for together in (False, True):
        results.append(train(world, "perceptron", 4, together=together, samples=(SAMPLES,) * 6, before_step=add_hook))
        handles.pop().remove()
    assert results[1] == (results[0][0], False, "all modules have hooks")


def test_bits_after_a_change_are_equal_on_1_and_2_processes(world: samestep.World) -> None:
    expected = [changed(world, name, together=True)[0] for name in ranks_batched.CHANGES]
    for results in launch(ranks_batched.run_changed, processes=2):
        assert [digest for digest, _, _ in results] == expected


def test_harmless_changes_keep_the_choice_until_they_are_frequent(world: samestep.World) -> None:
    def trained(steps: int, *, together: bool, every: int = 1) -> tuple[str, bool | None, str | None]:
        def change(engine: Engine, step: int) -> None:
            engine.model.progress = float(step // every)  # type: ignore[assignment]

        return train(world, "perceptron", 4, together=together, samples=(SAMPLES,) * steps, before_step=change)

    alone, _, _ = trained(6, together=False, every=3)
    assert trained(6, together=True, every=3) == (alone, True, None)
    alone, _, _ = trained(6, together=False)
    assert trained(6, together=True) == (alone, False, "values or hooks of the model change between steps")


def test_a_planted_difference_in_a_gradient_is_detected(world: samestep.World, monkeypatch: pytest.MonkeyPatch) -> None:
    add = exact_batching.BatchedForward.add

    def flip(self: Any, microbatch: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if microbatch == 2 and gradient.dim() == 1:
            gradient.view(torch.int32)[3] ^= 1
        add(self, microbatch, parameter, gradient)

    monkeypatch.setattr(exact_batching.BatchedForward, "add", flip)
    alone, _, _ = train(world, "perceptron", 4, together=False)
    assert train(world, "perceptron", 4, together=True) == (alone, False, "other bits of gradient of first.bias")


def _hook(engine: Engine) -> None:
    engine.model.first.register_forward_hook(lambda *call: None)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("options", "prepare", "reason"),
    [
        ({"precision": "bf16"}, lambda engine: None, "step.precision: bf16"),
        ({"recompute": ("first",)}, lambda engine: None, "step.recompute"),
        ({}, _hook, "the module 'first' has hooks"),
    ],
)
def test_options_and_hooks_exclude_computing_together(
    world: samestep.World, options: dict[str, Any], prepare: Callable[[Engine], Any], reason: str
) -> None:
    results = [train(world, "perceptron", 4, together=on, prepare=prepare, **options) for on in (False, True)]
    assert results[1] == (results[0][0], False, reason)


def test_other_shapes_are_computed_one_by_one(world: samestep.World) -> None:
    samples = (SAMPLES, SAMPLES, 7, SAMPLES, 3, SAMPLES)
    alone, together = (train(world, "perceptron", 4, together=on, samples=samples) for on in (False, True))
    assert together == (alone[0], True, None)


def test_moved_shares_repeat_the_decision(world: samestep.World) -> None:
    engines: list[Engine] = []
    train(world, "perceptron", 8, together=True, prepare=engines.append)
    (engine,) = engines
    assert engine.computes_together
    engine.step_runner.shares_moved()
    assert engine.computes_together is None
    for _ in range(2):  # the rank now has 4 of 8 microbatches, with other shapes
        inputs = torch.zeros(SAMPLES, ranks_batched.LENGTH, dtype=torch.int64)
        engine.step(batch_of(world, inputs, torch.zeros(SAMPLES, dtype=torch.int64), 4))
    assert engine.computes_together


def test_memory_has_a_limit(world: samestep.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_batching, "MAX_BYTES", 1000)
    _, is_together, reason = train(world, "perceptron", 4, together=True)
    assert is_together is False
    assert reason is not None
    assert reason.endswith("MiB of activations and gradients")


def test_slower_computation_is_not_used(world: samestep.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_batching.BatchedRunner, "_times", lambda self, parts, position: (1.0, 2.0))
    _, is_together, reason = train(world, "perceptron", 4, together=True)
    assert (is_together, reason) == (False, "together, they take 2000.0 ms, and 1000.0 ms one after another")


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = torch.nn.GRU(3, 4), torch.nn.Linear(4, 2)

    def forward(self, lines: PackedSequence) -> Any:
        return self.head(self.cell(lines)[1][0])


def pack(samples: list[Any]) -> Any:
    lines, targets = zip(*samples, strict=True)
    return pack_sequence(lines, enforce_sorted=False), torch.stack(targets)


def test_packed_sequences_are_one_argument_and_computed_alone(world: samestep.World) -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, 3), torch.arange(24) % 2)
    model = Reader()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.nn.functional.cross_entropy, world=world)
    batches = samestep.loader(data, batch_size=8, microbatches=2, collate_fn=pack, world=world)
    for number, batch in enumerate(batches):
        lines, targets = pack([data[index] for index in range(8 * number, 8 * number + 8)])
        plain = torch.nn.functional.cross_entropy(model(lines), targets).item()
        assert engine.step(batch).loss == pytest.approx(plain, rel=1e-6)
    assert engine.alone_reason == "the inputs are not tensors with rows for each sample"
