"""`samestep.parallel`: the module stays the same object for a script."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from helpers.compared_calls import ROWS, batch, check, network, run
from helpers.forked_ranks import RankServer
from helpers.view_checks import difference, error_code, gradients
from samestep.errors import InputError
from samestep.launcher.process_state import process_state
from samestep.parallelize import _require_arguments, no_sync, parallel_module


def _trained() -> Any:
    model = samestep.parallel(network())
    for number in range(3):
        model(batch(number)).pow(2).mean().backward()
    return model


@check
def copies() -> Any:
    model = _trained()
    owner = parallel_module(model)
    assert owner is not None
    copied = copy.deepcopy(model)
    other = parallel_module(copied)
    assert other is not None
    model.zero_grad()
    for number in range(3):
        copied(batch(number)).pow(2).mean().backward()
    # The kind is known from the model.
    return [
        other is not owner,
        other.module is copied,
        owner.module is model,
        other.summary.divided,
        all(one.grad is None for one in model.parameters()),
        all(one.grad is not None for one in copied.parameters()),
        not {one.data_ptr() for one in model.parameters()} & {one.data_ptr() for one in copied.parameters()},
        type(copied).__name__,
    ]


@check
def pickled() -> Any:
    model = _trained()
    written = pickle.dumps(model)
    loaded = pickle.loads(written)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    states = io.BytesIO()
    torch.save(model.state_dict(), states)
    states.seek(0)
    fresh = network()
    fresh.load_state_dict(torch.load(states, weights_only=True))
    parameters = list(model.parameters())
    return [
        b"samestep" in written,
        type(loaded) is nn.Sequential,
        type(saved) is nn.Sequential,
        parallel_module(model) is not None,
        [difference(parameters, list(other.parameters())) for other in (loaded, saved, fresh)],
        list(model.state_dict()) == list(fresh.state_dict()),
    ]


class Documented(nn.Linear):
    """A module with a signature."""

    def forward(self, values: Tensor, *, scale: float = 2.0) -> Tensor:
        """Return values."""
        return super().forward(values) * scale


@check
def appearance() -> Any:
    plain = Documented(6, 3)
    model = samestep.parallel(copy.deepcopy(plain))
    return [
        isinstance(model, Documented),
        isinstance(model, nn.Linear),
        inspect.signature(model.forward) == inspect.signature(plain.forward),
        type(model).__name__ == "Documented",
        type(model).__doc__ == Documented.__doc__,
        type(model).__module__ == Documented.__module__,
        repr(model) == repr(plain),
        samestep.parallel(model) is model,
        sorted(model.__dict__) == sorted(plain.__dict__),
    ]


@check
def hooks_of_the_outermost_module() -> Any:
    sizes = []
    model = samestep.parallel(network())
    model.register_forward_hook(lambda _, inputs, output: sizes.append((len(inputs[0]), len(output))))
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    model.register_full_backward_hook(lambda _, __, outputs: sizes.append(len(outputs[0])))
    for number in range(3):
        model(batch(number).requires_grad_()).sum().backward()
    owner = parallel_module(model)
    assert owner is not None
    return [sizes[-3:], owner.summary.divided]


@check
def two_models() -> Any:
    """A generator and a critic; their sums are not mixed up."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
            self.critic = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))

        def forward(self) -> None: ...

    def steps(generator: nn.Module, critic: nn.Module) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for number in range(4):
            (critic(generator(batch(number))).mean() - critic(torch.ones(ROWS, 4)).pow(2).mean()).backward()
            found += gradients(generator) + gradients(critic)
            generator.zero_grad()
            critic(generator(batch(number)).detach()).mean().backward()
            found += gradients(generator) + gradients(critic)
        return found

    plain = Pair()
    divided = copy.deepcopy(plain)
    samestep.parallel(divided.generator)
    samestep.parallel(divided.critic)
    expected = steps(plain.generator, plain.critic)
    return difference(expected, steps(divided.generator, divided.critic))


@check
def deleted_models_are_freed() -> Any:
    """Modules, hubs and parameters; also hubs that were replaced."""
    model = _trained()
    owner = parallel_module(model)
    assert owner is not None
    hub = weakref.ref(owner.strategy._hub)
    memory = weakref.ref(model[0].weight)
    model[0].weight.data = model[0].weight.data.clone()
    model(batch(0)).sum().backward()
    _collect()
    replaced = hub() is None
    hub = weakref.ref(owner.strategy._hub)
    module = weakref.ref(model)
    del model, owner
    _collect()
    view: Any = process_state.view
    return [replaced, module() is None, hub() is None, memory() is None, view is not None]


def _collect() -> None:
    gc.collect()
    gc.collect()  # objects of freed graphs


