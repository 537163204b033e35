"""Random draws inside of a divided call: rules, and the numbers of the own rows.

With `region.seed` None (CPUs) each rank draws for the whole batch, as torch would, and keeps its
own rows: the numbers and the generator afterwards are those of a plain call. The order of torch's
numbers depends on the shape and the memory format, so both are those of the whole batch. With a
seed the numbers come from it, by microbatch. Without a region every function runs as it is, and
only the shape of its numbers is noted; except for the whole call of a trial on an accelerator,
which draws as its parts do: fused kernels have other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.rng import derive_seed
from samestep.view.region import Region

Shape = tuple[int, ...]
Function = Callable[..., Any]
Arguments = Sequence[Any]
Options = Mapping[str, Any]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Draws(TorchFunctionMode):
    """Function mode around a call that counts its random draws, as rules see it.

    Attributes:
        region: the rows that are computed; None for a whole call, in which every function runs as
            it is.
        draws: shapes of the random draws, in order.
        is_compared: whether the call is that of a trial, which draws as its parts do.
    """

    def __init__(self, region: Region | None = None, *, is_compared: bool = False) -> None:
        super().__init__()
        self.region = region
        self.draws: list[Shape] = []
        self.is_compared = is_compared


# Receives the operations of a call, a function and its arguments; returns the result.
Rule = Callable[[Draws, Function, Arguments, Options], Any]


class UnknownDraw(Exception):
    """A random draw that the trial has not seen; the call is computed whole."""


# --- numbers of the own rows ----------------------------------------------------------------------


@contextmanager
def default_generator(generator: torch.Generator) -> Iterator[None]:
    """Let the default generator of a device begin where `generator` did; put it back afterwards."""
    default = torch.default_generator
    if is_accelerator(generator.device):
        default = accelerator_module().default_generators[generator.device.index]
    state = default.get_state()
    default.manual_seed(generator.initial_seed())
    try:
        yield
    finally:
        default.set_state(state)


def _draw(
    operations: Draws, shape: Shape, compute: Callable[[Shape], Any], device: torch.device
) -> torch.Tensor:
    """Return the numbers of the own rows, which have `shape`.

    Args:
        operations: operations of the call so far.
        shape: shape of the numbers.
        compute: draws numbers of a shape, also for the whole batch or a microbatch.
        device: device of the numbers.

    Raises:
        UnknownDraw: the trial has seen no such draw, or its shape does not follow the own rows.
    """
    region = operations.region
    if region is None:  # the whole call of a trial
        return torch.as_tensor(compute(shape))
    index = _number_of_draw(region, len(operations.draws))
    operations.draws.append(shape)
    if index >= len(region.draw_factors):
        raise UnknownDraw(f"draw {index + 1} of the call was not there in the trial")
    factor = region.draw_factors[index]
    if factor is not None and (not shape or shape[0] != factor * region.own):
        raise UnknownDraw(
            f"draw {index + 1} of the call has the shape {shape} for {region.own} rows"
        )
    if region.seed is None:
        if factor is None:
            return torch.as_tensor(compute(shape))
        numbers = torch.as_tensor(compute((factor * region.rows, *shape[1:])))
        # A copy does not keep the numbers of other rows alive.
        return numbers[factor * region.start : factor * region.stop].clone()
    if region.positions is not None:
        # The stream advances, so that the next draw finds another state.
        torch.rand(())
    generator = torch.Generator(device)
    if factor is None:
        # Numbers that all rows share, so the seed has no microbatch.
        generator.manual_seed(derive_seed("model", region.seed, index))
        with default_generator(generator):
            return torch.as_tensor(compute(shape))
    parts = []
    for microbatch, start, stop in region.microbatches:
        generator.manual_seed(derive_seed("model", region.seed, index, microbatch))
        with default_generator(generator):
            parts.append(torch.as_tensor(compute((factor * (stop - start), *shape[1:]))))
    return torch.cat(parts)


def _number_of_draw(region: Region, number: int) -> int:
    """Return the number of the next draw in its call; a recomputation finds that of the forward."""
    if region.positions is None:
        return number
    state = torch.get_rng_state().numpy().tobytes()
    if region.is_recomputed:
        if state not in region.positions:
            raise UnknownDraw("a recomputation draws from another state than the forward")
        number = region.positions[state]
    region.positions[state] = number
    return number


def like(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the result of `empty_like` for other rows of the batch whose own rows are `tensor`."""
    if shape == tuple(tensor.shape):
        return torch.empty_like(tensor)
    strides = tensor.stride()
    if tensor.shape[0] == 1:
        # A dimension with the stride of the one row is outside of the rows in the whole batch.
        strides = (strides[0], *(stride * (1 + (stride >= strides[0])) for stride in strides[1:]))
    whole = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    return torch.empty_like(whole, device=tensor.device)


