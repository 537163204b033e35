"""Functions of the script in a backward: those that keep state are found by the first one, others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samestep.view.trial_result import ComputedWhole
from samestep.view.watch import Watched, watch

FUNCTION = "has an autograd function whose backward keeps state"
HOOK = "runs inside of hooks of saved tensors"

count = 0
history: list[Tensor] = []
options = {"scale": 2.0}
table = torch.arange(4.0)
generator = torch.Generator()


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def add(self) -> None:
        self.number = self.number + 1


counter = Counter()


def watched(function: Callable[[Tensor, nn.Module], Any]) -> Watched:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            return function(self.layer(x), self)

    module = Net()
    x = torch.randn(6, 4)
    return watch(module, lambda: module(x), (x,), {})


def reason(function: Callable[[Tensor, nn.Module], Any]) -> str | None:
    """Return the reason for whole calls before the trial, after a backward of the watched call."""
    result = watched(function)
    assert result.reason is None
    result.result.sum().backward()
    assert result.backward_code.has_run
    try:
        result.backward_code.require_unchanged()
    except ComputedWhole as decision:
        return str(decision)
    return None


class Base(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.others = others
        if others:
            ctx.other = others[0]
        return x.clone()


class WritesGlobal(Base):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        global count  # noqa: PLW0603
        count += 1
        return gradient


class WritesClass(Base):
    number = 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        WritesClass.number += 1
        return gradient


def note(gradient: Tensor) -> Tensor:
    history.append(gradient)
    return gradient


class WritesSharedList(Base):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.other.append(1)
        return gradient, None


def write_item(gradient: Tensor) -> None:
    options["scale"] = 1.0


def with_backward(act: Callable[[Tensor], Any]) -> Any:
    """Return a function whose backward calls a function of the test."""

    class Acts(Base):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            act(gradient)
            return gradient

    return Acts


@pytest.mark.parametrize(
    "kind",
    [
        WritesGlobal,
        WritesClass,
        with_backward(note),
        with_backward(write_item),
        with_backward(lambda gradient: table.add_(1)),
        with_backward(lambda gradient: counter.add()),
        with_backward(lambda gradient: torch.rand(gradient.shape, generator=generator)),
    ],
)
def test_function_that_keeps_state(kind: Any) -> None:
    assert reason(lambda x, module: kind.apply(x)) == FUNCTION


def test_function_that_writes_what_its_context_shares() -> None:
    shared: list[int] = []
    assert reason(lambda x, module: WritesSharedList.apply(x, shared)) == FUNCTION


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Reversal(Base):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.other * options["scale"] * gradient, None


class Rectifier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        result = gradient.clone()
        result[x < 0] = 0
        result.mul_(1.0)
        return result


class Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sizes = [1, 3]
        ctx.run = torch.nn.functional.relu
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pieces = []
        for piece in gradient.split(ctx.sizes, 1):
            pieces.append(piece)
        return torch.cat(pieces, 1)


class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.number = len(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        with torch.enable_grad():
            copy = output.detach().requires_grad_()
            copy.requires_grad = True
        return helper(gradient) * copy.detach()


def helper(gradient: Tensor) -> Tensor:
    return 2 * gradient + table


@pytest.mark.parametrize("kind", [Straight, Rectifier, Pieces])
def test_function_that_computes(kind: Any) -> None:
    assert reason(lambda x, module: kind.apply(x)) is None


def test_functions_that_read_what_is_outside() -> None:
    assert reason(lambda x, module: Reversal.apply(x, 0.5)) is None


class Checkpoint(torch.autograd.Function):
    """Recomputes a part in the backward, as scripts do without torch.utils.checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.run(x).backward(gradient)
        return x.grad, None


def test_function_that_computes_again() -> None:
    assert reason(lambda x, module: Checkpoint.apply(x, module.layer)) is None


def test_change_between_watched_call_and_trial() -> None:
    result = watched(lambda x, module: Reversal.apply(x, 0.5))
    result.backward_code.require_unchanged()
    options["scale"] = 3.0
    with pytest.raises(ComputedWhole, match=FUNCTION):
        result.backward_code.require_unchanged()
    options["scale"] = 2.0


def test_code_of_libraries_only() -> None:
    code = watched(lambda x, module: x.relu()).backward_code
    assert code.has_run
    code.require_unchanged()


def test_registered_operation() -> None:
    @torch.library.custom_op("samestep_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        history.append(gradient)
        return 2 * gradient

    doubled.register_autograd(backward)
    assert reason(lambda x, module: doubled(x)) == FUNCTION


def note_tensor(tensor: Tensor) -> Tensor:
    history.append(tensor.detach())
    return tensor


def test_hooks_of_saved_tensors() -> None:
    def square(x: Tensor, module: nn.Module) -> Tensor:
        return (x * x).sin()

    with torch.autograd.graph.saved_tensors_hooks(note_tensor, lambda tensor: tensor):
        assert watched(square).reason == "changes the global variable history"
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, note_tensor):
        assert watched(square).reason == HOOK
    with torch.autograd.graph.save_on_cpu():
        assert reason(square) is None


def test_code_that_no_backward_has_run() -> None:
    result = watched(lambda x, module: WritesGlobal.apply(x))
    assert not result.backward_code.has_run
    result.result.sum().backward()
    assert result.backward_code.has_run


def test_hook_of_a_node() -> None:
    def function(x: Tensor, module: nn.Module) -> Tensor:
        assert x.grad_fn is not None
        x.grad_fn.register_hook(lambda *gradients: None)
        return x.sin()

    assert watched(function).reason == "uses the graph of a tensor"


class Logged(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        Logged.calls += 1
        return super().__torch_function__(function, types, arguments, options or {})


def test_class_of_tensors_that_counts() -> None:
    module = nn.Linear(4, 4)
    x = torch.randn(6, 4).as_subclass(Logged)
    result = watch(module, lambda: module(x), (x,), {})
    assert result.reason == "changes the variable calls of the class Logged"
