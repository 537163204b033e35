"""Random draws of own rows beside those of a plain call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep.view.draws import UnknownDraw, default_generator, like, seen_inside
from samestep.view.operations import Operations
from samestep.view.region import Region

Compute = Callable[..., Any]


class NoExchange:
    """Refuses communication."""

    def join(self, compute: Any, value: Any) -> Any:
        raise AssertionError("a draw does not communicate")


def region_of(
    rows: int, start: int, stop: int, factors: Sequence[int | None], seed: int | None = None, microbatches: int = 8
) -> Region:
    bounds = [rows * number // microbatches for number in range(microbatches + 1)]
    slices = [
        (number, bounds[number], bounds[number + 1])
        for number in range(microbatches)
        if start <= bounds[number] and bounds[number + 1] <= stop
    ]
    return Region(rows, start, stop, NoExchange(), factors, slices, seed)


def divided(
    compute: Compute,
    inputs: Sequence[torch.Tensor],
    cuts: Sequence[int],
    factors: Sequence[int | None],
    seed: int | None = None,
) -> list[Any]:
    """Compute each slice of the rows from the same state of the generator; return results and check that state."""
    state = torch.get_rng_state()
    results, after = [], []
    for start, stop in pairwise(cuts):
        torch.set_rng_state(state)
        own = [given[start:stop] for given in inputs]
        operations = Operations(region_of(cuts[-1], start, stop, factors, seed))
        with operations:
            results.append(compute(*own))
        assert len(operations.draws) == len(factors)
        after.append(torch.get_rng_state())
    assert all(torch.equal(after[0], other) for other in after)
    return results


def check(
    compute: Compute,
    *inputs: torch.Tensor,
    factors: Sequence[int | None] = (1,),
    cuts: Sequence[int] | None = None,
    shared: bool = False,
    tolerance: float = 0.0,
) -> None:
    """Compare the slices with a plain call: the same bits, the same state of the generator, the same draws noted."""
    rows = inputs[0].shape[0]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    plain = compute(*(given.clone(memory_format=torch.preserve_format) for given in inputs))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    watched = Operations()
    with watched:
        again = compute(*(given.clone(memory_format=torch.preserve_format) for given in inputs))
    assert torch.equal(plain, again) and torch.equal(after, torch.get_rng_state())
    assert len(watched.draws) == len(factors)
    for shape, factor in zip(watched.draws, factors, strict=True):
        assert factor is None or shape[0] == factor * rows
    for chosen in [cuts] if cuts else [(0, rows), (0, 2, 5, rows), (0, 1, rows), (0, rows - 1, rows)]:
        torch.set_rng_state(state)
        copies = [given.clone(memory_format=torch.preserve_format) for given in inputs]
        results = divided(compute, copies, chosen, factors)
        assert torch.equal(after, torch.get_rng_state())
        if shared:
            assert all(torch.equal(plain, result) for result in results)
        else:
            whole = torch.cat(results)
            torch.testing.assert_close(whole, plain, rtol=tolerance, atol=tolerance)


def images(kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(kind)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "rows_second": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "rows_last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda x: x[:, :, :1].expand(7, 3, 4, 5),
    "expanded_rows": lambda x: x[:1].expand(7, 3, 4, 5),
    "part": lambda x: x[:, :, ::2, 1:],
}
DROPOUTS: dict[str, Compute] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "layer": nn.Dropout(0.5),
    "default": functional.dropout,
    "dropout2d": lambda x: functional.dropout2d(x, 0.4),
    "dropout2d_layer": nn.Dropout2d(0.4),
    "torch": lambda x: torch.dropout(x, 0.3, True),
    "torch_feature": lambda x: torch.feature_dropout(x, 0.3, True),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_has_the_bits_of_a_plain_call(name: str) -> None:
    for layout in LAYOUTS.values():
        check(DROPOUTS[name], layout(images()))
    for kind in (torch.float64, torch.bfloat16, torch.float16):
        check(DROPOUTS[name], images(kind))


@pytest.mark.parametrize("function", [nn.Dropout1d(0.4), nn.Dropout3d(0.4), functional.dropout1d])
def test_dropout_of_one_and_three_dimensions(function: Compute) -> None:
    more = (2, 2) if isinstance(function, nn.Dropout3d) else ()
    check(function, torch.ones(7, 4, *more))
    check(function, torch.ones(7, 4, 3, *more))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x, 0.3, inplace=True),
        lambda x: functional.dropout2d(x, 0.3, inplace=True),
        lambda x: torch.dropout_(x, 0.3, True),
        lambda x: torch.feature_dropout_(x, 0.3, True),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_dropout_in_place_writes_its_input(function: Compute, layout: str) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        assert function(y) is y
        return y

    check(compute, LAYOUTS[layout](images()))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_without_chance_draws_nothing(p: float) -> None:
    for function in (functional.dropout, functional.dropout2d):
        check(lambda x, drop=function: drop(x, p, True), images(), factors=())
    check(lambda x: functional.dropout(x, 0.5, False), images(), factors=())


def test_dropout_has_the_gradient_of_a_plain_call() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        y = functional.dropout2d(functional.dropout(leaf * 3, 0.2), 0.2, True)
        return torch.autograd.grad((y * y).sum(), leaf)[0]

    check(compute, images(), factors=(1, 1))


def test_dropout_of_features_without_positions() -> None:
    x = torch.randn(5, 7).t()
    check(lambda x: torch.feature_dropout(x, 0.3, True), x)
    check(lambda x: functional.dropout2d(x, 0.3), x[:, :, None, None])


def test_dropout_of_several_rows_for_each_row() -> None:
    check(lambda x: functional.dropout(x.reshape(-1, 5), 0.3).view(-1, 12, 5), images(), factors=(12,))


LIKES: dict[str, Compute] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like_low": lambda x: torch.randint_like(x, low=-3, high=9, dtype=torch.int64),
    "rand_like_kind": lambda x: torch.rand_like(x, dtype=torch.float64),
    "rand_like_format": lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "gumbel_hard": lambda x: functional.gumbel_softmax(x, hard=True, dim=1),
}


@pytest.mark.parametrize("name", LIKES)
def test_numbers_like_a_tensor_have_the_bits_of_a_plain_call(name: str) -> None:
    for layout in LAYOUTS.values():
        check(LIKES[name], layout(images()))
    check(LIKES[name], images(torch.bfloat16))


def test_gumbel_softmax_has_the_numbers_of_a_plain_call() -> None:
    check(lambda x: functional.gumbel_softmax(x, tau=0.7, dim=1), images(torch.float64), tolerance=1e-14)


FILLS: dict[str, Compute] = {
    "bernoulli": lambda y, x: y.bernoulli_(0.3),
    "bernoulli_default": lambda y, x: y.bernoulli_(),
    "uniform": lambda y, x: y.uniform_(-1, 2),
    "normal": lambda y, x: y.normal_(1, std=2),
    "exponential": lambda y, x: y.exponential_(2.0),
    "random": lambda y, x: y.random_(),
    "random_to": lambda y, x: y.random_(7),
    "random_from": lambda y, x: y.random_(-3, 7),
    "geometric": lambda y, x: y.geometric_(0.4),
    "cauchy": lambda y, x: y.cauchy_(),
    "log_normal": lambda y, x: y.log_normal_(0.5, 1.5),
}


@pytest.mark.parametrize("name", FILLS)
def test_filled_tensors_have_the_bits_of_a_plain_call(name: str) -> None:
    def fill(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert FILLS[name](y, x) is y
        return y

    for layout in ("contiguous", "channels_last", "rows_second"):
        check(lambda x: fill(torch.empty_like(x), x), LAYOUTS[layout](images()))


FACTORIES: dict[str, Compute] = {
    "rand": lambda x: torch.rand(x.shape[0], 3),
    "rand_tuple": lambda x: torch.rand((x.shape[0], 1, 1), dtype=torch.float64, device=x.device),
    "rand_size": lambda x: torch.rand(size=(x.shape[0],)),
    "randn": lambda x: torch.randn(x.shape[0], 40),
    "randn_half": lambda x: torch.randn(x.shape[0], 5, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(9, (x.shape[0],)),
    "randint_low": lambda x: torch.randint(-3, 9, (x.shape[0], 2), dtype=torch.int32),
    "randint_names": lambda x: torch.randint(low=2, high=9, size=(x.shape[0],)),
    "normal": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 17)),
    "normal_names": lambda x: torch.normal(mean=1.0, std=2.0, size=(x.shape[0], 3)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_new_tensors_have_the_bits_of_a_plain_call(name: str) -> None:
    check(FACTORIES[name], images())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.rand(7),
        lambda x: torch.rand(()),
        lambda x: torch.randn(2, 7),
        lambda x: torch.empty(7, 1).bernoulli_(0.5),
    ],
)
def test_shared_draws_are_equal_on_all_ranks(compute: Compute) -> None:
    check(compute, images(), factors=(None,), shared=True)
    first, second = divided(compute, [images()], [0, 4, 8], [None], seed=5)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
        lambda x: torch.distributions.Uniform(x, x + 1).sample(),
        lambda x: torch.distributions.Exponential(x.exp()).rsample(),
        lambda x: torch.distributions.Laplace(x, x.exp()).rsample(),
        lambda x: torch.distributions.Gumbel(x, x.exp()).rsample(),
        lambda x: torch.distributions.Cauchy(x, x.exp()).rsample(),
        lambda x: torch.distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
        lambda x: torch.distributions.Geometric(logits=x).sample(),
    ],
)
def test_samples_have_the_bits_of_a_plain_call(compute: Compute) -> None:
    check(compute, images()[:, 0, 0, :], cuts=(0, 2, 3, 7))
    check(compute, images().flatten(1)[:, ::10])


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.randn(x.shape[0], 2, out=torch.empty(0)),
        lambda x: torch.rand(x.shape[0], 2, generator=torch.Generator()),
        lambda x: torch.rand_like(x, requires_grad=True),
        lambda x: x.new_empty(x.shape[0], 6)[:, ::2].normal_(),
    ],
)
def test_other_draws_are_computed_whole(compute: Compute) -> None:
    with Operations():
        compute(images())
    with pytest.raises(UnknownDraw, match="a draw"):
        divided(compute, [images()], [0, 2, 7], [1])


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda q: None,
    "bool": lambda q: torch.ones(q.shape[-2], 6, dtype=torch.bool).tril(2),
    "float": lambda q: torch.linspace(-1, 1, 6).to(q.dtype).expand(q.shape[-2], 6),
    "rows": lambda q: (q[..., :6] > 0)[..., :1] | torch.ones(6, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_the_bits_of_a_plain_call(mask: str, kind: torch.dtype) -> None:
    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, MASKS[mask](q), 0.3)

    q, k, v = torch.randn(7, 2, 5, 8), torch.randn(7, 2, 6, 8), torch.randn(7, 2, 6, 8)
    check(compute, q.to(kind), k.to(kind), v.to(kind))
    check(compute, q[:, 0].to(kind), k[:, 0].to(kind), v[:, 0].to(kind))


def test_attention_with_options_has_the_bits_of_a_plain_call() -> None:
    q, k, v = torch.randn(7, 4, 6, 8), torch.randn(7, 2, 6, 8), torch.randn(7, 2, 6, 8)

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query=q, key=k, value=v, dropout_p=0.4, is_causal=True, scale=0.2, enable_gqa=True
        )

    check(compute, q, k, v)
    check(lambda *x: functional.scaled_dot_product_attention(*x, enable_gqa=True), q, k, v, factors=())


def test_attention_has_the_gradients_of_a_plain_call() -> None:
    def compute(*given: torch.Tensor) -> torch.Tensor:
        leaves = [one.clone().requires_grad_() for one in given]
        mask = torch.ones(5, 6, dtype=torch.bool).tril(2)
        y = functional.scaled_dot_product_attention(*leaves, mask, 0.3)
        return torch.cat(torch.autograd.grad((y * y).sum(), leaves), 2)

    kind = torch.float64
    q, k, v = (
        torch.randn(7, 2, 5, 8, dtype=kind),
        torch.randn(7, 2, 6, 8, dtype=kind),
        torch.randn(7, 2, 6, 8, dtype=kind),
    )
    check(compute, q, k, v, tolerance=1e-13)


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_has_the_bits_of_a_plain_call(weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def compute(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, x, x, need_weights=weights)[0]
        return result

    check(compute, torch.randn(7, 5, 8), factors=(2,) if weights else (1,), tolerance=1e-6)


def test_transformer_layer_has_the_bits_of_a_plain_call() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    check(layer, torch.randn(7, 5, 8), factors=(1, 1, 1, 1), tolerance=1e-5)


def test_seeded_numbers_depend_on_the_microbatch_only() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = layer(x) + torch.randn_like(x) + torch.empty(x.shape[0], 1, 1).bernoulli_(0.5)
        return y + torch.rand(3, 1, 1)[:1] + torch.normal(0.0, 1.0, x.shape)

    x = torch.randn(19, 5, 8)
    factors = (1, 1, 1, 1, 1, 1, None, 1)
    before = torch.get_rng_state()
    results = []
    for ranks in (1, 2, 3, 8):
        cuts = [19 * (8 * rank // ranks) // 8 for rank in range(ranks + 1)]
        results.append(torch.cat(divided(compute, [x], cuts, factors, seed=11)))
    assert torch.equal(torch.get_rng_state(), before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-6)
    assert not torch.equal(torch.cat(divided(compute, [x], [0, 19], factors, seed=12)), results[0])


def test_a_draw_that_the_trial_has_not_seen_is_refused() -> None:
    with pytest.raises(UnknownDraw, match="was not there"):
        divided(lambda x: torch.rand(1), [images()], [0, 7], [])
    with pytest.raises(UnknownDraw, match="has the shape"):
        divided(lambda x: torch.rand(1), [images()], [0, 7], [1])


def test_a_copy_of_a_function_is_seen_inside_by_modes() -> None:
    with Operations() as operations:
        functional.gumbel_softmax(torch.ones(3, 2))
    assert torch.Tensor.exponential_ in operations.functions
    assert torch.equal(seen_inside(functional.relu)(torch.ones(2)), torch.ones(2))


def test_the_default_generator_is_put_back() -> None:
    before = torch.get_rng_state()
    with default_generator(torch.Generator().manual_seed(5)):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (1, 2, 3, 0), (3, 0, 1, 2)])
def test_memory_has_the_order_of_the_whole_batch(order: tuple[int, ...], rows: int) -> None:
    sizes = (6, 3, 4, 5)
    inverse = [order.index(dimension) for dimension in range(4)]

    def ordered(count: int) -> torch.Tensor:
        given = (count, *sizes[1:])
        return torch.empty([given[dimension] for dimension in order]).permute(inverse)

    whole = ordered(6)
    for own in (whole[:rows], torch.empty_like(whole[:rows]), ordered(rows)):
        assert like(own, sizes).stride() == whole.stride()
