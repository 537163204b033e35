# ruff: noqa: PLC3002, RUF015
"""Table of operations on tensors of shape (rows, 3, 4, 5), and the forms of tensors on which they run."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Leaves:
    """Plain tensors that require gradients beside Rows."""

    def __init__(self, has_gradients: bool) -> None:
        self.has_gradients = has_gradients
        self.made: dict[str, Tensor] = {}

    def own(self, value: Tensor) -> Tensor:
        """Return a copy that requires gradients if it can."""
        copied = value.clone()
        return copied.requires_grad_(self.has_gradients and value.is_floating_point())

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return a plain tensor with fixed values."""
        if name not in self.made:
            self.made[name] = self.own(values(name, *shape))
        return self.made[name]


Compute = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operation on one form of tensors.

    Attributes:
        name: unique name.
        compute: function of the leaves and the inputs.
        inputs: makes the inputs, of all rows.
        batch: rows of the batch.
        form: of the tensors.
        has_gradients: whether it also runs with inputs that require gradients.
        tolerance: of values and gradients.
        is_refused: an error of Samestep is the right result.
    """

    name: str
    compute: Compute
    inputs: Callable[[], list[Tensor]]
    batch: int
    form: str = ""
    has_gradients: bool = True
    tolerance: float = 1e-4
    is_refused: bool = False


def values(name: str, *shape: int) -> Tensor:
    """Return normal numbers that depend on the name only."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator)


def labels(x: Tensor, classes: int = 3) -> Tensor:
    """Return a class for each row."""
    return torch.arange(x.shape[0]) % classes


def pixels(x: Tensor) -> Tensor:
    """Return a class for each pixel; -1 for some."""
    return (torch.arange(x.shape[0] * 20) * 7 % 11 % 4 - 1).view(x.shape[0], 4, 5)


def perm(x: Tensor) -> Tensor:
    """Return a permutation of the rows."""
    return torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))


def changed(change: Callable[[Tensor, Tensor], Any]) -> Compute:
    """Return a function that changes a copy of the first input in place."""

    def compute(leaves: Leaves, x: Tensor, y: Tensor) -> Any:
        x = x * 1
        result = change(x, y)
        return [x, result] if isinstance(result, Tensor) and result is not x else x

    return compute


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def saved(x: Tensor) -> Tensor:
    """Return a tensor that was saved and loaded."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, weight).float()


def second(x: Tensor) -> Tensor:
    """Return a sum of squares of gradients, which needs second derivatives."""
    (gradient,) = torch.autograd.grad((x.tanh() ** 2).sum(), x, create_graph=True)
    return gradient.square().sum()


def hooked(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return z * y


def focal(x: Tensor) -> Tensor:
    loss = F.cross_entropy(x, pixels(x).clamp(min=0), reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def confusion(x: Tensor) -> Tensor:
    target, found = pixels(x), x.argmax(1)
    kept = (target >= 0) & (found < 3)
    return torch.bincount(3 * target[kept] + found[kept], minlength=9)


def attacked(x: Tensor, y: Tensor) -> Any:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((x * y.detach()).sigmoid().sum(), x)
    return (x + 0.1 * gradient.sign()).detach()


def accumulated(x: Tensor) -> list[Tensor]:
    """Return a gradient that was gathered before another one was added to it, and that is written then."""
    x = x.detach().requires_grad_()
    (x * 2).sum().backward()
    gradient = x.grad
    assert gradient is not None
    found = [gradient[1] * 1]
    (x * x.detach()).sum().backward()
    found.append(gradient * 1)
    gradient.mul_(0.5)
    (x * 3).sum().backward()
    return [*found, gradient * 1, x.grad * 1]


def pushed(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return gradients of backwards from tensors that are not scalars, and one that was assigned."""
    x = x.detach().requires_grad_()
    x.tanh().backward(y.detach())
    assert x.grad is not None
    found = [x.grad * 1]
    x.grad = None
    (x * 2).backward(gradient=y.detach())
    x.grad = x.grad * 2
    return [*found, x.grad * 1]


def made_leaves(x: Tensor) -> list[Any]:
    """Return gradients of leaves: of a tensor, of a view of it, and of one that was a leaf before."""
    x = x.detach()
    view = x[:, 1:]
    view.requires_grad = True
    found = [x.requires_grad, view.is_leaf, torch.zeros_like(x, requires_grad=True).is_leaf]
    (view * view * x[:, 1:]).sum().backward()
    x.requires_grad_().requires_grad_(False).requires_grad_()
    (x * x).sum().backward()
    return [*found, view.grad * 1, x.grad * 1]


def retained(x: Tensor) -> Tensor:
    y = x * 2
    if not y.requires_grad:
        return y
    y.retain_grad()
    y.square().sum().backward(retain_graph=True)
    kept = y.grad * 1
    y.grad = None
    return kept


def metadata_after_a_gather(x: Tensor) -> list[bool]:
    with torch.no_grad():
        x[1].sum()
        found = [x.requires_grad, x.is_leaf]
    return [*found, x.requires_grad, x.is_leaf, x[1].requires_grad, (x * 2).is_leaf]


