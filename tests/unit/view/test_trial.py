"""Trials: which modules are divided, which are computed whole and why, and that no trace remains."""

import copy
import logging
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from samestep.view import operations as operations_module
from samestep.view.crossings import totals
from samestep.view.operations import Operations
from samestep.view.trial import try_division
from samestep.view.trial_result import ComputedWhole, Division, Output

ROWS = Output("rows")
BATCH = 7


class Call(nn.Module):
    """A module with a forward that is a function of (module, arguments...)."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.function(self, *arguments, **options)


def tried(module: nn.Module, *arguments: Any, rows: int = BATCH, **options: Any) -> Division:
    leaves = tree_flatten((arguments, options))[0]
    has_rows = tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows for leaf in leaves)
    forward = module.forward
    return try_division(module, arguments, options, forward=forward, divided=forward, rows=rows, has_rows=has_rows)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, (BATCH, *shape), generator=torch.Generator().manual_seed(2))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.sign()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def tied() -> nn.Module:
    embedding = nn.Embedding(9, 4)
    head = nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Tanh(), head)


def linear_loss(module: Any, values: torch.Tensor, reduction: str) -> torch.Tensor:
    errors = (module.layer(values) - 1).square().mean(1)
    return errors.mean() if reduction == "mean" else errors.sum()


def asserted(module: Any, values: torch.Tensor) -> torch.Tensor:
    torch._assert(values.dim() == 2, f"expected two dimensions, got {values.shape}")
    result: torch.Tensor = module.layer(values)
    return result


def half_inside(module: Any, values: torch.Tensor) -> torch.Tensor:
    hidden = module.a(values).half().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = module.b(hidden)
    return hidden.to(torch.float32) + torch.ones(3, dtype=torch.bfloat16)


def blend_dictionary(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    hidden = module.layer(batch["x"])
    return {"hidden": hidden, "loss": F.mse_loss(hidden, batch["y"]), "name": "blend", "layers": 3}


def attention_mask(module: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = module.layer(values) @ values.transpose(1, 2)
    return scores.masked_fill(~mask[:, None, :], float("-inf")).softmax(-1) @ values


def padding() -> torch.Tensor:
    return torch.arange(5) < torch.tensor([5, 4, 3, 5, 2, 1, 4])[:, None]


def rounded(module: Any, values: torch.Tensor) -> torch.Tensor:
    hidden = module.layer(values)
    return hidden + (hidden.round() - hidden).detach()


def counted(module: Any, values: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return values * module.calls


def experts(module: Any, values: torch.Tensor) -> torch.Tensor:
    gates = module.gate(values).softmax(-1)
    return sum(gates[:, i : i + 1] * expert(values) for i, expert in enumerate(module.experts))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def divided(
    build: Callable[[], nn.Module],
    arguments: Callable[[], tuple[Any, ...]] = lambda: (x(3),),
    outputs: tuple[Output, ...] | None = (ROWS,),
) -> Any:
    return build, arguments, outputs


DIVIDED = {
    "linear": divided(lambda: nn.Linear(3, 2)),
    "assertion": divided(lambda: Call(asserted, layer=nn.Linear(3, 2))),
    "in-place": divided(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True))),
    "conv2d": divided(lambda: nn.Conv2d(3, 4, 3, padding=1, groups=1), lambda: (x(3, 6, 6),)),
    "instance norm": divided(lambda: nn.InstanceNorm2d(2, affine=True), lambda: (x(2, 4, 4),)),
    "batch norm in eval": divided(lambda: nn.BatchNorm1d(4).eval(), lambda: (x(4),)),
    "embedding": divided(lambda: nn.Embedding(9, 4), lambda: (labels(9, 5),)),
    "sparse embedding": divided(lambda: nn.Embedding(9, 4, sparse=True), lambda: (labels(9, 5),)),
    "lstm": divided(lambda: nn.LSTM(3, 4, 2, batch_first=True), lambda: (x(5, 3),), outputs=None),
    "attention": divided(
        lambda: Call(lambda m, v: m.a(v, v, v), a=nn.MultiheadAttention(8, 2, batch_first=True)),
        lambda: (x(5, 8),),
        outputs=(ROWS, ROWS),
    ),
    "sdpa": divided(
        lambda: Call(
            lambda m, v: F.scaled_dot_product_attention(m.q(v), v, v, is_causal=True),
            q=nn.Linear(8, 8),
        ),
        lambda: (x(2, 5, 8),),
    ),
    "encoder": divided(encoder, lambda: (x(5, 8),)),
    "transformer": divided(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), lambda: (x(5, 8), x(4, 8))
    ),
    "masked attention": divided(lambda: Call(attention_mask, layer=nn.Linear(4, 4)), lambda: (x(5, 4), padding())),
    "complex": divided(lambda: nn.Linear(3, 2, dtype=torch.complex64), lambda: (torch.complex(x(3), x(3)),)),
    "two inputs, two outputs": divided(
        lambda: Call(lambda m, a, b: (m.l(a) + b, m.l(b).sum(1)), l=nn.Linear(3, 3)),
        lambda: (x(3), x(3)),
        outputs=(ROWS, ROWS),
    ),
    "dictionaries": divided(
        lambda: Call(blend_dictionary, layer=nn.Linear(3, 3)),
        lambda: ({"x": x(3), "y": x(3)},),
        outputs=(ROWS, Output("mean"), Output("value"), Output("value")),
    ),
    "mean loss": divided(
        lambda: Call(linear_loss, layer=nn.Linear(3, 2)), lambda: (x(3), "mean"), outputs=(Output("mean"),)
    ),
    "sum loss": divided(
        lambda: Call(linear_loss, layer=nn.Linear(3, 2)), lambda: (x(3), "sum"), outputs=(Output("sum"),)
    ),
    "mean loss with decay": divided(
        lambda: Call(lambda m, v: m.l(v).square().mean() + 0.1 * m.l.weight.square().sum(), l=nn.Linear(3, 2)),
        outputs=(Output("mean"),),
    ),
    "several items per row": divided(
        lambda: Call(lambda m, v: m.l(v).flatten(0, 1), l=nn.Linear(3, 3)),
        lambda: (x(5, 3),),
        outputs=(Output("rows", 5),),
    ),
    "straight through": divided(
        lambda: Call(lambda m, v: m.b(StraightThrough.apply(m.a(v))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    ),
    "detached straight through": divided(lambda: Call(rounded, layer=nn.Linear(3, 4))),
    "frozen part": divided(lambda: nn.Sequential(frozen(nn.Linear(3, 4)), nn.Linear(4, 2))),
    "unused part": divided(lambda: Call(lambda m, v: m.a(v), a=nn.Linear(3, 4), b=nn.Linear(3, 4))),
    "tied weights": divided(tied, lambda: (labels(9, 5),)),
    "checkpointing": divided(
        lambda: Call(lambda m, v: checkpoint(m.b, m.a(v), use_reentrant=False), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    ),
    "reentrant checkpointing": divided(
        lambda: Call(lambda m, v: checkpoint(m.b, m.a(v), use_reentrant=True), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    ),
    "casts inside": divided(lambda: Call(half_inside, a=nn.Linear(3, 4), b=nn.Linear(4, 3))),
    "no parameters": divided(nn.Tanh, lambda: (x(3).requires_grad_(),)),
    "gradient of an input": divided(lambda: nn.Linear(3, 2), lambda: (x(3).requires_grad_(),)),
    "experts": divided(
        lambda: Call(experts, gate=nn.Linear(3, 2), experts=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    ),
    "constant output": divided(
        lambda: Call(lambda m, v: (m.l(v), m.l.weight * 2, torch.arange(6)), l=nn.Linear(3, 2)),
        outputs=(ROWS, Output("constant"), Output("constant")),
    ),
    "constant as long as a part": divided(
        lambda: Call(lambda m, v: (v @ m.p, m.p.exp()), p=nn.Parameter(torch.randn(3, 3))),
        outputs=(ROWS, Output("constant")),
    ),
    "masked logits": divided(lambda: Call(lambda m, v: m.l(v).masked_fill(v > 0.5, float("-inf")), l=nn.Linear(3, 3))),
    "weight norm": divided(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
    "spectral norm": divided(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))),
    "hidden layer in a list": divided(lambda: Call(lambda m, v: m.layers[0](v), layers=[frozen(nn.Linear(3, 4))])),
    "counter": divided(lambda: Call(counted, calls=0)),
    "top k per row": divided(lambda: Call(lambda m, v: m.l(v).topk(2, 1), l=nn.Linear(3, 4)), outputs=(ROWS, ROWS)),
    "branch on all rows": divided(
        lambda: Call(lambda m, v: m.l(v) * (2 if (v > -100).all() else 1), l=nn.Linear(3, 4))
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_divided(name: str) -> None:
    build, arguments, outputs = DIVIDED[name]
    torch.manual_seed(0)
    module = build()
    values = arguments()
    if outputs is None:  # the states of a recurrent layer have their rows in the second dimension
        with pytest.raises(ComputedWhole, match="follow the rows"):
            tried(module, *values)
        return
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            division = tried(module, *values)
        assert division.outputs == outputs
        assert division.minimum_rows == 1


def clip(module: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.normalize(module.layer(a)) @ F.normalize(module.layer(b)).T


def tiny(module: Any, values: torch.Tensor) -> torch.Tensor:
    hidden = module.layer(values)
    return hidden.square().mean() + 1e-6 * hidden.mean(0).square().sum()


def masked_mean(module: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    errors = module.layer(values).square().mean(-1)
    return (errors * mask).sum() / mask.sum()


def keep(module: Any, values: torch.Tensor) -> torch.Tensor:
    module.kept = module.layer(values).detach()
    return values * 2


def codebook(module: Any, values: torch.Tensor) -> torch.Tensor:
    nearest = torch.cdist(values, module.codes).argmin(1)
    with torch.no_grad():
        module.counts.lerp_(F.one_hot(nearest, 4).to(module.counts.dtype).sum(0), 0.1)
    return values + (module.codes[nearest] - values).detach()


def buffered(function: Callable[..., Any], **buffers: torch.Tensor) -> nn.Module:
    module = Call(function)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def layered(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Call(function, layer=nn.Linear(3, 3))


def whole(build: Callable[[], nn.Module], reason: str, arguments: Any = lambda: (x(3),)) -> Any:
    return build, arguments, reason


WHOLE = {
    "batch mean": whole(layered(lambda m, v: m.layer(v) - m.layer(v).mean(0)), "joins samples"),
    "tiny joining term": whole(layered(tiny), "joins samples"),
    "gate at zero": whole(
        lambda: Call(
            lambda m, v: m.l(v) + m.gate * m.l(v).mean(0), l=nn.Linear(3, 3), gate=nn.Parameter(torch.zeros(1))
        ),
        "joins samples",
    ),
    "joined in the backward only": whole(
        layered(lambda m, v: m.layer(v) + (m.layer(v).mean(0) - m.layer(v).mean(0).detach())), "gradients"
    ),
    "contrastive logits": whole(layered(lambda m, v: clip(m, v, v)), "does not follow the rows"),
    "joined behind -inf": whole(
        layered(lambda m, v: (m.layer(v) + m.layer(v).mean(0)).masked_fill(v > 0.5, float("-inf"))), "joins samples"
    ),
    "loss over a mask of ones": whole(layered(masked_mean), "joins samples", lambda: (x(4, 3), torch.ones(BATCH, 4))),
    "loss over a mask of trues": whole(
        layered(masked_mean), "joins samples", lambda: (x(4, 3), torch.ones(BATCH, 4, dtype=torch.bool))
    ),
    "keeps rows": whole(layered(keep), "writes kept"),
    "mean in a buffer": whole(
        lambda: buffered(lambda m, v: m.mean.lerp_(v.mean(0), 0.1) * 0 + v, mean=torch.zeros(3)), "writes mean"
    ),
    "codebook": whole(lambda: buffered(codebook, codes=torch.randn(4, 3), counts=torch.zeros(4)), "writes counts"),
    "list of losses": whole(
        lambda: Call(lambda m, v: m.losses.append(float(v.detach().mean())) or v, losses=[]), "takes numbers out"
    ),
    "softmax over the batch": whole(layered(lambda m, v: m.layer(v).softmax(0)), "joins samples"),
    "two copies of the batch": whole(layered(lambda m, v: torch.cat([m.layer(v), v])), "joins samples"),
    "first row": whole(layered(lambda m, v: m.layer(v)[0]), "joins samples"),
    "attention over the batch": whole(
        lambda: Call(lambda m, v: m.a(v, v, v)[0], a=nn.MultiheadAttention(4, 1)), "joins samples", lambda: (x(5, 4),)
    ),
    "position by row": whole(
        lambda: Call(lambda m, v: v + m.p[: len(v)], p=nn.Parameter(torch.randn(BATCH, 3))), "joins samples"
    ),
    "batch norm": whole(lambda: Call(lambda m, v: (v - v.mean(0)) / (v.std(0) + 1)), "joins samples"),
    "loop over rows": whole(layered(lambda m, v: torch.stack([m.layer(row) for row in v])), "operations depend"),
    "count": whole(layered(lambda m, v: (m.layer(v), (v > 0).sum().item())), "takes numbers out"),
    "number of rows": whole(layered(lambda m, v: (m.layer(v), len(v) + 1)), "value that depends"),
    "numpy per row": whole(
        layered(lambda m, v: m.layer(v) + torch.tensor(numpy.random.rand(len(v), 1))), "outside of torch"
    ),
    "python per row": whole(
        layered(lambda m, v: m.layer(v) + torch.tensor([[random.random()] for _ in range(len(v))])), "outside of torch"
    ),
    "torch without a rule": whole(
        layered(lambda m, v: m.layer(v) + torch._sample_dirichlet(v.double().exp()).to(v.dtype)),
        "random numbers|UnknownDraw",
    ),
    "rows that pass a test": whole(layered(lambda m, v: m.layer(v)[v[:, 0] > 0]), "rows|joins"),
    "batch in the second dimension": whole(layered(lambda m, v: m.layer(v).T), "does not follow"),
    "only NaN": whole(layered(lambda m, v: m.layer(v) * float("nan")), "NaN"),
    "zero scalar": whole(layered(lambda m, v: (m.layer(v) - 1e9).relu().sum()), "zero in the trial"),
    "raises": whole(layered(lambda m, v: {}["missing"]), "KeyError"),
    "lazy": whole(lambda: nn.LazyLinear(3), "without a shape"),
    "writes a parameter": whole(
        layered(lambda m, v: m.layer.weight.detach().mul_(2).sum() + m.layer(v)), "writes into a parameter"
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name: str) -> None:
    build, arguments, reason = WHOLE[name]
    torch.manual_seed(0)
    module = build()
    values = arguments()
    with pytest.raises(ComputedWhole, match=reason):
        tried(module, *values)


# --- coincidences of sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(2, 8))
def test_a_matrix_as_long_as_the_batch_is_not_cut(batch: int) -> None:
    values, prototypes = torch.randn(batch, 3), torch.randn(batch, 3)
    division = tried(Call(lambda m, v, p: v @ p.T), values, prototypes, rows=batch)
    assert division.inputs == (True, False)
    assert division.outputs == (ROWS,)


def test_an_input_without_rows_gets_the_sum_of_gradients() -> None:
    division = tried(nn.Bilinear(3, 3, 2), x(3), x(3).requires_grad_())
    assert division.inputs == (True, True)
    weights = torch.randn(3, 2, requires_grad=True)
    assert tried(Call(lambda m, v, w: v @ w), x(3), weights).inputs == (True, False)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6, 20])
def test_any_number_of_rows(batch: int) -> None:
    assert tried(nn.Linear(3, 2), torch.randn(batch, 3), rows=batch).outputs == (ROWS,)
    with pytest.raises(ComputedWhole, match="joins"):
        tried(Call(lambda m, v: v - v.mean(0)), torch.randn(max(batch, 2), 3), rows=max(batch, 2))


def test_nothing_to_cut() -> None:
    with pytest.raises(ComputedWhole, match="no argument with rows"):
        tried(nn.Linear(3, 2), torch.randn(BATCH + 1, 3))


def test_one_value_per_row_in_a_list_is_not_cut() -> None:
    for rows in (5, 6, 7):
        with pytest.raises(ComputedWhole, match="must match"):
            scaled = Call(lambda m, v, factors: v * torch.tensor(factors)[:, None])
            tried(scaled, torch.randn(rows, 3), list(range(rows)), rows=rows)


def test_a_branch_for_batches_without_padding_is_judged_alone() -> None:
    def forward(module: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = module.l(values)
        return hidden if mask.all() else hidden.masked_fill(~mask, 0)

    division = tried(Call(forward, l=nn.Linear(3, 4)), x(3), torch.ones(BATCH, 4, dtype=torch.bool))
    assert (division.outputs, division.minimum_rows) == ((ROWS,), 1)


def test_forces_are_gradients_inside_of_the_forward() -> None:
    def forward(module: Any, positions: torch.Tensor) -> Any:
        positions = positions.requires_grad_()
        energies = module.l(positions).square().sum(1)
        return energies, torch.autograd.grad(energies.sum(), positions, create_graph=True)[0]

    assert tried(Call(forward, l=nn.Linear(3, 4)), x(3)).outputs == (ROWS, ROWS)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout()])
def test_layers_with_a_rule(layer: nn.Module) -> None:
    module = nn.Sequential(
        nn.Linear(3, 3), layer, nn.Linear(3, 2), copy.deepcopy(layer) if layer.__dict__.get("p") else nn.Tanh()
    )
    assert tried(module, x(3)).outputs == (ROWS,)
    assert tried(module, x(3)).minimum_rows == 1


@pytest.mark.parametrize("affine", [True, False])
def test_means_that_are_zero_but_for_rounding(affine: bool) -> None:
    """After batch norm without a nonlinearity, as in EfficientNet and ShuffleNet, the means of a layer are its bias."""
    module = nn.Sequential(
        nn.Linear(3, 64), nn.BatchNorm1d(64, affine=affine), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)
    )
    for _ in range(2):
        module(x(3))  # statistics are not those of the beginning
    if affine:
        nn.init.normal_(module[1].bias, std=1e-10)
    assert tried(module, x(3)).outputs == (ROWS,)


def test_one_row_alone_may_be_another_matter() -> None:
    division = tried(Call(lambda m, v: m.l(v).squeeze(), l=nn.Linear(3, 2)), x(3))
    assert division.minimum_rows == 2


def test_of_two_towers_the_second_may_be_computed_by_all_ranks() -> None:
    division = tried(Call(clip, layer=nn.Linear(3, 3)), x(3), x(3))
    assert (division.inputs, division.outputs) == ((True, False), (ROWS,))


# --- rules ------------------------------------------------------------------------------------------------


def center(operations: Operations, function: Any, arguments: Any, options: Any) -> torch.Tensor:
    """Rule of a function that subtracts the mean of the batch."""
    region = operations.region
    (values,) = arguments
    if region is None:
        return function(values)
    return values - region.exchange.join(totals, values.sum(0)) / region.rows


def centered(values: torch.Tensor) -> torch.Tensor:
    if torch.overrides.has_torch_function_unary(values):
        return torch.overrides.handle_torch_function(centered, (values,), values)
    return values - values.mean(0)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operations_module.RULES, centered, center)


def test_a_rule_with_totals_makes_a_joining_layer_divisible(rules: None) -> None:
    module = nn.Sequential(
        nn.Linear(3, 4), Call(lambda m, v: centered(v)), nn.Linear(4, 4), Call(lambda m, v: centered(v))
    )
    assert tried(module, x(3)).outputs == (ROWS,)
    assert tried(module, x(3).requires_grad_()).outputs == (ROWS,)


def test_a_wrong_rule_is_found(rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(operations: Operations, function: Any, arguments: Any, options: Any) -> torch.Tensor:
        if operations.region is None:
            return function(*arguments)
        total = operations.region.exchange.join(totals, arguments[0].sum(0)).detach()  # no gradient through the mean
        return arguments[0] - total / operations.region.rows

    monkeypatch.setitem(operations_module.RULES, centered, wrong)
    with pytest.raises(ComputedWhole, match="gradients"):
        tried(Call(lambda m, v: centered(m.l(v)) ** 2, l=nn.Linear(3, 2)), x(3))


def test_buffers_of_parts_are_their_own_at_each_total(rules: None) -> None:
    def forward(module: Any, values: torch.Tensor) -> torch.Tensor:
        module.steps += 1
        module.seen.append(int(module.steps))
        return centered(values) * module.steps * len(module.seen)

    module = buffered(forward, steps=torch.zeros((), dtype=torch.long))
    module.seen = []
    with pytest.raises(ComputedWhole, match="joins"):  # without the rule
        operations_module.RULES.pop(centered)
        tried(module, x(3))
    operations_module.RULES[centered] = center
    assert tried(module, x(3)).outputs == (ROWS,)
    assert (int(module.steps), module.seen) == (0, [])


def test_draws_per_row_and_shared_draws_are_told_apart_by_evidence(rules: None) -> None:
    def forward(module: Any, values: torch.Tensor) -> torch.Tensor:
        hidden = module.l(values)
        return (
            hidden * torch.randn(len(values), 4)
            + torch.randn(4)
            + torch.randn(6, 1)[:1]
            + torch.randn(2 * len(values), 4).view(-1, 2, 4).sum(1)
        )

    division = tried(Call(forward, l=nn.Linear(3, 4)), x(3))
    assert division.draw_factors == (1, None, None, 2)


def test_draws_that_do_not_follow_the_rows_are_refused(rules: None) -> None:
    with pytest.raises(ComputedWhole, match="follow the rows"):
        tried(Call(lambda m, v: v + torch.randn(3, len(v)).T), x(3))


def test_a_part_that_asks_for_another_number_of_totals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(operations: Operations, function: Any, arguments: Any, options: Any) -> torch.Tensor:
        if operations.region is not None and operations.region.own > 2:
            operations.region.exchange.join(totals, torch.ones(1))
        return function(*arguments)

    monkeypatch.setitem(operations_module.RULES, torch.special.expit, odd)
    threads = threading.active_count()
    with pytest.raises(ComputedWhole, match="OutOfStep"):
        tried(Call(lambda m, v: torch.special.expit(v)), x(3))
    assert threading.active_count() == threads


# --- precision --------------------------------------------------------------------------------------------


def test_an_operation_without_float64_is_judged_in_float32() -> None:
    def single(module: Any, values: torch.Tensor) -> torch.Tensor:
        hidden = module.layer(values)
        if hidden.dtype is torch.float64:
            raise RuntimeError("\"kernel\" not implemented for 'Double'")
        return hidden

    assert tried(Call(single, layer=nn.Linear(3, 3)), x(3)).outputs == (ROWS,)
    with pytest.raises(ComputedWhole, match="joins"):
        tried(Call(lambda m, v: single(m, v) + v.mean(0), layer=nn.Linear(3, 3)), x(3))


def test_the_dtype_of_an_attribute_is_the_precision_of_the_trial() -> None:
    seen = set()

    def forward(module: Any, values: torch.Tensor) -> torch.Tensor:
        hidden = (
            values.to(module.dtype) + torch.zeros(3, dtype=module.dtype) + torch.tensor(numpy.ones(3, numpy.float32))
        )
        seen.add(hidden.dtype)
        return hidden

    tried(Call(forward, dtype=torch.float16), x(3))
    assert seen == {torch.float64}


def test_little_memory_means_two_rows() -> None:
    sizes = []

    def forward(module: Any, values: torch.Tensor) -> torch.Tensor:
        sizes.append(len(values))
        if len(values) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return module.l(values)

    assert tried(Call(forward, l=nn.Linear(3, 2)), x(3)).outputs == (ROWS,)
    assert max(sizes[1:]) == 2

    def never(module: Any, values: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(ComputedWhole, match="memory"):
        tried(Call(never), x(3))


# --- no trace ---------------------------------------------------------------------------------------------


class Messy(nn.Module):
    """Writes everything that a forward can write."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.plain = torch.zeros(3)
        self.history = {"calls": [0]}
        self.fails = fails

    def forward(self, batch: dict[str, torch.Tensor], items: list[int]) -> torch.Tensor:
        print("printed")
        logging.getLogger("messy").error("logged")
        warnings.warn("warned", stacklevel=1)
        self.mean.add_(1)
        self.plain += 1
        self.history["calls"].append(1)
        self.new = 3
        self.layer.register_forward_hook(lambda *_: None)
        self.layer.weight.requires_grad_(True)
        self.eval()
        batch["extra"] = batch["x"]
        batch["x"].mul_(2)
        items.append(1)
        random.random()
        numpy.random.rand()
        torch.rand(1)
        torch.set_default_dtype(torch.float16)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        if self.fails:
            raise ValueError
        return self.layer(batch["x"])


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_remains(fails: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    module = Messy(fails=fails)
    module.layer.weight.grad = torch.ones(3, 3)
    parameters = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    attributes = {name: copy.copy(value) for name, value in module.__dict__.items()}
    batch, items = {"x": x(3)}, [7]
    values = batch["x"].clone()
    states = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state()
    versions = module.mean._version, batch["x"]._version
    tensors = module.mean, module.plain, module.history
    filters = list(warnings.filters)
    threads = threading.enumerate()
    try:
        tried(module, batch, items)
    except ComputedWhole as refusal:
        assert fails or "requires" not in str(refusal)
    assert all(module.get_parameter(name) is kept for name, (kept, _) in parameters.items())
    assert all(torch.equal(kept, value) for kept, value in parameters.values())
    assert module.layer.weight.grad.sum() == 9
    assert module.layer.bias.grad is None
    assert module.__dict__.keys() == attributes.keys()
    assert (module.mean, module.plain, module.history) == tensors
    assert not (module.mean.any() or module.plain.any())
    assert module.history == {"calls": [0]}
    assert module.training
    assert not module.layer._forward_hooks
    assert (list(batch), items) == (["x"], [7])
    assert torch.equal(batch["x"], values)
    assert versions == (module.mean._version, batch["x"]._version)
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert list(warnings.filters) == filters
    assert threading.enumerate() == threads
    assert not capsys.readouterr().out
    assert not caplog.records


def test_autocast_and_inference_of_the_caller() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tried(nn.Linear(3, 2), x(3)).outputs == (ROWS,)
        assert torch.is_autocast_enabled("cpu")
        assert nn.Linear(3, 2)(x(3)).dtype is torch.bfloat16
    with torch.inference_mode():
        assert tried(encoder(), x(5, 8)).outputs == (ROWS,)
        with pytest.raises(ComputedWhole, match="joins"):
            tried(Call(lambda m, v: v - v.mean(0)), x(3))


def test_the_verdict_does_not_depend_on_generators() -> None:
    module = Call(lambda m, v: v * torch.rand(1), l=nn.Linear(3, 2))
    for seed in range(3):
        torch.manual_seed(seed)
        tried(module, x(3))


def test_numbers_that_follow_the_rows() -> None:
    class Sized:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values
            self.shape = values.shape

    division = tried(Call(lambda module, values: (Sized(2 * values), 2 * len(values), 3)), x(4))
    kinds = [(output.kind, output.factor) for output in division.outputs]
    assert kinds == [("rows", 1), ("count", 1), ("value", 1), ("count", 2), ("value", 1)]
    with pytest.raises(ComputedWhole, match="returns a value that depends on the rows"):
        tried(Call(lambda module, values: (2 * values, len(values) + 1)), x(4))
