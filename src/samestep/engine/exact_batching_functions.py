"""Forward of several microbatches as one batch, whose backward computes the gradients of each microbatch.

Samples are independent in most functions of a model, so their rows can be computed together. Only functions of trained
parameters distinguish microbatches: their products and sums are computed for each microbatch, by the kernels and with
the shapes that autograd uses for the microbatch alone. That the remaining kernels give equal bits is checked by
`BatchedRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.strategies.random_functions import is_random

# Functions whose result for a row of samples depends on this row alone, unless the model moves samples to another
# dimension than the first. Values on the host and shapes that depend on values are not among them.
_ELEMENTWISE = (
    "abs add addcmul clamp clone contiguous cos detach div divide dropout elu eq erf exp expm1 float ge gelu gt "
    "hardsigmoid hardswish hardtanh le leaky_relu log log1p logical_and logical_not logical_or logsigmoid lt "
    "masked_fill maximum minimum mish mul multiply ne neg pow reciprocal relu relu6 rsqrt sigmoid silu sin softplus "
    "sqrt square sub subtract tanh to true_divide type_as where "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __invert__ "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __iadd__ __isub__ __imul__ __itruediv__"
)
_SHAPES = (
    "cat chunk expand expand_as flatten movedim narrow permute repeat_interleave reshape select split squeeze stack "
    "transpose unbind unflatten unsqueeze view view_as swapaxes"
)
_PRODUCTS = "baddbmm bmm einsum layer_norm matmul scaled_dot_product_attention __matmul__"
_SIZES = "dim is_contiguous is_floating_point numel size stride __len__"
_PROPERTIES = "device dtype is_cuda layout mT ndim requires_grad shape"
_REDUCTIONS = "amax amin log_softmax mean softmax sum"  # over the elements of dimensions


def _named(names: str) -> set[Any]:
    spaces = (torch, torch.Tensor, functional)
    return {getattr(space, name) for name in names.split() for space in spaces if hasattr(space, name)}


_SIZES_OF_TENSORS = _named(_SIZES) | {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()}
_BY_ROW = _named(f"{_ELEMENTWISE} {_SHAPES} {_PRODUCTS}") | _SIZES_OF_TENSORS
_WITH_DIMENSION = _named(_REDUCTIONS)


class NotBatchable(Exception):
    """A model has a function that cannot be computed for several microbatches together; the message names it."""


class BatchedForward(TorchFunctionMode):
    """Surrounds a forward of the samples of several microbatches, one after another in the first dimension.

    The backward of its result leaves the gradients of the parameters in `gradients`, not in `.grad`.

    Args:
        sizes: samples of each microbatch.
        parameters: the trained parameters.
        inputs: the tensors with rows of samples.

    Attributes:
        gradients: gradients of each microbatch, in the order of `parameters`; None if a parameter was not used.
        bytes: size of the results of all functions.
    """

    def __init__(
        self, sizes: Sequence[int], parameters: Iterable[torch.nn.Parameter], inputs: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        self.sizes, self.samples, self.bytes = list(sizes), sum(sizes), 0
        self._positions = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.gradients: list[list[torch.Tensor | None]] = [[None] * len(self._positions) for _ in sizes]
        self.anchor = torch.zeros((), requires_grad=True)  # so that results require a gradient without the parameters
        for tensor in inputs:
            _mark(tensor)

    def add(self, microbatch: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the gradient of a parameter in a microbatch, unless the parameter is frozen."""
        if (position := self._positions.get(id(parameter))) is not None:
            gradients, before = self.gradients[microbatch], self.gradients[microbatch][position]
            gradients[position] = gradient if before is None else before + gradient

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each microbatch.

        Raises:
            NotBatchable: there are no rows of samples.
        """
        rows = tensor.shape[0] if tensor.dim() else 0
        if not rows or rows % self.samples:
            raise NotBatchable("a tensor without the samples in the first dimension")
        return tuple(tensor.split([rows // self.samples * size for size in self.sizes]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        has_parameter = any(id(tensor) in self._positions for tensor in tensors)
        has_rows = any(has_samples(tensor) for tensor in tensors)
        if is_random(func, args, kwargs):
            raise NotBatchable(f"{_name(func)} draws random numbers")
        if (has_parameter or has_rows) and func in _FUNCTIONS:
            result = _FUNCTIONS[func](self, *args, **kwargs)
            has_rows = True
        elif has_parameter and func not in _SIZES_OF_TENSORS:
            raise NotBatchable(f"{_name(func)} with a trained parameter")
        elif has_rows and not _is_by_row(func, args, kwargs, len(tensors)):
            raise NotBatchable(f"{_name(func)} may combine samples, or depend on their values")
        else:
            result = func(*args, **kwargs)
        if has_rows:
            for tensor in _tensors((result,)):
                self.bytes += tensor.nbytes
                _mark(tensor)
        return result


def has_samples(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was computed from the inputs, in a `BatchedForward`."""
    return getattr(tensor, "_samestep_has_samples", False)


