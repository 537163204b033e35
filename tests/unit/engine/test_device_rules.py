"""Rules of GPU kernels that can be checked on a CPU: alignment, types of lists, and sums by the backend."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from helpers.batches import batch_of
from helpers.models import seeded
from samestep import launch
from samestep.engine import step_runner
from samestep.engine.engine import Engine
from samestep.engine.sync_batch_norm import LayerPosition, Message, sync_batch_norm
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
