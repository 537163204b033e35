"""Loops with forward, backward and update of the user."""

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import InputError, NonFiniteError
from workers import accelerate_training as training


def loop_of(world: samestep.World) -> tuple[nn.Module, samestep.MicrobatchLoop, Any]:
    model, _, _ = training.objects()
    batches = samestep.loader(
        training.dataset(), batch_size=training.BATCH, microbatches=training.MICROBATCHES, shuffle=True, world=world
    )
    return model, samestep.MicrobatchLoop(model, world=world), batches


@pytest.mark.slow
def test_bits_of_the_own_loop(alone: samestep.World) -> None:
    expected = training.digest(training.own_loop(alone))
    assert samestep.launch(training.plain_loop, processes=5) == expected


@pytest.mark.slow
def test_ranks_without_samples_make_the_step() -> None:
    results = {samestep.launch(training.short_batch, processes=processes) for processes in (1, 5)}
    assert len(results) == 1


def test_left_loop_has_no_effect(alone: samestep.World) -> None:
    model, loop, batches = loop_of(alone)
    before = training.digest(model)
    for data in loop.microbatches(batches):
        loop.backward(training.cross_entropy(model, data))
        break
    assert training.digest(model) == before
    assert (loop.engine.steps, batches.cursor.samples) == (0, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    for data in loop.microbatches(batches):
        loop.backward(training.cross_entropy(model, data))
        if loop.is_last:
            break
    assert (loop.engine.steps, batches.cursor.samples) == (1, training.BATCH)


def test_generators_of_the_script_are_preserved(alone: samestep.World) -> None:
    model, loop, batches = loop_of(alone)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for data in loop.microbatches(batches):
        loop.backward(training.cross_entropy(model, data))
    assert torch.equal(torch.rand(2), expected)


def test_backward_belongs_to_one_microbatch(alone: samestep.World) -> None:
    model, loop, batches = loop_of(alone)
    with pytest.raises(InputError, match="without a microbatch") as error:
        loop.backward(torch.ones((), requires_grad=True))
    assert error.value.code == "E_MICROBATCH_LOOP"
    for data in loop.microbatches(batches):
        loop.backward(training.cross_entropy(model, data))
        with pytest.raises(InputError, match="a second backward"):
            loop.backward(torch.ones((), requires_grad=True))
        with pytest.raises(InputError, match="within another one"):
            next(loop.microbatches(batches))
        break


def test_non_finite_loss_ends_the_step(alone: samestep.World) -> None:
    model, loop, batches = loop_of(alone)
    before = training.digest(model)
    with pytest.raises(NonFiniteError):
        for data in loop.microbatches(batches):
            loop.backward(training.cross_entropy(model, data) * float("nan"))
    assert training.digest(model) == before


@pytest.mark.parametrize(("precision", "allows_tf32"), [("highest", False), ("high", True)])
def test_products_of_matrices_have_the_precision_of_the_script(
    alone: samestep.World, precision: str, allows_tf32: bool
) -> None:
    """The libraries have no option of their own, and their users call this function of torch."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        _, loop, _ = loop_of(alone)
    finally:
        torch.set_float32_matmul_precision(before)
    assert loop.engine.config.tf32 is allows_tf32