def copied(x: Tensor) -> Tensor:
    """Return a copy of a tensor that was written after a gather."""
    x[1].fill_(2)
    return copy.deepcopy(x)


def written(z: Tensor, where: Any, value: Any) -> Tensor:
    z[where] = value
    return z


UNARY = """abs neg sign exp expm1 sqrt rsqrt square log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh
atanh sigmoid logit erf erfc erfinv reciprocal floor ceil round trunc frac relu sgn signbit isnan isinf isfinite sinc
rad2deg deg2rad logical_not nan_to_num lgamma digamma exp2 i0 angle positive"""
BINARY = """add sub mul div true_divide floor_divide remainder fmod maximum minimum fmax fmin atan2 hypot copysign
nextafter heaviside xlogy eq ne lt le gt ge logical_and logical_or logical_xor isclose max min float_power"""
ACTIVATIONS = """relu relu6 silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign
tanhshrink softshrink hardshrink logsigmoid gelu"""
IN_PLACE = """add_ sub_ mul_ div_ copy_ fmod_ logical_and_ lt_"""
REDUCED = "sum mean prod amax amin any all argmax argmin std var median logsumexp norm count_nonzero nansum nanmean"


def _tables() -> dict[str, Compute]:
    table: dict[str, Compute] = {}
    for name in UNARY.split():
        table[name] = lambda w, x, y, f=name: getattr(torch, f)(x.clamp(0.1, 0.9) if f in ("erfinv", "logit") else x)
    for name in BINARY.split():
        table[f"{name} of two"] = lambda w, x, y, f=name: getattr(torch, f)(x.abs() + 0.1, y.abs() + 0.1)
    for name in ACTIVATIONS.split():
        table[f"F.{name}"] = lambda w, x, y, f=name: getattr(F, f)(x)
    for name in IN_PLACE.split():
        table[name] = changed(lambda x, y, f=name: getattr(x, f)(y))
    for name in REDUCED.split():
        if name != "logsumexp":
            table[f"{name} of all"] = lambda w, x, y, f=name: getattr(x, f)()
        table[f"{name} of 1"] = lambda w, x, y, f=name: getattr(x, f)(dim=1)
        table[f"{name} of 0"] = lambda w, x, y, f=name: getattr(x, f)(dim=0)
    return table


