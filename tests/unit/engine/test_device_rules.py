"""Rules of GPU kernels that can be checked on a CPU, and the number of waits for a device."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from helpers.batches import batch_of
from helpers.kernels import Kernels
from helpers.models import seeded
from helpers.waits import Waits
from samestep import launch
from samestep.config import Reduction, StepConfig
from samestep.distributed.rng import preserved_generators
from samestep.engine import step_runner
from samestep.engine.buffers import ForwardState
from samestep.engine.checksum import state_checksum
from samestep.engine.engine import Engine
from samestep.engine.loss import as_step_loss
from samestep.engine.microbatch_forward import TRAINING, MicrobatchForward
from samestep.engine.sync_batch_norm import LayerPosition, Message, sync_batch_norm
from samestep.microbatches import Cursor
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.reduction import ExactReduction
from samestep.strategies.strategy import SingleStrategy
from workers import buckets


class CudaRules(TorchDispatchMode):
    """Refuses arguments with which CUDA's kernels fail or write wrong values, unlike those of CPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "native_batch_norm_backward" and not args[7] and not args[9][0]:
            # batch_norm_backward_cuda, aten/src/ATen/native/cuda/Normalization.cu
            assert args[5] is not None, "save_mean should always be defined"
            assert args[6] is not None, "save_invstd should always be defined"
        if name == "_foreach_copy_":
            # https://github.com/pytorch/pytorch/issues/173383: all targets are written as the type of the first
            assert len({tensor.dtype for tensor in args[0]}) == 1, "targets of several types"
        return func(*args, **(kwargs or {}))


class _Alone:
    """The track of the only microbatch."""

    def exchange(self, message: Message) -> Any:
        return message.combine(torch.tensor([[float(message.count)]], dtype=torch.float64), message.values[None])


def test_backward_of_synchronized_batch_norm_passes_what_cuda_requires() -> None:
    inputs = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    position = LayerPosition(0, "norm", _Alone())  # type: ignore[arg-type]
    with CudaRules():
        outputs = sync_batch_norm(position, inputs, None, None, weight, bias, training=True)
        outputs.square().sum().backward()
    gradients = [tensor.grad for tensor in (inputs, weight, bias)]
    expected = torch.autograd.grad(
        nn.functional.batch_norm(inputs, None, None, weight, bias, True).square().sum(), [inputs, weight, bias]
    )
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_lists_of_copied_tensors_have_one_type(alone: samestep.World, microbatches: int) -> None:
    model = seeded(0, lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), dtype=torch.float32)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.cross_entropy, world=alone, ema=0.9)
    batch = batch_of(alone, torch.randn(12, 6), torch.randint(0, 4, (12,)), microbatches)
    with CudaRules():
        for _ in range(2):
            engine.step(batch)
        engine.evaluate([batch])
    assert int(model[1].num_batches_tracked) == 2


@pytest.fixture(scope="module")
def observed() -> dict[int, list[Any]]:
    """Return weights, odd addresses and sums of the backend by rank, by the number of ranks."""
    return {ranks: launch(buckets.observe, processes=ranks) for ranks in (1, 2, 3)}


def test_gradients_are_aligned_on_any_number_of_ranks(observed: dict[int, list[Any]]) -> None:
    assert {tuple(odd) for rows in observed.values() for _, odd, _ in rows} == {(0, 0, 0)}


def test_weights_are_equal_on_any_number_of_ranks(observed: dict[int, list[Any]]) -> None:
    assert len({digest for rows in observed.values() for digest, _, _ in rows}) == 1


def test_backend_adds_no_gradients_under_exact(observed: dict[int, list[Any]]) -> None:
    assert [large for rows in observed.values() for _, _, large in rows] == [[]] * 6


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_model_of_several_buckets_has_the_same_bits_in_bf16() -> None:
    assert len({launch(buckets.train_compiled, processes=ranks) for ranks in (1, 2, 3)}) == 1