@check
def cycles_have_no_tensors() -> Any:
    """Tensors of a step that only the garbage collector frees: on a GPU the memory of another step."""
    model = samestep.parallel(nn.Sequential(network(), nn.Dropout(0.2), nn.Linear(3, 3)), strict=True)
    for number in range(4):
        model(batch(number, 16)).pow(2).mean().backward()
    _collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(batch(4, 16)).pow(2).mean().backward()
        gc.collect()
        return sum(isinstance(value, Tensor) for value in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@check
def arguments_are_not_kept_by_a_loss() -> Any:
    model = _trained()
    x = batch(0)
    reference = weakref.ref(x)
    loss = model(x).pow(2).mean()
    loss.backward()
    del x
    gc.collect()
    return [reference() is None, math.isfinite(loss.item())]


@check
def refusals() -> Any:
    linear = nn.Linear(2, 2)
    size = samestep.init().size
    return [
        error_code(lambda: samestep.parallel(linear, microbatches=size - 1)),
        error_code(lambda: samestep.parallel("model")),
        error_code(lambda: samestep.parallel(nn.DataParallel(linear))),
        error_code(lambda: samestep.parallel(linear, strategy="other")),
        error_code(lambda: samestep.parallel(linear, reduction="other")),
        error_code(lambda: samestep.parallel(linear, batch_norm="other")),
        parallel_module(linear) is None,
    ]


@check
def places_where_calls_stay_whole() -> Any:
    """Other threads, backwards, tracing, functional transforms, and an inner module of a divided one."""
    model = samestep.parallel(nn.Sequential(nn.Linear(6, 3)))
    owner = parallel_module(model)
    assert owner is not None
    for number in range(3):
        model(batch(number)).sum().backward()
    numbers = [owner.summary.divided]

    def count(compute: Callable[[], Any]) -> None:
        before = owner.summary.divided
        compute()
        numbers.append(owner.summary.divided - before)

    def in_thread() -> None:
        thread = threading.Thread(target=lambda: model(batch(0)))
        thread.start()
        thread.join()

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            model(batch(0))
            return gradient

    x = torch.ones(2, requires_grad=True)
    count(in_thread)
    count(lambda: InBackward.apply(x).sum().backward())
    count(lambda: torch.jit.trace(model, batch(0), check_trace=False))
    count(lambda: torch.func.vmap(model)(torch.ones(2, 5, 6)))
    count(lambda: torch.func.grad(lambda x: model(x).sum())(batch(0)))
    with owner.view.suspended():
        count(lambda: model(batch(0)))
    count(lambda: model(batch(0)))
    return numbers


NAMES = [
    "copies",
    "pickled",
    "appearance",
    "hooks_of_the_outermost_module",
    "two_models",
    "deleted_models_are_freed",
    "arguments_are_not_kept_by_a_loss",
    "refusals",
    "places_where_calls_stay_whole",
]


@pytest.fixture(scope="module")
def results(ranks: int, on_ranks: RankServer) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = on_ranks(run, ranks, names=NAMES)
    return found


EXPECTED: dict[str, list[Any]] = {
    "copies": [True, True, True, 3, True, True, True, "Sequential"],
    "pickled": [False, True, True, True, [0, 0, 0], True],
    "appearance": [True] * 9,
    "hooks_of_the_outermost_module": [[11, [11, 11], 11], 2],
    "deleted_models_are_freed": [True] * 5,
    "arguments_are_not_kept_by_a_loss": [True, True],
    "refusals": ["E_TOO_MANY_RANKS", "E_VALUE", "E_WRAPPED_MODEL", "E_VALUE", "E_VALUE", "E_VALUE", True],
    "places_where_calls_stay_whole": [2, 0, 0, 0, 0, 0, 0, 1],
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_module_is_the_same_for_a_script(results: dict[str, list[Any]], name: str) -> None:
    for found in results[name]:
        assert found == EXPECTED[name]


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [("ddp", "fast"), ("ddp", "exact"), pytest.param("fsdp", "exact", marks=pytest.mark.slow)],
)
def test_no_tensor_waits_for_the_garbage_collector(strategy: str, reduction: str, on_ranks: RankServer) -> None:
    results = on_ranks(run, 2, names=["cycles_have_no_tensors"], strategy=strategy, reduction=reduction)
    assert results["cycles_have_no_tensors"] == [0, 0]


@pytest.mark.ranks(3)
def test_sums_of_two_models_are_not_mixed_up(results: dict[str, list[Any]]) -> None:
    assert all(difference <= 1e-12 for difference in results["two_models"])


def test_scripted_modules_are_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InputError) as caught:
        _require_arguments(scripted, "fast", "global")
    assert caught.value.code == "E_WRAPPED_MODEL"


def test_no_sync_of_a_module_that_is_not_divided_changes_nothing() -> None:
    module = nn.Linear(2, 1)
    with no_sync(module):
        module(torch.ones(3, 2)).sum().backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [3.0]
    assert parallel_module(module) is None


EXACT = """
import torch
import samestep
from samestep.parallelize import parallel_module

model = samestep.parallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)), reduction="exact")
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
summary = parallel_module(model).summary
parallel_module(model).view.divides_small_calls = True
x = torch.randn(9, 3)
for rows in (1, 9, 9, 9, 5):
    state = torch.get_rng_state()
    model(x[:rows]).sum().backward()
    print(rows, summary.watched, summary.divided, summary.whole, torch.equal(state, torch.get_rng_state()))
with samestep.no_sync(model):
    model.zero_grad()
    model(x).sum().backward()
    print(bool(model[0].weight.grad.any()))
whole = samestep.parallel(torch.nn.Linear(3, 2), reduction="exact", microbatches=1)
print(parallel_module(whole), type(whole) is torch.nn.Linear)
"""


@pytest.mark.slow
def test_exact_divides_on_one_process() -> None:
    """Into 8 microbatches; smaller batches are whole. Divided calls take one number of the script's stream.

    With one microbatch the module is its own.
    """
    done = subprocess.run([sys.executable, "-c", EXACT], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "1 True",
        "1 0 0 1 False",
        "9 1 1 1 False",
        "9 1 2 1 False",
        "9 1 3 1 False",
        "5 1 3 2 False",
        "True",
        "None True",
    ]