ELEMENTWISE: dict[str, Compute] = {
    "arithmetic": lambda w, x, y: x + y * 2 - 1 / (x.exp() + 1),
    "reflected": lambda w, x, y: (1 - x, 2 / (x.abs() + 1), 2**y, 3 // (y.abs() + 1), 5 % (x.abs() + 1)),
    "compare": lambda w, x, y: [x == y, x != 0, x < y, x < 1, ~(x > y), (x > 0) & (y > 0), (x > 0) ^ (y > 0)],
    "rows of a plain column": lambda w, x, y: x * w("column", x.shape[0], 1, 1, 1),
    "plain rows": lambda w, x, y: w("rows", *x.shape) * x,
    "broadcast": lambda w, x, y: x * w("image", 3, 4, 5) + w("channels", 3).view(3, 1, 1),
    "broadcast one row": lambda w, x, y: w("row", 1, 3, 4, 5) / (x.abs() + 1),
    "a scalar that learns": lambda w, x, y: x * w("temperature").exp(),
    "more dimensions": lambda w, x, y: x + w("five", 2, *x.shape),
    "vector of rows": lambda w, x, y: x.mean((1, 2, 3)) + y,
    "where": lambda w, x, y: torch.where(x > 0, x, y),
    "where number": lambda w, x, y: torch.where(x > 0, x, 0.0) + x.where(y > 0, y),
    "where alone": lambda w, x, y: torch.where(x > 1.5),
    "masked_fill": lambda w, x, y: x.masked_fill(y > 0, 0.0),
    "lerp": lambda w, x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda w, x, y: torch.addcmul(x, y, y, value=0.5),
    "clamp": lambda w, x, y: x.clamp(-1, 1) + x.clamp(min=y) + torch.clip(x, max=0.5),
    "pow": lambda w, x, y: torch.pow(x.abs() + 1, 2) + 2**x,
    "round decimals": lambda w, x, y: torch.round(x, decimals=1),
    "likes": lambda w, x, y: torch.zeros_like(x) + torch.ones_like(y) + torch.full_like(x, 2.0),
    "conversions": lambda w, x, y: [x.double(), x.half(), x.long(), x.bool(), x.to(torch.int32), x.type_as(y.double())],
    "to": lambda w, x, y: x.to("cpu").double().float().contiguous() * x.to(y),
    "type": lambda w, x, y: [x.type(), x.type(torch.float64), isinstance(x, Tensor), isinstance(x, torch.FloatTensor)],
    "detach": lambda w, x, y: x + x.detach() * y,
    "data": lambda w, x, y: x.data * 2,
    "clone": lambda w, x, y: x.clone(),
    "max of two": lambda w, x, y: torch.max(x, y),
    "none": lambda w, x, y: x is None or x == 0,
    "numpy number": lambda w, x, y: x * numpy.float32(2.0),
    "no_grad": lambda w, x, y: no_grad(x) * x,
    "autocast": lambda w, x, y: autocast(x.detach(), values("cast", 6, 5)),
    "hook": lambda w, x, y: hooked(x, y),
    "own function": lambda w, x, y: Square.apply(x),
    "checkpoint": lambda w, x, y: torch.utils.checkpoint.checkpoint(lambda a: (a * y).sin(), x, use_reentrant=False),
    "checkpoint, reentrant": lambda w, x, y: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True),
    "second derivatives": lambda w, x, y: second(x) if w.has_gradients else x,
    "attack": lambda w, x, y: attacked(x, y),
    "backward from rows": lambda w, x, y: pushed(x, y),
    "leaves": lambda w, x, y: made_leaves(x),
    "retained gradient": lambda w, x, y: retained(x),
    "gradients of a gathered gradient": lambda w, x, y: accumulated(x),
    "module": lambda w, x, y: nn.Sequential(nn.ReLU(), nn.Softmax(1), nn.Identity())(x),
    "metadata": lambda w, x, y: [len(x), x.size(0), *x.shape, x.numel(), x.dim(), x.ndim, x.nelement(), x.nbytes],
    "more metadata": lambda w, x, y: [x.dtype, x.device, x.is_leaf, x.requires_grad, x.is_contiguous(), x.stride()],
    "metadata after a gather": lambda w, x, y: metadata_after_a_gather(x) + metadata_after_a_gather(y * 1),
    "metadata of a view": lambda w, x, y: [x[:, 1:].is_contiguous(), x[:, 1:].stride(), x[:, 1:].storage_offset()],
}
DIMENSIONS: dict[str, Compute] = {
    "softmax": lambda w, x, y: [x.softmax(1), F.log_softmax(x, dim=-1), torch.softmax(x, 0)],
    "argmax flat": lambda w, x, y: [x.argmax(1, keepdim=True), x.argmin(-1), x.flatten(1).argmax(1)],
    "max dim": lambda w, x, y: [*torch.max(x, 1), x.max(dim=-1).values, x.min(2, True)[0], x.max(0)[0]],
    "named result": lambda w, x, y: x.max(1).indices,
    "topk": lambda w, x, y: [*x.topk(2, 1), torch.topk(x, k=2)[0], x.topk(2, 0)[0]],
    "kthvalue": lambda w, x, y: x.kthvalue(2, 1)[0],
    "sort": lambda w, x, y: [*x.sort(1), x.sort(descending=True)[0], torch.sort(x, dim=0)[0], x.argsort(1)],
    "sums": lambda w, x, y: [x.sum((1, 2, 3)), x.sum(dim=(0, 2), keepdim=True), x.sum(-1), x.sum([0])],
    "means": lambda w, x, y: [x.mean((0, 2, 3)), torch.mean(x, dim=1), x.mean(-4), x.mean((1, 2, 3)).sum()],
    "sum dtype": lambda w, x, y: [x.sum(dtype=torch.float64), (x > 0).sum(), (x > 0).sum(1), (x > 0).float().mean()],
    "mean of integers": lambda w, x, y: (x > 0).long().mean(),
    "std": lambda w, x, y: [x.std(1), x.std(dim=(2, 3), keepdim=True), x.var(unbiased=False), *torch.std_mean(x, 1)],
    "std true": lambda w, x, y: x.std(True),
    "normalized": lambda w, x, y: (x - x.mean((0, 2, 3), keepdim=True)) / (x.std((0, 2, 3), keepdim=True) + 1),
    "any, all": lambda w, x, y: [(x > 2).any(), torch.all(x > -9), (x > 0).any(1), torch.isfinite(x).all()],
    "extremes": lambda w, x, y: [x.detach().max(), x.detach().min(), torch.max(x.detach()).item()],
    "extreme not a number": lambda w, x, y: (x.detach() / (x.detach() > 0)).log().max(),
    "branch": lambda w, x, y: 1.0 if (x > 0).any() else 0.0,
    "cumsum": lambda w, x, y: [x.cumsum(1), x.cumprod(2), x.cummax(1)[0], torch.logcumsumexp(x, 1), x.cumsum(0)],
    "diff": lambda w, x, y: [x.diff(), torch.diff(x, 1, 1), torch.diff(x, dim=0)],
    "gather": lambda w, x, y: x.gather(1, y.argmax(1, keepdim=True)),
    "gather plain": lambda w, x, y: x.gather(1, labels(x).view(-1, 1, 1, 1).expand(-1, 2, 4, 5)),
    "gather fewer rows": lambda w, x, y: x.gather(1, torch.zeros(1, 1, 4, 5, dtype=torch.long)),
    "take_along_dim": lambda w, x, y: torch.take_along_dim(x, y.argmax(1, keepdim=True), 1),
    "scatter": lambda w, x, y: x.scatter(1, y.argmax(1, keepdim=True), 1.0),
    "scatter_": lambda w, x, y: torch.zeros_like(x).scatter_(1, y.argmax(1, keepdim=True), 1.0),
    "scatter_add": lambda w, x, y: torch.zeros_like(x).scatter_add(1, y.argmax(1, keepdim=True), x[:, :1]),
    "scatter into plain": lambda w, x, y: torch.zeros(*x.shape).scatter_(1, y.argmax(1, keepdim=True), 1.0),
    "index_select": lambda w, x, y: [x.index_select(1, torch.tensor([2, 0])), x.index_select(0, perm(x))],
    "chunk": lambda w, x, y: [*x.chunk(2, 1), x.split(2, dim=1)[1], torch.split(x, [1, 2], 1)[1], *x.chunk(2)],
    "unbind": lambda w, x, y: [x.unbind(1)[1], x.select(1, 0), x.narrow(1, 1, 2), x.unbind()[1], x.select(0, 1)],
    "flip": lambda w, x, y: [x.flip(3), torch.flip(x, [2, 3]), x.flip(0), x.flip(1, 0), x.fliplr()],
    "roll": lambda w, x, y: [x.roll(1, 2), torch.roll(x, 1, dims=(1,)), x.roll(1, 0), x.roll(1)],
    "normalize": lambda w, x, y: [F.normalize(x), F.normalize(x, dim=-1), F.normalize(x, dim=0)],
    "cosine": lambda w, x, y: [F.cosine_similarity(x.flatten(1), y.flatten(1)), F.cosine_similarity(x, y, 0)],
    "norms": lambda w, x, y: [x.norm(), x.flatten(1).norm(dim=1), x.norm(2, 1), torch.linalg.vector_norm(x, dim=1)],
    "aminmax": lambda w, x, y: [*torch.aminmax(x, dim=1), *x.mode(1), *x.median(1)],
    "bincount": lambda w, x, y: [torch.bincount(x.argmax(1).flatten(), minlength=2), x.argmax(1).flatten().bincount()],
    "confusion": lambda w, x, y: confusion(x),
    "accuracy": lambda w, x, y: [(x.argmax(1) == pixels(x)).sum(), (x.argmax(1) == pixels(x)).float().mean().item()],
    "quantile": lambda w, x, y: [x.quantile(0.5), x.quantile(0.5, 1), torch.histc(x.detach(), 4, -2, 2)],
    "unique": lambda w, x, y: [x.argmax(1).unique(), torch.nonzero(x > 0), torch.equal(x, x), torch.allclose(x, y)],
    "einsum": lambda w, x, y: torch.einsum("bchw,dchw->bd", x, y),
    "matmul": lambda w, x, y: [x @ w("matrix", 5, 6), torch.matmul(x, w("vector", 5)), x.flatten(1) @ y.flatten(1).T],
    "matmul plain left": lambda w, x, y: w("left", 6, x.shape[0]) @ x.flatten(1),
    "bmm": lambda w, x, y: [torch.bmm(x.flatten(2), y.flatten(2).transpose(1, 2)), x @ y.mT],
    "attention": lambda w, x, y: F.scaled_dot_product_attention(x, y, x),
    "cdist": lambda w, x, y: [torch.cdist(x.flatten(1), y.flatten(1)), F.pairwise_distance(x, y)],
    "addmm": lambda w, x, y: torch.addmm(w("sum", 6), x.mean((1, 2)), w("matrix", 5, 6)),
}
VIEWS: dict[str, Compute] = {
    "view": lambda w, x, y: x.contiguous().view(x.size(0), -1),
    "view of columns": lambda w, x, y: x.contiguous().view(-1, 5),
    "view that fails": lambda w, x, y: x[:, 1].view(-1),
    "view of a slice": lambda w, x, y: x[:, :2].reshape(-1, 5),
    "reshape of a slice": lambda w, x, y: x[:, 1].reshape(-1),
    "view_as": lambda w, x, y: x.flatten(1).view_as(y).reshape_as(y),
    "view of bits": lambda w, x, y: x.detach().clone().view(torch.int32),
    "flatten": lambda w, x, y: [x.flatten(1), torch.flatten(x), x.flatten(0, 1), x.flatten(-2)],
    "unflatten": lambda w, x, y: [x.unflatten(3, (5, 1)), x.unflatten(0, (-1, 1))],
    "channels last": lambda w, x, y: [
        x.permute(0, 2, 3, 1),
        x.permute(0, 2, 3, 1).reshape(-1, 3),
        x.permute(1, 0, 2, 3),
    ],
    "memory format": lambda w, x, y: x.to(memory_format=torch.channels_last).is_contiguous(
        memory_format=torch.channels_last
    ),
    "transpose": lambda w, x, y: [x.transpose(1, 2), x.swapaxes(-1, -2), x.movedim(1, -1), x.mT, x.transpose(0, 1)],
    "T": lambda w, x, y: x.flatten(1).T,
    "unsqueeze": lambda w, x, y: [x.unsqueeze(1), x.unsqueeze(-1), x.unsqueeze(0)],
    "squeeze": lambda w, x, y: [x[:, :1].squeeze(1), x[:, :1].squeeze(), x.squeeze(0), x[:, :, :1, :1].squeeze((2, 3))],
    "expand": lambda w, x, y: x.unsqueeze(1).expand(-1, 2, -1, -1, -1),
    "expand_as": lambda w, x, y: [x[:, :1].expand_as(y), x.expand(2, *x.shape), w("one", 1, 3, 4, 5).expand_as(x)],
    "repeat": lambda w, x, y: [x.repeat(1, 2, 1, 1), x.repeat(2, 1, 1, 1), x.repeat_interleave(2, 0)],
    "unfold": lambda w, x, y: [x.unfold(2, 2, 1), x.unfold(0, 2, 1)],
    "cat": lambda w, x, y: [torch.cat([x, y, x], 1), torch.cat([x, w("rows", *x.shape)], dim=2), torch.cat([x, y])],
    "stack": lambda w, x, y: [torch.stack([x, y], dim=1), torch.stack((x, x), -1), torch.stack([x, y])],
    "index": lambda w, x, y: [x[:, 1], x[:, 1:, ..., 2], x[:, None], x[..., 0], x[:], x[...], x[:, ::2], x[:, -1, 1:]],
    "index by lists": lambda w, x, y: [x[:, [2, 0, 1]], x[:, torch.tensor([0, 2])], x[:, [0, 1], :, [1, 2]]],
    "index by arrays": lambda w, x, y: [x[:, numpy.array([0, 2])], x[:, :, 1, [0, 1]], x[:, [True, False, True]]],
    "index rows": lambda w, x, y: [x[2], x[1:3], x[perm(x)], x[-1], x[0, 1], x[::2], x[None], x[True]],
    "index by mask": lambda w, x, y: [x[y > 0], x[y.mean((1, 2, 3)) > 0], x[x > 1].sum()],
    "index by rows": lambda w, x, y: w("table", 10, 3)[x.argmax(1)],
    "index too large": lambda w, x, y: x[:, 7],
    "iterate": lambda w, x, y: [
        torch.stack([row * 2 for row in x]),
        sum((a * b).sum() for a, b in zip(x, y, strict=True)),
    ],
    "unpack": lambda w, x, y: [*x][0],
    "list": lambda w, x, y: [x.tolist(), x.flatten(1)[:, 0].tolist(), [row.shape for row in x]],
    "contains": lambda w, x, y: [0.5 in x, bool(x.sum() > 0)],
    "ambiguous": lambda w, x, y: bool(x),
    "new": lambda w, x, y: [x.new_zeros(3), x + x.new_ones(x.shape), x.new_tensor([1, 2])],
}
LAYERS: dict[str, Compute] = {
    "linear": lambda w, x, y: F.linear(x, w("weight", 6, 5), w("bias", 6)),
    "conv": lambda w, x, y: F.conv2d(x, w("kernel", 6, 3, 3, 3), w("bias", 6), padding=1),
    "conv of one sample": lambda w, x, y: F.conv1d(x.flatten(2)[..., 0], w("kernel one", 2, x.shape[0], 1)),
    "conv by rows": lambda w, x, y: F.conv2d(w("rows", *x.shape), x[:, :, :3, :3], groups=1),
    "conv_transpose": lambda w, x, y: F.conv_transpose2d(x, w("kernel up", 3, 2, 2, 2)),
    "pools": lambda w, x, y: [
        F.max_pool2d(x, 2),
        F.avg_pool2d(x, 2),
        F.adaptive_avg_pool2d(x, 1),
        F.adaptive_max_pool2d(x, 2),
    ],
    "pool indices": lambda w, x, y: [*F.max_pool2d(x, 2, return_indices=True)],
    "interpolate": lambda w, x, y: F.interpolate(x, size=(8, 8), mode="bilinear"),
    "pad": lambda w, x, y: [F.pad(x, (1, 1, 2, 0)), F.pad(x, (1, 1), mode="reflect"), F.pad(x, (0,) * 6 + (1, 0))],
    "norms of layers": lambda w, x, y: [F.layer_norm(x, (5,), w("scale", 5)), F.group_norm(x, 3, w("channels", 3))],
    "batch_norm": lambda w, x, y: nn.BatchNorm2d(3)(x),
    "instance_norm": lambda w, x, y: F.instance_norm(x),
    "embedding": lambda w, x, y: F.embedding(x.argmax(1), w("table", 10, 4), padding_idx=0),
    "one_hot": lambda w, x, y: [F.one_hot(x.argmax(1), 3).float(), F.one_hot(x.argmax(1))],
    "unfold to columns": lambda w, x, y: F.fold(F.unfold(x, 2), (4, 5), 2),
    "shuffle": lambda w, x, y: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "dropout": lambda w, x, y: [F.dropout(x, 0.3), F.dropout(y, 0.5, training=False), F.dropout2d(x, 0.5)],
    "draws": lambda w, x, y: [
        x + torch.randn_like(x),
        torch.rand_like(x),
        torch.randint_like(x, 5),
        x + torch.randn(x.shape),
    ],
    "bernoulli": lambda w, x, y: [x.sigmoid().bernoulli(), torch.normal(x.detach(), 1.0)],
    "recurrent": lambda w, x, y: nn.LSTM(5, 2, batch_first=True)(x[:, 0])[0],
}
LOSSES: dict[str, Compute] = {
    "mse": lambda w, x, y: [F.mse_loss(x, y), nn.MSELoss(reduction="sum")(x, y), F.mse_loss(x, y, reduction="none")],
    "mse with plain": lambda w, x, y: [F.mse_loss(x, w("rows", *x.shape)), F.mse_loss(w("rows", *x.shape), x)],
    "mse broadcast": lambda w, x, y: F.mse_loss(x, y[:, :1].expand_as(x)),
    "l1": lambda w, x, y: [F.l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5), nn.HuberLoss()(x, y)],
    "positional": lambda w, x, y: F.l1_loss(x, y, None, None, "sum"),
    "weights of values": lambda w, x, y: [
        F.mse_loss(x, y, weight=y.detach().abs()),
        F.l1_loss(x, y, weight=values("weights", *x.shape).abs()),
        F.mse_loss(x, y, weight=y.detach().abs(), reduction="sum"),
        F.huber_loss(x, y, weight=y.detach().abs()),
    ],
    "bce logits": lambda w, x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid().detach()),
    "bce": lambda w, x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="sum"),
    "bce weight": lambda w, x, y: F.binary_cross_entropy(x.sigmoid(), (y > 0).float(), weight=y.exp().detach()),
    "bce pos_weight": lambda w, x, y: F.binary_cross_entropy_with_logits(
        x, (y > 0).float(), pos_weight=values("p", 3, 1, 1).abs()
    ),
    "kl": lambda w, x, y: [F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r) for r in ("batchmean", "sum", "none")],
    "kl log": lambda w, x, y: nn.KLDivLoss(reduction="batchmean", log_target=True)(x.log_softmax(1), y.log_softmax(1)),
    "ce": lambda w, x, y: F.cross_entropy(x.mean((2, 3)), labels(x)),
    "ce pixels": lambda w, x, y: [
        F.cross_entropy(x, pixels(x).clamp(min=0)),
        F.cross_entropy(x, pixels(x), ignore_index=-1),
    ],
    "ce weight": lambda w, x, y: nn.CrossEntropyLoss(ignore_index=-1, weight=values("c", 3).abs())(x, pixels(x)),
    "ce weight third": lambda w, x, y: F.cross_entropy(x, pixels(x).clamp(min=0), values("c", 3).abs()),
    "ce smooth": lambda w, x, y: F.cross_entropy(
        x, pixels(x), values("c", 3).abs(), ignore_index=-1, label_smoothing=0.1
    ),
    "ce smooth, no weight": lambda w, x, y: F.cross_entropy(x, pixels(x), ignore_index=-1, label_smoothing=0.1),
    "ce probabilities": lambda w, x, y: [
        F.cross_entropy(x, y.softmax(1)),
        F.cross_entropy(x, y.softmax(1), reduction="sum"),
    ],
    "ce none": lambda w, x, y: F.cross_entropy(x, pixels(x), ignore_index=-1, reduction="none"),
    "ce tokens": lambda w, x, y: F.cross_entropy(
        x.permute(0, 2, 3, 1).reshape(-1, 3), pixels(x).view(-1), ignore_index=-1
    ),
    "ce shift": lambda w, x, y: F.cross_entropy(
        x[:, :, :-1].permute(0, 2, 3, 1).flatten(0, 2), pixels(x)[:, 1:].flatten(), ignore_index=-1
    ),
    "ce all ignored": lambda w, x, y: F.cross_entropy(x, pixels(x) * 0 - 100),
    "ce out of bounds": lambda w, x, y: F.cross_entropy(x.mean((2, 3)), labels(x, 5)),
    "ce other rows": lambda w, x, y: F.cross_entropy(x.mean((2, 3)), torch.zeros(x.shape[0] + 1, dtype=torch.long)),
    "ce rows of both": lambda w, x, y: F.cross_entropy(x, y.argmax(1)),
    "nll": lambda w, x, y: F.nll_loss(F.log_softmax(x, 1), pixels(x), ignore_index=-1, weight=values("c", 3).abs()),
    "triplet": lambda w, x, y: F.triplet_margin_loss(x.flatten(1), y.flatten(1), (x + y).flatten(1)),
    "cosine loss": lambda w, x, y: F.cosine_embedding_loss(x.flatten(1), y.flatten(1), torch.ones(x.shape[0])),
    "multi margin": lambda w, x, y: F.multi_margin_loss(x.mean((2, 3)), labels(x)),
    "multilabel": lambda w, x, y: F.multilabel_soft_margin_loss(x.mean((2, 3)), (y.mean((2, 3)) > 0).float()),
    "soft margin": lambda w, x, y: F.soft_margin_loss(x, y.sign().detach()),
    "hinge": lambda w, x, y: F.hinge_embedding_loss(x, y.sign().detach()),
    "ranking": lambda w, x, y: F.margin_ranking_loss(x.mean((1, 2, 3)), y.mean((1, 2, 3)), labels(x) * 1.0 - 1),
    "poisson": lambda w, x, y: F.poisson_nll_loss(x, y.abs().detach()),
    "gaussian": lambda w, x, y: F.gaussian_nll_loss(x, y, y.exp()),
    "loss / len": lambda w, x, y: F.mse_loss(x, y, reduction="none").sum() / len(x),
    "dice": lambda w, x, y: 1 - (2 * (x.sigmoid() * (y > 0)).sum() + 1) / (x.sigmoid().sum() + (y > 0).sum() + 1),
    "dice of samples": lambda w, x, y: (
        1 - 2 * (x.sigmoid() * (y > 0)).sum((1, 2, 3)) / (x.sigmoid().sum((1, 2, 3)) + 1)
    ).mean(),
    "focal": lambda w, x, y: focal(x),
    "penalty": lambda w, x, y: x.square().mean() + x.abs().sum() * 1e-3 + w("weight", 6, 5).norm(),
    "autograd.grad": lambda w, x, y: torch.autograd.grad((x * y).sum(), [x, y]) if w.has_gradients else x,
}
COPIES: dict[str, Compute] = {
    "numpy": lambda w, x, y: torch.from_numpy(x.detach().numpy() * 2),
    "numpy refused": lambda w, x, y: torch.from_numpy(x.numpy() * 2),
    "asarray": lambda w, x, y: [torch.tensor(numpy.asarray(x.detach())), float(numpy.mean(x.detach().numpy()))],
    "ufunc": lambda w, x, y: torch.as_tensor(numpy.exp(x.detach())),
    "print": lambda w, x, y: [repr(x.detach()), str(y.detach()), f"{x.detach()}", f"{x.mean():.4f}"],
    "item": lambda w, x, y: [x.mean().item(), float(x.sum()), int(x.argmax())],
    "item of many": lambda w, x, y: x.item(),
    "deepcopy": lambda w, x, y: [copy.deepcopy(x.detach()), copy.copy(x.detach())],
    "deepcopy of gathered rows": lambda w, x, y: copied(x.detach() * 1),
    "print with a graph": lambda w, x, y: [repr(x * 2), repr(x[:, :1])],
    "deepcopy of a node": lambda w, x, y: copy.deepcopy(x * 1),
    "pickle": lambda w, x, y: [pickle.loads(pickle.dumps(x.detach())), saved({"x": x.detach()}["x"])],
    "tensor": lambda w, x, y: [torch.tensor(x.detach()), torch.as_tensor(x) * 1, torch.from_dlpack(x.detach())],
    "parameter": lambda w, x, y: nn.Parameter(x.detach()) * 2,
    "storage": lambda w, x, y: [x.untyped_storage().nbytes(), x.data_ptr() != 0, x.is_shared()],
    "vmap": lambda w, x, y: torch.vmap(lambda a: a * 2)(x.detach()),
    "func.grad": lambda w, x, y: torch.func.grad(lambda a: (a * a).sum())(x.detach()),
    "script": lambda w, x, y: torch.jit.script(nn.ReLU())(x.detach()),
    "out plain": lambda w, x, y: torch.add(x.detach(), 1, out=torch.empty(x.shape)),
    "hash": lambda w, x, y: [len({x: 1, y: 2}), x in [x]],
    "foreach": lambda w, x, y: torch._foreach_mul([x.detach(), y.detach()], 2.0),
}
CHANGES: dict[str, Compute] = {
    "+=": changed(lambda x, y: x.__iadd__(y)),
    "number": changed(lambda x, y: x.mul_(2).add_(1).clamp_(-1, 1)),
    "plain operand": changed(lambda x, y: x.sub_(values("c", 3).view(3, 1, 1)).div_(2)),
    "relu": changed(lambda x, y: F.relu(x, inplace=True)),
    "module in place": changed(lambda x, y: nn.Sequential(nn.ReLU(inplace=True), nn.Hardtanh(inplace=True))(x)),
    "zero, fill": changed(lambda x, y: x[:, :1].zero_().fill_(2)),
    "masked_fill_": changed(lambda x, y: x.masked_fill_(y > 0, 0.5)),
    "set row": changed(lambda x, y: x.__setitem__(2, 0.5)),
    "set row from rows": changed(lambda x, y: x.__setitem__(slice(0, 2), y[1:3])),
    "set column": changed(lambda x, y: x.__setitem__((slice(None), 1), 0.5)),
    "set column from rows": changed(lambda x, y: x.__setitem__((slice(None), 1), y[:, 0])),
    "set mask": changed(lambda x, y: x.__setitem__(x > 1, 1)),
    "set mask of rows": changed(lambda x, y: x.__setitem__(y.mean((1, 2, 3)) > 0, -1.0)),
    "set mask to values": changed(lambda x, y: x.__setitem__(x > 1, y[x > 1])),
    "set all": changed(lambda x, y: x.__setitem__(slice(None), y)),
    "cutmix": changed(lambda x, y: x.__setitem__((slice(None), slice(None), slice(1, 3)), x[perm(x), :, 1:3])),
    "row fill": changed(lambda x, y: x[2].fill_(7)),
    "loop": changed(lambda x, y: [row.mul_(2) for row in x][0]),
    "may be refused: view then row": changed(lambda x, y: (x.contiguous().view(x.size(0), -1), x[1].fill_(3))[0] * 1),
    "row then view": lambda w, x, y: (lambda z: (z[1].fill_(3), z.flatten(1) * 1)[1])(x * 1),
    "gathered, then changed": changed(lambda x, y: (x[1] * 1, x.mul_(3))[1]),
    "gathered, then view changed": lambda w, x, y: (lambda z: (z.detach()[1] * 1, z.detach().flatten(1).mul_(3), z)[2])(
        x * 1
    ),
    "no_grad change": lambda w, x, y: (lambda z: (torch.no_grad()(lambda: z.mul_(2))(), z)[1])(x * 1),
    "of a leaf": lambda w, x, y: x.add_(1),
    "row of a leaf": lambda w, x, y: x.__setitem__(1, 0.0),
    "uniform_": changed(lambda x, y: x.detach().uniform_()),
    "bernoulli_": changed(lambda x, y: x.detach().bernoulli_(0.5)),
    "index_fill_": changed(lambda x, y: x.index_fill_(1, torch.tensor([0]), 2.0)),
    "value that learns": lambda w, x, y: written((x * 1).detach(), 1, w("pixel", 5)) * x,
    "column that learns": lambda w, x, y: written((x * 1).detach(), (slice(None), 0, 0, 0), w("temperature")) * x,
    "rows that learn": lambda w, x, y: (x.detach() * 1).add_(y) * x,
    "foreach_": lambda w, x, y: (lambda z: (torch._foreach_add_([z], 1.0), z)[1])(x.detach() * 1),
    "out": lambda w, x, y: (lambda z: (torch.add(y.detach(), 1, out=z), z)[1])(x.detach() * 1),
}
REFUSED: dict[str, Compute] = {
    "resize_": lambda w, x, y: x.detach().resize_(3, 2),
    "set_": lambda w, x, y: x.detach().set_(y.detach()),
    "data =": lambda w, x, y: setattr(x, "data", y.detach()),
}
TABLE: dict[str, Compute] = {**_tables(), **ELEMENTWISE, **DIMENSIONS, **VIEWS, **LAYERS, **LOSSES, **COPIES, **CHANGES}
HALVES = (
    *("arithmetic", "sums", "means", "softmax", "mse", "l1", "ce pixels", "ce weight", "ce tokens", "conversions"),
    *("dice", "kl", "index", "set mask", "row fill", "cumsum", "dropout"),
)
INTEGERS = (
    *("compare", "where", "masked_fill", "clamp", "any, all", "max dim", "topk", "sort", "sums", "cumsum", "gather"),
    *("chunk", "flip", "view", "flatten", "index", "set mask", "set row", "number", "print", "bincount", "embedding"),
    *("one_hot", "row fill", "iterate", "mean of integers", "extremes", "unique", "numpy", "cutmix", "norms"),
)


