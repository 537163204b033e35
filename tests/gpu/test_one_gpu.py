"""Tests that need a GPU: `pytest -m gpu` on a machine with one."""

import hashlib

import pytest
import torch

import samestep
from samestep.data.batch import Microbatch, prefetch_to_device
from samestep.launcher.launch import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


class Noisy:
    """Images with augmentation noise."""

    def __len__(self) -> int:
        return 75

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fixed = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return fixed + 0.1 * torch.randn(3, 16, 16), index % 5


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8 * 16 * 16, 5),
    )


def train(reduction: str, precision: str, workers: int, witness_every: int | None = None) -> tuple[str, float, str]:
    with samestep.start(device="cuda", reduction=reduction) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rules = samestep.StepConfig(reduction=reduction, precision=precision, clip_norm=1.0)
        callbacks = [samestep.Witness(witness_every)] if witness_every is not None else []
        engine = samestep.Engine(
            model, optimizer, samestep.cross_entropy, world=world, config=rules, callbacks=callbacks
        )
        batches = samestep.loader(
            Noisy(), batch_size=16, microbatches=4, shuffle=True, world=world, num_workers=workers
        )
        for _ in range(3):
            for batch in batches:
                result = engine.step(batch)
        tensors = [tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values()]
        return hashlib.sha256(b"".join(tensors)).hexdigest(), result.loss, str(world.device)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_exact_repeats_bit_for_bit_with_and_without_workers(precision: str) -> None:
    first = launch(train, "exact", precision, 0, processes=1)
    again = launch(train, "exact", precision, 2, processes=1)
    assert first == again
    assert first[2] == "cuda:0"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_witness_finds_no_difference_and_changes_no_bit(precision: str) -> None:
    plain, witnessed = (launch(train, "exact", precision, 0, every, processes=1) for every in (None, 1))
    assert witnessed == plain


def test_gpu_agrees_with_fast_to_rounding() -> None:
    exact, fast = (launch(train, reduction, "fp32", 0, processes=1) for reduction in ("exact", "fast"))
    assert exact[1] == pytest.approx(fast[1], rel=1e-4)


def test_prefetched_microbatches_are_the_ones_given() -> None:
    device = torch.device("cuda", 0)
    microbatches = [(n, 4, (torch.full((4, 1000), float(n)).pin_memory(), n)) for n in range(8)]

    for given, got in zip(
        microbatches, prefetch_to_device((Microbatch(*microbatch) for microbatch in microbatches), device), strict=True
    ):
        assert got.data[0].device == device
        assert torch.equal(got.data[0].cpu(), given[2][0])
