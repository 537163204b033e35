"""Mean losses of own rows and those of a plain call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep.view.operations import Operations
from samestep.view.region import Region
from samestep.view.slice_threads import AllHere, Part, run_in_lockstep

Compute = Callable[..., torch.Tensor]
CUTS = ([0, 12], [0, 5, 12], [0, 1, 3, 12], [0, 1, 2, 11, 12])


class Counted(AllHere):
    calls = 0

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return super().sum(parts)


def divided(compute: Compute, inputs: Sequence[torch.Tensor], cuts: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Compute slices of the rows in lock step; return their losses and the number of sums."""

    def one(start: int, stop: int, part: Part) -> torch.Tensor:
        with Operations(Region(cuts[-1], start, stop, part, ())):
            return compute(*(given[start:stop] for given in inputs))

    parts = [Part(partial(one, start, stop), nullcontext) for start, stop in pairwise(cuts)]
    sums = Counted()
    return run_in_lockstep(parts, sums), sums.calls


def check(compute: Compute, *inputs: torch.Tensor, exchanges: int = 1) -> None:
    """Compare losses and gradients of slices, combined as by a divided call, with those of a plain call."""
    for cuts in CUTS:
        plain_inputs = [given.clone().requires_grad_(given.is_floating_point()) for given in inputs]
        own_inputs = [given.clone().requires_grad_(given.is_floating_point()) for given in inputs]
        plain = compute(*plain_inputs)
        with Operations():
            assert torch.equal(compute(*plain_inputs), plain) or plain.isnan()
        losses, calls = divided(compute, own_inputs, cuts)
        assert calls == exchanges
        if exchanges:
            for loss in losses:
                torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12, equal_nan=True)
        sizes = [stop - start for start, stop in pairwise(cuts)]
        combined = torch.stack([loss * (size / cuts[-1]) for loss, size in zip(losses, sizes, strict=True)]).sum()
        torch.testing.assert_close(combined, plain, rtol=1e-12, atol=1e-12, equal_nan=True)
        wanted = [given for given in plain_inputs if given.requires_grad]
        own = [given for given in own_inputs if given.requires_grad]
        expected = torch.autograd.grad(plain, wanted, allow_unused=True)
        gradients = torch.autograd.grad(combined, own, allow_unused=True)
        for one, other in zip(expected, gradients, strict=True):
            if one is not None:
                torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12, equal_nan=True)


LOGITS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.tensor([0, 4, -100, 2, 2, -100, -100, 1, 3, 0, -100, 4])
WEIGHT = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_cross_entropy(ignored: int, weight: torch.Tensor | None, smoothing: float) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, y, weight, ignore_index=ignored, label_smoothing=smoothing)

    targets = CLASSES.where(CLASSES != -100, ignored)
    check(compute, LOGITS, targets)
    layer = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=smoothing)
    check(layer, LOGITS, targets)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_nll_loss(weight: torch.Tensor | None) -> None:
    check(lambda x, y: functional.nll_loss(x.log_softmax(1), y, weight), LOGITS, CLASSES)
    check(nn.NLLLoss(weight), LOGITS, CLASSES)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_losses_of_several_dimensions(weight: torch.Tensor | None) -> None:
    x = torch.randn(12, 5, 3, 2, dtype=torch.float64)
    y = torch.randint(5, (12, 3, 2))
    y[torch.rand(12, 3, 2) < 0.5] = -100
    check(lambda x, y: functional.cross_entropy(x, y, weight, label_smoothing=0.1), x, y)
    check(lambda x, y: functional.nll_loss(x, y, weight), x, y)
    check(lambda x, y: functional.cross_entropy(x.movedim(1, -1).flatten(0, 2), y.flatten(), weight), x, y)


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="a function of newer versions of torch")
def test_linear_cross_entropy() -> None:
    matrix = torch.randn(5, 5, dtype=torch.float64)
    check(lambda x, y: functional.linear_cross_entropy(x, matrix, y, weight=WEIGHT), LOGITS, CLASSES)


def test_probabilities_as_targets_need_no_exchange() -> None:
    check(functional.cross_entropy, LOGITS, LOGITS.softmax(1).flip(0), exchanges=0)
    check(lambda x, y: functional.cross_entropy(x, y, WEIGHT), LOGITS, LOGITS.softmax(1).flip(0), exchanges=0)


@pytest.mark.filterwarnings("ignore:size_average")
def test_old_forms_of_reduction() -> None:
    check(lambda x, y: functional.cross_entropy(x, y, None, True), LOGITS, CLASSES)
    check(lambda x, y: functional.cross_entropy(x, y, reduce=True), LOGITS, CLASSES)
    for options in ({"size_average": False}, {"reduce": False}, {"reduction": "sum"}, {"reduction": "none"}):
        losses, calls = divided(lambda x, y, o=options: functional.nll_loss(x, y, **o), [LOGITS, CLASSES], [0, 5, 12])
        assert calls == 0
        plain = functional.nll_loss(LOGITS, CLASSES, **options)  # type: ignore[arg-type]
        joined = torch.cat([loss.reshape(-1) for loss in losses])
        torch.testing.assert_close(joined.sum(), plain.sum())