def _random(rows: int) -> list[Tensor]:
    return [values("x", rows, 3, 4, 5), values("y", rows, 3, 4, 5)]


def _strided(rows: int) -> list[Tensor]:
    return [value.to(memory_format=torch.channels_last) for value in _random(rows)]


def _of_type(dtype: torch.dtype) -> Callable[[int], list[Tensor]]:
    return lambda rows: [(value * 3).to(dtype) for value in _random(rows)]


def _wide(rows: int) -> list[Tensor]:
    return [torch.cat([value, value], 3) for value in _random(rows)]


# Rows of the batch, rows of the tensors, and inputs.
FORMS: dict[str, tuple[int, int, Callable[[int], list[Tensor]]]] = {
    "two rows a sample": (5, 10, _random),
    "single rows": (3, 3, _random),
    "channels last": (5, 5, _strided),
    "view": (4, 4, _wide),
    "bfloat16": (6, 6, _of_type(torch.bfloat16)),
    "float16": (6, 6, _of_type(torch.float16)),
    "int64": (6, 6, _of_type(torch.int64)),
}
_OF_TYPES = {"bfloat16": HALVES, "float16": HALVES, "int64": INTEGERS}


def _cases() -> list[Case]:
    cases = [Case(name, compute, lambda: _random(7), 7) for name, compute in TABLE.items()]
    cases += [Case(name, compute, lambda: _random(7), 7, is_refused=True) for name, compute in REFUSED.items()]
    tables = _tables()
    for form, (batch, rows, inputs) in FORMS.items():
        for name, compute in TABLE.items():
            names = _OF_TYPES.get(form)
            if name in tables if names is None else name not in names:
                continue
            cases.append(
                Case(
                    f"{name} ({form})",
                    _of_view(compute) if form == "view" else compute,
                    lambda inputs=inputs, rows=rows: inputs(rows),  # type: ignore[misc]
                    batch,
                    form=form,
                    has_gradients=form != "int64",
                    tolerance=1e-4 if names is None else 2e-2,
                )
            )
    return cases


def _of_view(compute: Compute) -> Compute:
    return lambda w, x, y: compute(w, x[..., 3:8], y.flatten(2).unflatten(2, (4, 10))[..., :5])


CASES = _cases()
