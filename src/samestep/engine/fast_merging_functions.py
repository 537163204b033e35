"""Functions of torch that join the samples of a batch, computed for each of several microbatches in one tensor.

These are batch norm (Ioffe & Szegedy, "Batch Normalization", 2015) with statistics of each microbatch, and random
functions with the random state of each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.strategies.random_functions import is_random

# Reads of values by the host, on which its control flow can depend.
_READS = {
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__contains__),
    *(torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose),
}
_CREATED = {torch.rand, torch.randn}  # random functions of a size
_INPLACE = 3  # position of the argument `inplace` of dropout functions
_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}
_SEQUENCES = (0, 1, 2)  # positions of query, key and value (T, N, E) of attention
_ATTENTION_DROPOUT = 10  # position of the probability of attention


class Running(NamedTuple):
    """Running statistics of one layer after each microbatch, as rows."""

    mean: torch.Tensor
    variance: torch.Tensor
    means: torch.Tensor  # (microbatches, channels)
    variances: torch.Tensor

    def rows(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the buffers of the layer with their values after a microbatch."""
        return [(self.mean, self.means[number]), (self.variance, self.variances[number])]


class MergedFunctions(TorchFunctionMode):
    """Surrounds a forward of several microbatches, which lie one after another in the first dimension.

    A tensor has one or more rows per sample. Random numbers equal those of separate forwards as far as a random
    function draws for tensors with the samples in the first dimension. Others draw from the process's generators.

    Args:
        model: the model, whose own state may be read by the host.
        sizes: samples of each microbatch.
        seeds: seed of the random state of each microbatch.

    Attributes:
        running: running statistics of layers, in the order of their calls; the layers' own stay unchanged.
        has_read: the host has read values that can depend on samples of several microbatches.
    """

    def __init__(self, model: torch.nn.Module, sizes: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__()
        self._model, self.has_read = model, False
        self._sizes, self._seeds = list(sizes), seeds
        self._samples = sum(sizes)
        self._running: dict[int, Running] = {}
        self._states: dict[torch.device, list[torch.Tensor]] = {}

    @property
    def running(self) -> list[Running]:
        return list(self._running.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._attention(func, args, kwargs)
        if func in _CREATED:
            return self._created(func, args, kwargs)
        if is_random(func, args, kwargs):
            return self._random(func, args, kwargs)
        if func in _READS:
            own = chain(self._model.buffers(), self._model.parameters())
            self.has_read |= not any(tensor is args[0] for tensor in own)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        sizes = self._sizes_of(input)
        if not training or sizes is None:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        running = self._running.get(id(running_mean))
        if running is None and running_mean is not None and running_var is not None:
            rows = [value.detach().repeat(len(sizes), 1) for value in (running_mean, running_var)]
            running = self._running[id(running_mean)] = Running(running_mean, running_var, *rows)
        values: torch.Tensor = _GroupedBatchNorm.apply(input, weight, bias, running, sizes, momentum, eps)  # type: ignore[no-untyped-call]
        return values

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if first is None or self._sizes_of(first) is None:
            return func(*args, **kwargs)
        if func in _DROPOUTS:  # the pieces are views, which must not change
            args, kwargs = args[:_INPLACE], {key: value for key, value in kwargs.items() if key != "inplace"}
        arguments = dict(enumerate(args)) | kwargs
        dims: dict[Any, int] = {key: 0 for key, value in arguments.items() if _is_alike(value, first)}
        results = self._call_each(func, arguments, dims, first.device)
        return args[0] if func.__name__.endswith("_") else torch.cat(results)

    def _created(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `torch.rand(N, ...)` and the like."""
        size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
        rows = size[0] if len(size) else 0
        if not rows or rows % self._samples or kwargs.get("out") is not None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        options = {key: value for key, value in kwargs.items() if key != "size"}
        sizes = [(rows // self._samples * samples, *size[1:]) for samples in self._sizes]
        device = torch.device(options.get("device") or torch.get_default_device())
        return torch.cat(self._for_each(device, lambda number: func(sizes[number], **options)))

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute multi-head attention, which has the samples in the second dimension."""
        query, arguments = args[0], dict(enumerate(args)) | kwargs
        is_random = args[_ATTENTION_DROPOUT] and kwargs.get("training", True)
        if not is_random or query.dim() != len(_SEQUENCES) or query.shape[1] != self._samples:
            return func(*args, **kwargs)
        dims: dict[Any, int] = dict.fromkeys(_SEQUENCES, 1)
        for key, rank in (("key_padding_mask", 2), ("attn_mask", 3)):  # a mask (T, S) is that of all samples
            if isinstance(mask := kwargs.get(key), torch.Tensor) and mask.dim() == rank:
                dims[key] = 0
        results = self._call_each(func, arguments, dims, query.device)
        outputs, weights = zip(*results, strict=True)
        return torch.cat(outputs, dim=1), None if weights[0] is None else torch.cat(weights)

    def _call_each(
        self, func: Any, arguments: dict[Any, Any], dims: Mapping[Any, int], device: torch.device
    ) -> list[Any]:
        """Call `func` for each microbatch; `dims` has the dimension of the samples of the arguments to divide."""
        pieces = {key: arguments[key].split(self._sizes_of(arguments[key], dim), dim) for key, dim in dims.items()}

        def call(number: int) -> Any:
            own = arguments | {key: values[number] for key, values in pieces.items()}
            named = {key: value for key, value in own.items() if isinstance(key, str)}
            return func(*(value for key, value in own.items() if not isinstance(key, str)), **named)

        return self._for_each(device, call)

    def _sizes_of(self, tensor: torch.Tensor, dim: int = 0) -> list[int] | None:
        """Return the rows of each microbatch in a tensor; None if the tensor has no rows of samples."""
        rows = tensor.shape[dim] if tensor.dim() > dim else 0
        if not rows or rows % self._samples:
            return None
        return [rows // self._samples * size for size in self._sizes]

    def _for_each(self, device: torch.device, draw: Callable[[int], Any]) -> list[Any]:
        """Call `draw` with the number of each microbatch in its random state."""
        generator = _default_generator(device)
        before = generator.get_state()
        states = self._states.get(device) or [generator.manual_seed(seed).get_state() for seed in self._seeds]
        results, self._states[device] = [], states
        for number, state in enumerate(states):
            generator.set_state(state)
            results.append(draw(number))
            states[number] = generator.get_state()
        generator.set_state(before)
        return results


def _is_alike(value: Any, first: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == first.dim() and value.shape[0] == first.shape[0]


def _default_generator(device: torch.device) -> torch.Generator:
    if not is_accelerator(device):
        return torch.default_generator
    index = accelerator_module().current_device() if device.index is None else device.index
    generator: torch.Generator = accelerator_module().default_generators[index]
    return generator


class _GroupedBatchNorm(torch.autograd.Function):
    """Batch norm of groups of rows, each by its own statistics, with the kernels of one group.

    Pieces and results are views of whole tensors: no copies, except in the backward, whose kernels have no other form.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Running | None,
        sizes: list[int],
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        outputs = torch.empty_like(inputs)
        shape, kind = (len(sizes), inputs.shape[1]), torch.promote_types(inputs.dtype, torch.float32)
        mean, scale = (torch.empty(shape, dtype=kind, device=inputs.device) for _ in range(2))
        for number, (data, result) in enumerate(zip(inputs.split(sizes), outputs.split(sizes), strict=True)):
            rows = (None, None) if running is None else (running.means[number], running.variances[number])
            torch.ops.aten.native_batch_norm.out(
                *(data, weight, bias, *rows, True, momentum, eps),
                **{"out": result, "save_mean": mean[number], "save_invstd": scale[number]},
            )
        ctx.save_for_backward(inputs, weight, mean, scale)
        ctx.sizes, ctx.eps = sizes, eps
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, mean, scale = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        by_input = torch.empty_like(inputs) if wanted[0] else None
        by_affine: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        pieces = zip(*(tensor.split(ctx.sizes) for tensor in (gradient, inputs)), strict=True)
        results = [None] * len(ctx.sizes) if by_input is None else list(by_input.split(ctx.sizes))
        for number, (slope, data) in enumerate(pieces):
            parts = torch.ops.aten.native_batch_norm_backward(
                slope, data, weight, None, None, mean[number], scale[number], True, ctx.eps, wanted
            )
            if (result := results[number]) is not None:
                result.copy_(parts[0])
            for rows, part in zip(by_affine, parts[1:], strict=True):
                rows.append(part)
        sums = [
            torch.stack(rows).sum(0) if is_wanted else None
            for rows, is_wanted in zip(by_affine, wanted[1:], strict=True)
        ]
        return by_input, *sums, None, None, None, None
