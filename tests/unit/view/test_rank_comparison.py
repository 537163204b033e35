"""Differences between ranks are found from a few bytes, and named."""

import gc
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from samestep.errors import RankMismatchError
from samestep.microbatches import Slices
from samestep.view.crossings import RowBounds
from samestep.view.module_state import ModuleState
from samestep.view.rank_comparison import InStep
from samestep.view.rows_tensor import Rows

Facts = Callable[[int, InStep], None]


class Texts:
    """All-gather of texts between threads."""

    def __init__(self, size: int) -> None:
        self._texts = [""] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self.calls = 0

    def of(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._barrier.wait()
            self.calls += rank == 0
            return list(self._texts)

        return gather


def exchanged(ranks: list[InStep]) -> list[RankMismatchError | None]:
    """Exchange the facts as words; return the error of each rank."""
    digests = [one.digest() for one in ranks]

    def error(one: InStep) -> RankMismatchError | None:
        try:
            one.compare(digests)
        except RankMismatchError as mismatch:
            return mismatch
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(error, ranks))


def made(size: int) -> tuple[list[InStep], Texts]:
    texts = Texts(size)
    return [InStep(texts.of(rank), is_alone=False) for rank in range(size)], texts


def errors_of(facts: Facts, size: int = 3) -> list[RankMismatchError | None]:
    ranks, _ = made(size)
    for rank, one in enumerate(ranks):
        seed()
        facts(rank, one)
    return exchanged(ranks)


def call(ranks: InStep, module: nn.Module, leaves: list[Any]) -> None:
    """Facts of a call of a module, which has its state as an attribute."""
    state = vars(module).setdefault("state", ModuleState())
    ranks.facts_of_call(module, state, leaves)


def seed() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.temperature = 2.0


def step(rank: int, ranks: InStep, change: Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any]) -> None:
    """Facts of one step with a change on rank 1."""
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    batch = torch.arange(32.0).view(8, 4)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == 1:
        change(network, optimizer, batch)
    call(ranks, network, [batch, True, "name", 3, None])
    ranks.facts_of_backward([torch.full((8, 4), 0.5), None])
    ranks.facts_of_step(optimizer)