def _mark(tensor: torch.Tensor) -> None:
    tensor._samestep_has_samples = True  # type: ignore[attr-defined]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _is_by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: int) -> bool:
    if func is torch.Tensor.__getitem__:  # an index that is a tensor can select by value
        return tensors == 1
    if func in _WITH_DIMENSION:
        return _keeps_rows(*args, **kwargs)
    return func in _BY_ROW


def _keeps_rows(input: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    """Return whether a reduction over dimensions leaves the first one; without dimensions, it reduces all."""
    dims = dim if isinstance(dim, list | tuple) else () if dim is None else (dim,)
    return bool(dims) and all(one % max(input.dim(), 1) for one in dims)


def linear(
    batch: BatchedForward, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`; arguments as there."""
    result: torch.Tensor = _Linear.apply(input, batch.anchor, batch, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        anchor: torch.Tensor,
        batch: BatchedForward,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs = inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
        for rows, result in zip(batch.split(inputs), batch.split(outputs), strict=True):
            flat, out = rows.reshape(-1, rows.shape[-1]), result.view(-1, result.shape[-1])
            if bias is None:
                torch.mm(flat, weight.t(), out=out)
            else:
                torch.addmm(bias, flat, weight.t(), out=out)
        ctx.save_for_backward(inputs)
        ctx.batch, ctx.weight, ctx.bias = batch, weight, bias
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,), batch, weight = ctx.saved_tensors, ctx.batch, ctx.weight
        by_input = torch.empty_like(inputs, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        results = batch.split(by_input) if by_input is not None else [None] * len(batch.sizes)
        # Gradients of a product are contiguous in most models. Another layout selects another kernel.
        rows = zip(batch.split(gradient.contiguous()), batch.split(inputs), results, strict=True)
        for number, (slope, data, result) in enumerate(rows):
            flat = slope.reshape(-1, slope.shape[-1])
            batch.add(number, weight, flat.t().mm(data.reshape(-1, data.shape[-1])))
            if ctx.bias is not None:
                batch.add(number, ctx.bias, flat.sum(0))
            if result is not None:
                torch.mm(flat, weight, out=result.view(-1, result.shape[-1]))
        return by_input, None, None, None, None


def layer_norm(
    batch: BatchedForward,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute `torch.nn.functional.layer_norm`; arguments as there."""
    arguments = batch, list(normalized_shape), weight, bias, eps
    result: torch.Tensor = _LayerNorm.apply(input, batch.anchor, *arguments)  # type: ignore[no-untyped-call]
    return result


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        anchor: torch.Tensor,
        batch: BatchedForward,
        shape: list[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        outputs, mean, scale = torch.native_layer_norm(inputs, shape, weight, bias, eps)
        ctx.save_for_backward(inputs, mean, scale)
        ctx.batch, ctx.shape, ctx.weight, ctx.bias = batch, shape, weight, bias
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, parameters = ctx.batch, (ctx.weight, ctx.bias)
        wanted = [ctx.needs_input_grad[0], *(p is not None and p.requires_grad for p in parameters)]
        by_input = []
        for number, (slope, data, mean, scale) in enumerate(
            zip(*map(batch.split, (gradient, *ctx.saved_tensors)), strict=True)
        ):
            result, *sums = torch.ops.aten.native_layer_norm_backward(
                slope, data, ctx.shape, mean, scale, *parameters, wanted
            )
            by_input.append(result)
            for parameter, value, is_wanted in zip(parameters, sums, wanted[1:], strict=True):
                if is_wanted:
                    batch.add(number, parameter, value)
        return torch.cat(by_input) if wanted[0] else None, None, None, None, None, None, None


def embedding(
    batch: BatchedForward,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Compute `torch.nn.functional.embedding`; arguments as there.

    Rows that all samples share, such as those of positions, are returned for each sample: `(samples, *shape)`.

    Raises:
        NotBatchable: the table changes in the forward, or its gradient is sparse or depends on the batch.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotBatchable("embedding with max_norm, scale_grad_by_freq or sparse")
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    result: torch.Tensor = _Embedding.apply(batch.anchor, batch, input, weight, padding)  # type: ignore[no-untyped-call]
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, batch: BatchedForward, indices: torch.Tensor, weight: torch.Tensor, padding: int
    ) -> torch.Tensor:
        ctx.batch, ctx.indices, ctx.weight, ctx.padding = batch, indices, weight, padding
        values = functional.embedding(indices, weight)
        return values if has_samples(indices) else values.expand(batch.samples, *values.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight = ctx.batch, ctx.weight
        is_own = has_samples(ctx.indices)
        indices = batch.split(ctx.indices) if is_own else [ctx.indices] * len(batch.sizes)
        for number, (slope, own) in enumerate(zip(batch.split(gradient), indices, strict=True)):
            value = slope if is_own else slope.sum(0)
            table = torch.ops.aten.embedding_dense_backward(value, own, weight.shape[0], ctx.padding, False)
            batch.add(number, weight, table)
        return None, None, None, None, None


_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.linear: linear,
    functional.layer_norm: layer_norm,
    functional.embedding: embedding,
}