def test_step_is_marked_as_waiting_while_it_reads_from_the_device(
    alone: samestep.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose GPU waits for another rank is then not taken for the one that hangs."""
    monkeypatch.setattr(step_runner, "is_accelerator", lambda device: True)
    waiting: list[bool] = []
    status = alone.context.status

    class Reads(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "tolist":
                waiting.append(status.snapshot.is_waiting)
            return func(*args, **(kwargs or {}))

    model = seeded(0, lambda: nn.Sequential(nn.Linear(6, 4)), dtype=torch.float32)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.cross_entropy, world=alone)
    batch = batch_of(alone, torch.randn(12, 6), torch.randint(0, 4, (12,)), 4)
    engine.step(batch)
    with Reads():
        engine.step(batch)
    assert waiting == [True]


World = samestep.World
LOSSES = {"shipped": samestep.cross_entropy, "mean": nn.functional.cross_entropy, "torch": nn.CrossEntropyLoss()}


class Convolutions(nn.Sequential):
    """Convolutions with `depth` batch norm layers."""

    def __init__(self, depth: int = 3) -> None:
        layers: list[nn.Module] = []
        for number in range(depth):
            layers += [nn.Conv2d(4 if number else 3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(4 * 16, 5))


def engine_of(
    world: World, model: nn.Module | None = None, loss: Any = samestep.cross_entropy, **options: Any
) -> Engine:
    model = model or seeded(0, Convolutions, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Engine(model, optimizer, loss, world=world, config=StepConfig(**options))


def images(world: World, microbatches: int, size: int = 16, pixels: int = 4) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 3, pixels, pixels, generator=generator)
    return batch_of(world, inputs, torch.randint(0, 5, (size,), generator=generator), microbatches)


def waits_of_third_step(engine: Engine, batch: Any, **options: Any) -> Counter[str]:
    for _ in range(2):
        engine.step(batch, **options)
    with Waits() as waits:
        engine.step(batch, **options)
    return waits.calls


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_step_waits_once(alone: World, loss: str, precision: str, microbatches: int) -> None:
    engine = engine_of(alone, loss=LOSSES[loss], precision=precision, clip_norm=1.0)
    assert waits_of_third_step(engine, images(alone, microbatches)) == {"tolist": 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_step_with_terms_waits_once_more_for_their_counts(alone: World, microbatches: int) -> None:
    terms = [
        samestep.LossTerm("classes", nn.functional.cross_entropy, lambda targets: (targets >= 0).sum()),
        samestep.LossTerm("size", lambda outputs, targets: outputs.square().sum()),
    ]
    engine = engine_of(alone, loss=samestep.MultiLoss(terms))
    assert waits_of_third_step(engine, images(alone, microbatches)) == {"tolist": 2}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_checksum_of_the_state_waits_once(alone: World, optimizer: Any) -> None:
    model = seeded(0, Convolutions, dtype=torch.float32)
    engine = Engine(model, optimizer(model.parameters(), lr=0.01), samestep.cross_entropy, world=alone, ema=0.9)
    engine.step(images(alone, 4))
    state_checksum(engine, Cursor())  # creates the table of weights
    with Waits() as waits:
        value = state_checksum(engine, Cursor())
    assert value is not None
    assert waits.calls == {"__int__": 1}


def test_step_with_a_forward_function_and_values_waits_once(alone: World) -> None:
    def forward(model: Any, data: Any) -> dict[str, Any]:
        outputs = model(data[0])
        return {"loss": nn.functional.cross_entropy(outputs, data[1]), "largest": outputs.detach().amax()}

    assert waits_of_third_step(engine_of(alone), images(alone, 4), forward=forward) == {"tolist": 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_step_with_synchronized_batch_norm_waits_twice(alone: World, microbatches: int) -> None:
    engine = engine_of(alone, batch_norm="sync")
    assert waits_of_third_step(engine, images(alone, microbatches)) == {"tolist": 2}


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


@pytest.mark.parametrize("metric", ["accuracy", correct])
def test_evaluation_waits_twice(alone: World, metric: Any) -> None:
    engine = engine_of(alone)
    batches = [images(alone, 4), images(alone, 4)]
    with Waits() as waits:
        engine.evaluate(batches, [metric])
    assert sum(waits.calls.values()) <= 2, waits.calls


@pytest.mark.parametrize("microbatches", [1, 4])
def test_state_of_norm_layers_takes_equally_many_kernels_for_any_number_of_layers(
    alone: World, microbatches: int
) -> None:
    def operations(depth: int) -> Counter[str]:
        model = seeded(0, Convolutions, depth, dtype=torch.float32)
        state, tree = ForwardState(model), MicrobatchTree(microbatches, microbatches)
        strategy = SingleStrategy("single", model, ExactReduction(alone, []))
        for _ in range(3):
            with Kernels() as kernels:
                state.begin(microbatches)
                vectors = []
                for number in range(microbatches):
                    state.restore()
                    with kernels.paused():
                        model(torch.zeros(2, 3, 4, 4))
                    vectors.append(state.read(number, last=number == microbatches - 1))
                total = torch.stack(vectors).sum(0)
                state.combine(total, total[: state.control_length].tolist(), tree, strategy, alone)
                state.commit()
        return kernels.calls

    assert operations(2) == operations(7)


@pytest.mark.parametrize(("reduction", "selects_by_time"), [("exact", False), ("fast", True)])
def test_exact_computes_without_trials_of_kernels(
    monkeypatch: pytest.MonkeyPatch, reduction: Reduction, selects_by_time: bool
) -> None:
    """Scripts set this option after `samestep.start`, too."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    forward = MicrobatchForward(as_step_loss(None), StepConfig(reduction=reduction), torch.device("cpu"))
    with preserved_generators(), forward.context(TRAINING, 0, 0):
        assert torch.backends.cudnn.benchmark is selects_by_time