def _set_rate(_: Any, optimizer: torch.optim.Optimizer, __: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.2


def _no_gradient(network: Any, _: Any, __: Any) -> None:
    network.first[0].bias.grad = None


CHANGES: dict[str, tuple[Callable[[Any, Any, Tensor], Any], str, list[str]]] = {
    "batch": (lambda _, __, batch: batch[4:].add_(1), "E_RANK_BATCH", ["values of the batch", "16.0 and 17.0"]),
    "shape": (lambda _, __, batch: batch.resize_(4, 8), "E_RANK_BATCH", ["arguments", "(8, 4, ", "(4, 8, "]),
    "mode": (lambda net, _, __: net.first[2].eval(), "E_RANK_SETTINGS", ["first.2.training is 1.0 and 0.0"]),
    "rate of dropout": (
        lambda net, _, __: setattr(net.first[2], "p", 0.2),
        "E_RANK_SETTINGS",
        ["first.2.p is 0.1 and 0.2"],
    ),
    "temperature": (
        lambda net, _, __: setattr(net, "temperature", 3.0),
        "E_RANK_SETTINGS",
        [": temperature is 2.0 and 3.0"],
    ),
    "buffer": (
        lambda net, _, __: net.first[1].running_var.mul_(2),
        "E_RANK_MISMATCH",
        ["buffers", "first.1.running_var is"],
    ),
    "torch": (lambda _, __, ___: torch.rand(1), "E_RANK_MISMATCH", ["random generators"]),
    "numpy": (lambda _, __, ___: numpy.random.rand(), "E_RANK_MISMATCH", ["random generators"]),
    "python": (lambda _, __, ___: random.random(), "E_RANK_MISMATCH", ["random generators"]),
    "rate": (_set_rate, "E_RANK_SETTINGS", ["lr of group 0 is 0.1 and 0.2"]),
    "none": (_no_gradient, "E_RANK_MISMATCH", ["gradients: is there number 1 is 1 and 0"]),
    "gradient": (
        lambda net, _, __: net.first[0].weight.grad.mul_(3),
        "E_RANK_MISMATCH",
        ["gradients (1.0 and 3.0)"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_named_on_all_ranks(name: str) -> None:
    change, code, words = CHANGES[name]
    errors = errors_of(lambda rank, ranks: step(rank, ranks, change))
    first = errors[0]
    assert first is not None
    assert {str(error) for error in errors} == {str(first)}
    assert first.code == code
    for word in ["0 and 1", __file__, *words]:
        assert word in str(first)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_facts_are_no_error(size: int) -> None:
    ranks, texts = made(size)
    for number in range(3):
        for rank, one in enumerate(ranks):
            seed()
            torch.rand(number)
            step(rank, one, lambda *_: None)
        assert exchanged(ranks) == [None] * size
    assert texts.calls == 0


def test_another_loss_names_both_lines() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        if rank == 0:
            ranks.facts_of_backward([torch.ones(3)])
        else:
            ranks.facts_of_backward([torch.zeros(3)])

    errors = errors_of(facts)
    text = str(errors[2])
    line = facts.__code__.co_firstlineno
    assert "gradient of the loss (1.0 and 0.0)" in text
    assert f"{__file__}:{line + 2}" in text
    assert f"{__file__}:{line + 4}" in text


def one_more_call(rank: int, ranks: InStep) -> None:
    for _ in range(2 if rank == 1 else 1):
        call(ranks, nn.Linear(2, 2), [])


def another_place(rank: int, ranks: InStep) -> None:
    if rank == 1:
        ranks.fact_of_place("the moon")
    else:
        call(ranks, nn.Linear(2, 2), [])


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (one_more_call, "rank 0 reached nothing further while rank 1 reached a call of a module"),
        (another_place, f"rank 0 reached a call of a module while rank 1 reached the moon, at {__file__}:"),
    ],
)
def test_what_one_rank_alone_has_reached_is_named(facts: Facts, text: str) -> None:
    errors = errors_of(facts)
    assert errors[0] is not None
    assert errors[0].code == "E_RANK_DESYNC"
    assert text in str(errors[0])


def test_another_setting_of_torch_is_named() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        torch.backends.cudnn.benchmark = rank == 1
        call(ranks, nn.Linear(2, 2), [])

    before = torch.backends.cudnn.benchmark
    try:
        errors = errors_of(facts)
    finally:
        torch.backends.cudnn.benchmark = before
    assert errors[0] is not None
    assert errors[0].code == "E_RANK_SETTINGS"
    assert "torch.backends.cudnn.benchmark is False and True" in str(errors[0])


def test_another_module_is_named() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        call(ranks, nn.Linear(2, 2) if rank == 2 else nn.Bilinear(2, 2, 2), [])

    errors = errors_of(facts)
    assert "ranks 0 and 2 differ in: a call of a module (call 1: Bilinear and call 1: Linear)" in str(errors[1])


def test_values_of_buffers_are_compared_in_turn() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        network = Network()
        if rank == 1:
            network.first[1].running_mean.data = torch.ones(4)
        for _ in range(3):
            call(ranks, network, [])

    errors = errors_of(facts)
    assert "buffers (0.0 and 1.0)" in str(errors[0])


TENSORS = {
    "channels last": torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "transposed": torch.randn(40, 30).T,
    "part": torch.randn(40, 30)[:, 3:20],
    "expanded": torch.randn(1, 30).expand(40, 30),
    "no dimensions": torch.tensor(3.0),
    "bfloat16": torch.randn(50).bfloat16(),
    "integers": torch.arange(100),
    "flags": torch.arange(100) % 3 == 0,
    "complex": torch.randn(30, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_values_of_any_layout_are_compared(name: str) -> None:
    tensor = TENSORS[name]

    def facts(rank: int, ranks: InStep) -> None:
        ranks.facts_of_backward([tensor.clone() if rank != 1 else torch.zeros_like(tensor)])

    assert errors_of(facts)[0] is not None
    assert errors_of(lambda _, ranks: ranks.facts_of_backward([tensor])) == [None] * 3


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0, 3), torch.eye(3).to_sparse(), torch.randn(3, dtype=torch.complex64).conj(), torch.randn(2, 3)],
    ids=["empty", "sparse", "conjugate", "inference"],
)
def test_tensors_without_plain_memory_are_no_error(tensor: Tensor) -> None:
    with torch.inference_mode():
        shape = tensor.clone() if tensor.shape == (2, 3) else tensor
    assert errors_of(lambda _, ranks: call(ranks, nn.Linear(2, 2), [shape])) == [None] * 3


def test_nan_is_equal_to_itself() -> None:
    def facts(_: int, ranks: InStep) -> None:
        module = nn.Dropout(0.5)
        module.limit = float("nan")  # type: ignore[assignment]
        call(ranks, module, [torch.full((3,), float("nan"))])

    assert errors_of(facts) == [None] * 3


def test_modules_may_change() -> None:
    """Numbers that become something else, removed and replaced submodules, and None in place of a buffer."""

    def facts(rank: int, ranks: InStep) -> None:
        network = Network()
        call(ranks, network, [])
        network.temperature = "warm"  # type: ignore[assignment]
        call(ranks, network, [])
        network.first[1] = nn.Identity()
        call(ranks, network, [])
        network.first[0].register_buffer("late", torch.ones(2))
        call(ranks, network, [])
        network.first[0].late = None  # type: ignore[assignment]
        call(ranks, network, [])
        del network.temperature
        call(ranks, network, [])
        if rank == 1:
            network.first[2].p = 0.7  # type: ignore[assignment]
        call(ranks, network, [])

    errors = errors_of(facts)
    assert "first.2.p is 0.1 and 0.7" in str(errors[0])


def test_facts_without_exchange_stay_few_and_are_compared() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        module = nn.Linear(2, 2)
        for number in range(500):
            call(ranks, module, [number if rank != 1 or number != 2 else 7])
        assert len(ranks._facts) < 1100

    errors = errors_of(facts)
    assert "earlier calls" in str(errors[0])


def test_modules_are_not_kept_alive() -> None:
    ranks, _ = made(1)
    module = Network()
    module.trainer = [module]
    call(ranks[0], module, [])
    exchanged(ranks)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
    network = Network()
    before = set(vars(network))
    ranks[0].facts_of_call(network, ModuleState(), [])
    assert set(vars(network)) == before


class _Rank(NamedTuple):
    rank: int
    size: int = 2


@pytest.mark.parametrize("is_argument", [True, False])
@pytest.mark.parametrize("columns", [4, 5])
def test_of_rows_that_ranks_hold_the_whole_shape_is_compared(is_argument: bool, columns: int) -> None:
    def facts(rank: int, ranks: InStep) -> None:
        bounds = RowBounds(_Rank(rank), Slices([(0, 3), (3, 5)], 2, rank))  # type: ignore[arg-type]
        own = torch.full((bounds.stop - bounds.start, columns if rank else 4), float(rank))
        if is_argument:
            call(ranks, nn.Linear(4, 4), [Rows(own, bounds)])
        else:
            ranks.facts_of_backward([Rows(own, bounds)])

    errors = errors_of(facts, 2)
    if columns == 4:
        assert errors == [None, None]
        return
    code, name = ("E_RANK_BATCH", "arguments") if is_argument else ("E_RANK_MISMATCH", "gradient of the loss")
    for error in errors:
        assert error is not None
        assert error.code == code
        assert name in str(error)
        assert "(5, 4, torch.float32)" in str(error)
        assert "(5, 5, torch.float32)" in str(error)


def test_seeds_that_differ_are_named_with_their_lines() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        ranks.seeds["numpy.random.seed"] = ("train.py", 3), "7"
        ranks.seeds["torch.manual_seed"] = ("train.py", 4), str(100 + rank)
        ranks.fact_of_samples(rank)

    errors = errors_of(facts, 3)
    title = "ranks 0 and 1 have different seeds: torch.manual_seed of train.py:4 is 100 and 101 [E_RANK_SETTINGS]"
    for error in errors:
        first, *_, last = str(error).splitlines()
        assert first == title
        assert last.startswith("  also:     ranks 0 and 1 differ in: samples of a batch, at ")


def test_equal_seeds_are_not_mentioned() -> None:
    def facts(rank: int, ranks: InStep) -> None:
        ranks.seeds["torch.manual_seed"] = ("train.py", 4), "100"
        ranks.fact_of_samples(rank)

    assert "seed of" not in str(errors_of(facts, 2)[0])