# --- rules ----------------------------------------------------------------------------------------


def seen_inside(function: Function) -> Function:
    """Return a copy of a function of torch.nn.functional whose operations function modes see.

    Called with a mode active, the function itself would hand the call over as one operation.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **{name: lambda *tensors: False for name in _CHECKS}}
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _inside(operations: Draws, function: Function, arguments: Arguments, options: Options) -> Any:
    with operations:
        return seen_inside(function)(*arguments, **options)


def _argument(
    arguments: Arguments, options: Options, position: int, name: str, default: Any = None
) -> Any:
    if position < len(arguments):
        return arguments[position]
    return options.get(name, default)


def _is_plain(operations: Draws, shape: Shape, device: torch.device) -> bool:
    """Note the shape of a draw without a region; return whether torch's function computes it."""
    if operations.region is not None:
        return False
    operations.draws.append(shape)
    return not (operations.is_compared and is_accelerator(device))


def _drop(
    operations: Draws,
    input: torch.Tensor,
    p: float,
    features: Shape = (),
    inplace: bool = False,
) -> torch.Tensor:
    # As torch does on CPUs: aten/src/ATen/native/Dropout.cpp.
    def numbers_of(asked: Shape) -> torch.Tensor:
        if features:
            return torch.empty(asked, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
        return like(input, asked).bernoulli_(1 - p)

    noise = _draw(operations, features or tuple(input.shape), numbers_of, input.device)
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul
    if inplace:
        multiply = torch.Tensor.mul_
    return multiply(input, noise.div_(1 - p))


def _dropout(on: str, *, feature: bool = False, unbatched: int = 0, inplace: bool = False) -> Rule:
    """Return the rule of a dropout function with the switch `on`.

    With `feature` there is one number for each channel, which is in the second dimension, or in the
    first one if the input has the number of dimensions `unbatched`.
    """

    def rule(operations: Draws, function: Function, arguments: Arguments, options: Options) -> Any:
        input = _argument(arguments, options, 0, "input")
        p = _argument(arguments, options, 1, "p", 0.5)
        # With such arguments torch draws no numbers.
        if not _argument(arguments, options, 2, on, True) or not 0 < p < 1 or not input.numel():
            return function(*arguments, **options)
        features: Shape = ()
        if feature:
            kept = 2 - (input.dim() == unbatched)
            features = (*input.shape[:kept], *(1,) * (input.dim() - kept))
        if _is_plain(operations, features or tuple(input.shape), input.device):
            return function(*arguments, **options)
        written = inplace or _argument(arguments, options, 3, "inplace", False)
        return _drop(operations, input, p, features, written)

    return rule


def _require_plain(arguments: Iterable[Any], options: Options) -> None:
    """Require a draw with plain numbers from the script's stream into new memory without a graph.

    Raises:
        UnknownDraw: it is another one; few scripts have these inside of a forward.
    """
    if any(isinstance(value, torch.Tensor) for value in (*arguments, *options.values())):
        raise UnknownDraw("a draw with values of a tensor")
    for name in ("generator", "requires_grad"):
        if options.get(name):
            raise UnknownDraw(f"a draw with the option {name}")


def _factory(operations: Draws, function: Function, arguments: Arguments, options: Options) -> Any:
    """Rule of functions that receive the size of the result."""
    if operations.region is None:
        result = function(*arguments, **options)
        operations.draws.append(tuple(result.shape))
        return result
    _require_plain(arguments, options)
    first = list(arguments)
    others = dict(options)
    size = others.pop("size", None)
    if size is None and function in (torch.rand, torch.randn):
        size = first
        first = []
        if len(size) == 1 and isinstance(size[0], Sequence):
            size = size[0]
    elif size is None:
        # `randint` and `normal` receive the size last.
        *first, size = first

    def numbers_of(asked: Shape) -> Any:
        return function(*first, size=asked, **others)

    shape = tuple(int(length) for length in size)
    # Without the option this is the default device, which a script may have changed.
    device = torch.empty(0, device=others.get("device")).device
    return _draw(operations, shape, numbers_of, device)


def _fill(operations: Draws, function: Function, arguments: Arguments, options: Options) -> Any:
    """Rule of `rand_like` and of methods that fill a tensor, as `uniform_`."""
    tensor, *others = arguments
    if operations.region is None:
        result = function(*arguments, **options)
        operations.draws.append(tuple(result.shape))
        return result
    _require_plain(others, options)
    is_filled = function in _FILLS
    # The order of the numbers depends on strides, and those of the whole batch are not known.
    if is_filled and torch.empty_like(tensor).stride() != tensor.stride():
        raise UnknownDraw("a draw into a part of a tensor")

    def numbers_of(asked: Shape) -> Any:
        return function(like(tensor, asked), *others, **options)

    # The device with its index.
    device = torch.empty(0, device=options.get("device") or tensor.device).device
    numbers = _draw(operations, tuple(tensor.shape), numbers_of, device)
    if is_filled:
        return tensor.copy_(numbers)
    return numbers


def _attention(
    operations: Draws, function: Function, arguments: Arguments, options: Options
) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = {**dict(zip(names, arguments, strict=False)), **options}
    query, key, value, mask = (named.pop(name, None) for name in names[:4])
    p = named.pop("dropout_p", 0.0)
    grouped = named.get("enable_gqa", False)
    if not 0 < p < 1:
        return function(*arguments, **options)
    batch = query.shape[:-2]
    if not grouped:
        batch = torch.broadcast_shapes(batch, key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    if _is_plain(operations, shape, query.device):
        return function(*arguments, **options)
    region = operations.region
    has_own_stream = region is not None and region.seed is not None
    if has_own_stream and is_accelerator(query.device):
        first = 0

        def fused(asked: Shape) -> torch.Tensor:  # such kernels draw from the default generator
            nonlocal first
            # Called for one microbatch after another, in the order of the rows.
            rows = slice(first, first + asked[0])
            first += asked[0]
            values = [query, key, value, mask]
            for place, one in enumerate(values):
                if one is not None and one.dim() == len(shape) and one.shape[0] == shape[0]:
                    values[place] = one[rows]
            outputs: torch.Tensor = function(*values, p, **named)
            return outputs

        return _draw(operations, shape, fused, query.device)
    kind = query.dtype
    # As inside of the kernel, which would return weights in halves.
    if kind in (torch.float16, torch.bfloat16):
        query = query.float()
        key = key.float()
        value = value.float()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    elif mask is not None:
        mask = mask.to(query.dtype)
    # Private API of torch. Its second result are the weights of attention; without columns of
    # values nothing else is computed. Its own dropout would draw for the own rows only.
    weights = torch._scaled_dot_product_attention_math(
        query, key, value[..., :0], mask, 0.0, **named
    )[1]
    if grouped:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return (_drop(operations, weights, p) @ value).to(kind)


_DISTRIBUTIONS = (
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random"),
    "uniform",
)
_FILLS = tuple(getattr(torch.Tensor, f"{name}_") for name in _DISTRIBUTIONS)
_LIKES = (torch.rand_like, torch.randn_like, torch.randint_like)
DRAW_RULES: dict[Function, Rule] = {
    functional.dropout: _dropout("training"),
    functional.dropout1d: _dropout("training", feature=True, unbatched=2),
    functional.dropout2d: _dropout("training", feature=True),
    functional.dropout3d: _dropout("training", feature=True, unbatched=4),
    torch.dropout: _dropout("train"),
    torch.dropout_: _dropout("train", inplace=True),
    torch.feature_dropout: _dropout("train", feature=True),
    torch.feature_dropout_: _dropout("train", feature=True, inplace=True),
    **dict.fromkeys((torch.rand, torch.randn, torch.randint, torch.normal), _factory),
    **dict.fromkeys((*_LIKES, *_FILLS), _fill),
    functional.gumbel_softmax: _inside,
    functional.multi_head_attention_forward: _inside,
    functional.scaled_dot_product_attention: _attention,
}
