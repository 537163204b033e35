"""Sums of the gradients of a module's parameters, on ranks that are threads, and their layout in buckets."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.errors import RunError
from samestep.reduce.fast import FastReduction
from samestep.view import gradient_sums as hub_module
from samestep.view.bucket_layout import Bucket
from samestep.view.gradient_sums import Hub

SIZES = pytest.mark.parametrize("size", [3, 4])
WIDTHS = (5, 7, 3, 2)


def plan_of_single_parameters(parameters: Sequence[Tensor]) -> list[list[int]]:
    return [[index] for index in reversed(range(len(parameters)))]


@pytest.fixture
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each parameter. All have different sizes, so that sums of two buckets cannot be mixed up."""
    monkeypatch.setattr(hub_module, "plan_buckets", plan_of_single_parameters)


class Experts(nn.Module):
    """Three layers; which of them a row uses depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b).double() for a, b in pairwise(WIDTHS))
        self.expert = nn.Linear(2, 2).double()
        self.unused = nn.Linear(9, 1).double()

    def forward(self, x: Tensor, use_expert: bool = True) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.expert(x) if use_expert else x


_LOCK = threading.Lock()


def made(kind: type[nn.Module]) -> nn.Module:
    """Return a module with the same values on all ranks, which share one random generator."""
    with _LOCK:
        return kind()


class OneRank:
    """A module with its hub on one rank."""

    def __init__(self, ranks: ThreadRanks, module: nn.Module | None = None) -> None:
        self.ranks = ranks
        self.module = module or made(Experts)
        self.parameters = [one for one in self.module.parameters() if one.requires_grad]
        begun: list[int] = []
        self.begun = begun
        self.hub = Hub(self.module, self.parameters, FastReduction(ranks), lambda: begun.append(1))

    @property
    def backwards(self) -> int:
        return len(self.begun)

    def call(self, seed: int = 0, use_expert: bool = True) -> Tensor:
        """Return the own rows of a call, with a graph that ends in the anchors."""
        x = inputs(seed)[self.ranks.rank :: self.ranks.size]
        with self.hub.aliases_in_place(0):
            y = self.module(x, use_expert)
        return Anchored.apply(y, *self.hub.anchors)

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters]


class Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *anchors: Tensor) -> Tensor:
        ctx.anchors = len(anchors)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return (gradient, *[torch.zeros(()) for _ in range(ctx.anchors)])


def inputs(seed: int) -> Tensor:
    return torch.randn(9, WIDTHS[0], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(script: Callable[[Experts], Any]) -> list[Tensor | None]:
    module = Experts()
    script(module)
    return [parameter.grad for parameter in module.parameters()]


def require_close(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert [one is None for one in found] == [one is None for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@SIZES
@pytest.mark.usefixtures("many_buckets")
def test_gradients_are_summed_and_absent_ones_stay_absent(size: int) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        one.call().pow(2).sum().backward()
        return one.gradients(), one.backwards

    wanted = expected(lambda module: module(inputs(0)).pow(2).sum().backward())
    assert wanted[-1] is None
    for found, backwards in on_ranks(size, compute):
        require_close(found, wanted)
        assert backwards == 1


@SIZES
@pytest.mark.usefixtures("many_buckets")
def test_an_expert_that_one_rank_uses_has_its_gradient_on_all(size: int) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        one.call(use_expert=ranks.rank == 1).pow(2).sum().backward()
        return one.gradients(), [flat.numel() for flat in one.ranks.started]

    def script(module: Experts) -> None:
        parts = [module(inputs(0)[rank::size], rank == 1).pow(2).sum() for rank in range(size)]
        torch.stack(parts).sum().backward()

    results = on_ranks(size, compute)
    for found, order in results:
        require_close(found, expected(script))
        assert order == results[0][1]


@pytest.mark.usefixtures("many_buckets")
def test_several_calls_and_uses_outside_are_one_sum() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        loss = one.call(0).pow(2).sum() + one.call(1).pow(3).sum() + one.call(2, use_expert=False).sum()
        for parameter in one.parameters:
            loss = loss + parameter.pow(2).sum()
        loss.backward()
        return one.gradients(), len(one.ranks.started)

    def script(module: Experts) -> None:
        loss = module(inputs(0)).pow(2).sum() + module(inputs(1)).pow(3).sum() + module(inputs(2), False).sum()
        for parameter in module.parameters():
            loss = loss + parameter.pow(2).sum()
        loss.backward()

    for found, sums in on_ranks(3, compute):
        require_close(found, expected(script))
        assert sums == 10


def test_gradients_of_two_backwards_do_not_share_memory() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        held = []
        for seed in range(2):
            one.call(seed).pow(2).sum().backward()
            held.append([None if g is None else g.clone() for g in one.gradients()])
            first = one.gradients() if seed == 0 else first  # noqa: F821
            for parameter in one.parameters:
                parameter.grad = None
        return first, held[0]

    for found, wanted in on_ranks(3, compute):
        require_close(found, wanted)


@pytest.mark.usefixtures("many_buckets")
@pytest.mark.parametrize("chosen", [[0], [9], [2, 5], [4, 0], [9, 8, 1]])
def test_gradients_of_some_parameters(chosen: list[int]) -> None:
    """Sums of buckets after one that this backward does not need are not forgotten, and not paired with others."""

    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        losses = [one.call(seed).pow(2).sum() for seed in range(2)]
        wanted = [one.parameters[index] for index in chosen]
        first = torch.autograd.grad(losses[0], wanted, allow_unused=True)
        losses[1].backward()
        return first, one.gradients(), one.backwards

    module = Experts()
    parameters = list(module.parameters())
    first = torch.autograd.grad(
        module(inputs(0)).pow(2).sum(), [parameters[index] for index in chosen], allow_unused=True
    )
    second = expected(lambda module: module(inputs(1)).pow(2).sum().backward())
    for found, gradients, backwards in on_ranks(3, compute):
        require_close(found, first)
        require_close(gradients, second)
        assert backwards == 2


@pytest.mark.usefixtures("many_buckets")
def test_a_graph_that_is_kept_is_summed_at_each_backward() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        loss = one.call().pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        for parameter in one.parameters:
            parameter.grad = None
        one.call().pow(2).sum().backward()
        return one.gradients(), one.backwards

    # The failed backward may have begun; it must leave nothing behind.
    wanted = expected(lambda module: module(inputs(0)).pow(2).sum().backward())
    for found, _ in on_ranks(3, compute):
        require_close(found, wanted)


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 5, sparse=True).double()
        self.convolution = nn.Conv1d(1, 3, 2).double()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, _: bool) -> Tensor:
        y = self.embedding(x[:, :1].abs().mul(3).long().clamp(max=9)[:, 0])
        y = self.convolution(y.unsqueeze(1))
        return y.mean(2) * self.scale.double()


def test_dtypes_and_sparse_gradients() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks, made(Kinds))
        one.call().pow(2).sum().backward()
        return one.gradients(), sorted(str(flat.dtype) for flat in ranks.started)

    module = Kinds()
    module(inputs(0), True).pow(2).sum().backward()
    wanted = [parameter.grad for parameter in module.parameters()]
    assert wanted[1].is_sparse
    dense = [one.to_dense() if one.is_sparse else one for one in wanted if one is not None]
    for found, dtypes in on_ranks(3, compute):
        assert dtypes == ["torch.float32", "torch.float64"]
        assert [one.dtype for one in found] == [one.dtype for one in dense]
        for one, other in zip(found, dense, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# --- no_sync -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("many_buckets")
def test_pending_gradients_are_summed_by_the_next_backward() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        one.hub.is_deferred = True
        for seed in range(2):
            one.call(seed).pow(2).sum().backward()
        assert ranks.started == []
        with pytest.raises(RunError) as caught:
            one.hub.require_no_pending()
        assert caught.value.code == "E_RUN"
        one.hub.is_deferred = False
        one.call(2, use_expert=False).pow(2).sum().backward()
        one.hub.require_no_pending()
        return one.gradients(), len(ranks.started), one.backwards

    def script(module: Experts) -> None:
        for seed in range(3):
            module(inputs(seed), seed < 2).pow(2).sum().backward()

    for found, sums, backwards in on_ranks(3, compute):
        require_close(found, expected(script))
        assert sums == 10
        assert backwards == 1


def test_a_gradient_that_was_dropped_while_pending_is_absent() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        one.hub.is_deferred = True
        one.call(0).pow(2).sum().backward()
        one.module.zero_grad()
        one.hub.is_deferred = False
        one.call(1, use_expert=False).pow(2).sum().backward()
        return one.gradients()

    wanted = expected(lambda module: module(inputs(1), False).pow(2).sum().backward())
    for found in on_ranks(3, compute):
        require_close(found, wanted)


# --- life of a hub -----------------------------------------------------------------------------------


def _replace_data(module: Experts) -> None:
    module.expert.weight.data = module.expert.weight.data.clone()


def _replace_parameter(module: Experts) -> None:
    module.expert.weight = nn.Parameter(module.expert.weight.detach())


def _cast(module: Experts) -> None:
    module.expert.float()


def _delete(module: Experts) -> None:
    module.expert.bias = None


def _rename(module: Experts) -> None:
    bias = module.expert.bias
    del module.expert.bias
    module.expert.register_parameter("other", bias)


@pytest.mark.parametrize("change", [_replace_data, _replace_parameter, _cast, _delete, _rename])
def test_a_hub_is_not_current_after_a_change(change: Callable[[Experts], None]) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        assert one.hub.is_current(one.parameters)
        assert not one.hub.is_current(one.parameters[:-1])
        assert not one.hub.is_current(one.parameters[::-1])
        change(one.module)
        return one.hub.is_current(list(one.module.parameters()))

    assert on_ranks(1, compute) == [False]


def test_parameters_are_back_after_a_call_and_after_an_exception() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        before = list(one.module.parameters())
        weight = one.module.expert.weight
        with pytest.raises(ZeroDivisionError), one.hub.aliases_in_place(0):
            assert one.module.expert.weight is not weight
            raise ZeroDivisionError
        return all(a is b for a, b in zip(before, one.module.parameters(), strict=True))

    assert on_ranks(1, compute) == [True]


def test_a_hub_is_freed_with_its_last_graph() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        one = OneRank(ranks)
        one.call().sum().backward()
        hub, module = weakref.ref(one.hub), weakref.ref(one.module)
        del one
        gc.collect()
        return hub() is None, module() is None

    assert on_ranks(1, compute) == [(True, True)]


def filled(*parameters: torch.Tensor) -> tuple[Bucket, torch.Tensor, list[torch.Tensor]]:
    bucket = Bucket(parameters)
    gradients = [torch.randn(parameter.shape, dtype=parameter.dtype) for parameter in parameters]
    return bucket, bucket.fill(gradients), gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_come_back(dtype: torch.dtype) -> None:
    shapes = [(3, 5), (), (1,), (130,), (0, 4), (2, 3, 4, 5)]
    bucket, flat, gradients = filled(*[torch.empty(shape, dtype=dtype) for shape in shapes])
    assert flat.dim() == 1
    assert flat.dtype == dtype
    for found, gradient in zip(bucket.gradients(flat), gradients, strict=True):
        assert found is not None
        assert found.shape == gradient.shape
        assert torch.equal(found, gradient)
        assert found.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_each_gradient_starts_at_a_multiple_of_128_bytes() -> None:
    bucket, flat, _ = filled(torch.empty(1), torch.empty(33), torch.empty(32), torch.empty(7))
    offsets = [view.storage_offset() * 4 for view in bucket.views(flat)]
    assert offsets == [0, 128, 128 * 3, 128 * 4]
    assert flat.numel() * 4 == 128 * 6  # with the flags


PARAMETERS = {
    "contiguous": torch.empty(4, 3, 2, 2),
    "channels last": torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels last, one channel": torch.empty(4, 1, 2, 2).to(memory_format=torch.channels_last),
    "transposed": torch.empty(5, 4).t(),
    "permuted": torch.empty(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_strides_are_those_of_a_dense_parameter(name: str) -> None:
    parameter = PARAMETERS[name]
    bucket, flat, (gradient,) = filled(parameter)
    (view,) = bucket.views(flat)
    assert view.stride() == parameter.stride()
    assert torch.equal(view, gradient)


@pytest.mark.parametrize(
    "parameter",
    [torch.empty(4, 6)[:, ::2], torch.empty(4, 1).expand(4, 5), torch.empty(8, 6)[:, :3], torch.empty(9)[::3]],
    ids=["steps", "expanded", "part", "steps of one dimension"],
)
def test_a_parameter_with_gaps_has_contiguous_gradients(parameter: torch.Tensor) -> None:
    bucket, flat, gradients = filled(parameter, torch.empty(2))
    view, after = bucket.views(flat)
    assert view.is_contiguous()
    assert after.storage_offset() >= view.numel()
    assert torch.equal(view, gradients[0])


def test_an_absent_gradient_is_zero_and_has_no_flag() -> None:
    parameters = [torch.empty(3), torch.empty(2, 2), torch.empty(5)]
    bucket = Bucket(parameters)
    flat = bucket.fill([None, torch.ones(2, 2), None])
    assert [view.abs().sum().item() for view in bucket.views(flat)] == [0, 4, 0]
    gradients = bucket.gradients(flat)
    assert gradients[0] is None
    assert gradients[2] is None
    assert gradients[1] is not None
    assert gradients[1].tolist() == [[1, 1], [1, 1]]


def test_a_gradient_of_one_rank_is_one_of_all() -> None:
    parameters = [torch.empty(3), torch.empty(2), torch.empty(1)]
    bucket = Bucket(parameters)
    total = bucket.fill([None, torch.ones(2), None]) + bucket.fill([torch.ones(3), torch.ones(2), None])
    gradients = [None if one is None else one.tolist() for one in bucket.gradients(total)]
    assert gradients == [[1, 1, 1], [2, 2], None]


def test_a_gradient_of_zero_is_present() -> None:
    bucket = Bucket([torch.empty(3)])
    (gradient,) = bucket.gradients(bucket.fill([torch.zeros(3)]))
    assert gradient is not None


def test_each_fill_has_memory_of_its_own() -> None:
    bucket = Bucket([torch.empty(3)])
    first = bucket.fill([torch.ones(3)])
    bucket.fill([torch.zeros(3)])
    assert first[:3].tolist() == [1, 1, 1]


def test_added_gradients_are_those_of_one_sum() -> None:
    parameters = [torch.zeros(3, 2), torch.zeros(5), torch.zeros(1)]
    bucket = Bucket(parameters)
    first = [torch.ones(3, 2), None, None]
    second = [torch.full((3, 2), 2.0), torch.ones(5), None]
    flat = bucket.fill(first)
    bucket.add(flat, second)
    weights, bias, unused = bucket.gradients(flat)
    assert weights is not None
    assert bias is not None
    assert weights.equal(torch.full((3, 2), 3.0))
    assert bias.equal(torch.ones(5))
    assert unused is None