@pytest.mark.parametrize("function", [functional.mse_loss, functional.l1_loss])
def test_losses_with_weights_of_values(function: Compute) -> None:
    y, weight = LOGITS.flip(0), LOGITS.exp().flip(1)

    def compute(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return function(x, y, weight=w.detach())

    check(compute, LOGITS, y, weight)
    check(lambda x, y, w: function(x, y), LOGITS, y, weight, exchanges=0)


def test_weights_of_values_receive_their_gradient() -> None:
    check(lambda x, y, w: functional.mse_loss(x, y, weight=w), LOGITS, LOGITS.flip(0), LOGITS.exp().flip(1))


def test_a_loss_used_further_is_that_of_the_whole_batch() -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, y).exp() + functional.nll_loss(x, y) ** 2

    check(compute, LOGITS, CLASSES, exchanges=2)


def test_a_loss_without_rows_is_kept() -> None:
    codes = torch.randn(5, 5, dtype=torch.float64)
    check(lambda x, y: functional.cross_entropy(codes, torch.arange(5)) + 0 * x.sum(), LOGITS, CLASSES)


def test_all_targets_ignored_gives_nan_as_a_plain_call() -> None:
    ignored = torch.full((12,), -100)
    check(functional.cross_entropy, LOGITS, ignored)
    losses, _ = divided(functional.cross_entropy, [LOGITS, ignored], [0, 5, 12])
    assert all(loss.isnan() for loss in losses)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow(kind: torch.dtype) -> None:
    x = (torch.randn(12, 5) * 1e4).to(kind)
    x = x.repeat(40, 1)
    y = CLASSES.repeat(40)
    plain = functional.cross_entropy(x.double(), y, WEIGHT.to(kind).double())
    losses, _ = divided(lambda x, y: functional.cross_entropy(x, y, WEIGHT.to(kind)), [x, y], [0, 100, 480])
    for loss in losses:
        assert loss.dtype == kind and loss.isfinite()
        torch.testing.assert_close(loss.double(), plain, rtol=1e-2, atol=0)


def test_autocast_gives_single_precision() -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(x, y)

    x = LOGITS.bfloat16()
    losses, _ = divided(compute, [x, CLASSES], [0, 5, 12])
    for loss in losses:
        torch.testing.assert_close(loss, compute(x, CLASSES))


SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6)
UNIT = LOGITS.sigmoid()
EQUAL_COUNTS: dict[str, Compute] = {
    "bce": lambda x, u, s: functional.binary_cross_entropy(x.sigmoid(), u, weight=WEIGHT),
    "bce_logits": lambda x, u, s: functional.binary_cross_entropy_with_logits(x, u, WEIGHT, pos_weight=WEIGHT),
    "huber": lambda x, u, s: functional.huber_loss(x, u),
    "smooth_l1": lambda x, u, s: functional.smooth_l1_loss(x, u),
    "kl_div": lambda x, u, s: functional.kl_div(x.log_softmax(1), u),
    "batchmean": lambda x, u, s: functional.kl_div(x.log_softmax(1), u, reduction="batchmean"),
    "poisson": lambda x, u, s: functional.poisson_nll_loss(x, u),
    "gaussian": lambda x, u, s: functional.gaussian_nll_loss(x, u, u),
    "margin_ranking": lambda x, u, s: functional.margin_ranking_loss(x[:, 0], x[:, 1], s),
    "hinge": lambda x, u, s: functional.hinge_embedding_loss(x[:, 0], s),
    "cosine": lambda x, u, s: functional.cosine_embedding_loss(x, x.exp(), s),
    "soft_margin": lambda x, u, s: functional.soft_margin_loss(x[:, 0], s),
    "multi_margin": lambda x, u, s: functional.multi_margin_loss(x, x.argmin(1), weight=WEIGHT),
    "multilabel": lambda x, u, s: functional.multilabel_margin_loss(x, x.argsort(1)),
    "multilabel_soft": lambda x, u, s: functional.multilabel_soft_margin_loss(x, u, WEIGHT),
    "triplet": lambda x, u, s: functional.triplet_margin_loss(x, x.exp(), x.flip(1)),
    "triplet_distance": lambda x, u, s: functional.triplet_margin_with_distance_loss(x, x.exp(), x.flip(1)),
    "ctc": lambda x, u, s: functional.ctc_loss(
        x.log_softmax(1).expand(4, *x.shape).contiguous(),
        1 + (x[:, :2] > 0).long(),
        torch.full((len(x),), 4),
        1 + (x[:, 2] > 0).long(),
    ),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", EQUAL_COUNTS)
def test_losses_that_count_rows_alike_are_averaged_without_a_rule(name: str) -> None:
    compute = EQUAL_COUNTS[name]
    check(lambda x, u, s: compute(x, u.detach(), s.detach()), LOGITS, UNIT, SIGNS, exchanges=0)
