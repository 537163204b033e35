"""Rules of Rows for functions that compute each row by itself: elementwise ones, inner dimensions, views, indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.crossings import RowBounds
from samestep.view.rows_tensor import (
    Rows,
    Rule,
    cut_own,
    enter_own,
    gathered,
    is_apart,
    memory_of,
    own_slice,
)

Function = Callable[..., Any]
Guard = Callable[[Rows, Sequence[Any], Mapping[str, Any]], bool]
_HOMES: tuple[Any, ...] = (torch, Tensor, functional, torch.special, torch._C._nn)


def named(names: str, rule: Rule) -> dict[Any, Rule]:
    """Return a rule for all functions and methods of torch with these names."""
    return {
        getattr(home, name): rule
        for name in names.split()
        for home in _HOMES
        if hasattr(home, name)
    }


def leading(operands: Iterable[Any], *, is_strict: bool = False) -> Rows | None:
    """Return the first Rows if the rows of all other tensors are beside its rows, otherwise None.

    Args:
        operands: arguments of a function.
        is_strict: no tensor is broadcast to more rows.
    """
    first: Rows | None = None
    plain: list[Tensor] = []
    for operand in operands:
        if is_apart(operand):
            first = operand if first is None else first
            if operand._rows_own.dim() != first._rows_own.dim():
                return None
            if not operand._rows_bounds.is_equal(first._rows_bounds):
                return None
        elif isinstance(operand, Tensor):
            plain.append(operand)
        elif type(operand) in (list, tuple, dict) and any(
            isinstance(item, Tensor) for item in operand
        ):
            return None
    if first is None or not plain:
        return first
    sizes = (first._rows_bounds.rows,) if is_strict else (first._rows_bounds.rows, 1)
    for operand in plain:
        missing = first._rows_own.dim() - operand.dim()
        if missing < 0 or (missing == 0 and operand.shape[0] not in sizes):
            return None
    return first


def own_part(operand: Any, lead: Rows) -> Any:
    """Return the part that this rank needs of an operand of a function with Rows."""
    if is_apart(operand):
        return operand._rows_own
    if not isinstance(operand, Tensor):
        return operand
    bounds = lead._rows_bounds
    operand = gathered(operand)
    if operand.dim() == lead._rows_own.dim() and operand.shape[0] == bounds.rows:
        return cut_own(operand, bounds)
    if operand.requires_grad and torch.is_grad_enabled():
        return enter_own(operand, bounds)
    return operand


def as_rows(result: Any, lead: Rows, bounds: RowBounds | None = None) -> Any:
    """Return results of own rows as Rows; they may be the own rows of `lead`, or views of them."""
    if isinstance(result, Tensor):
        if result is lead._rows_own:
            return lead
        memory = lead._rows_memory
        if (
            memory is not None
            and result.untyped_storage()._cdata != lead._rows_own.untyped_storage()._cdata
        ):
            memory = None
        return Rows(result, bounds or lead._rows_bounds, memory)
    if isinstance(result, tuple | list):
        return type(result)([as_rows(item, lead) for item in result])
    return result


def of_own(
    function: Function, lead: Rows, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return a function of the own rows of tensors."""
    own = [own_part(argument, lead) for argument in arguments]
    if not options:
        return function(*own)
    return function(*own, **{name: own_part(value, lead) for name, value in options.items()})


def by_rows(guard: Guard | None = None, *, is_strict: bool = False, is_view: bool = False) -> Rule:
    """Return the rule of a function of each row.

    Args:
        guard: whether arguments, of which the first is Rows, let the function compute each row.
        is_strict: no tensor is broadcast to more rows.
        is_view: results are views of the first argument.
    """

    def rule(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        operands = (*arguments, *options.values()) if options else arguments
        lead = leading(operands, is_strict=is_strict)
        if lead is None or "out" in options or options.get("inplace"):
            return NotImplemented
        if guard is not None and not (
            arguments and arguments[0] is lead and guard(lead, arguments, options)
        ):
            return NotImplemented
        if is_view:
            memory_of(lead)
        return as_rows(of_own(function, lead, arguments, options), lead)

    return rule


def _first(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return True


elementwise = by_rows()
of_first = by_rows(_first)
views = by_rows(_first, is_view=True)


# --- dimensions and sizes -------------------------------------------------------------------------


def values_at(
    arguments: Sequence[Any], options: Mapping[str, Any], start: int, stop: int | None, *names: str
) -> list[Any]:
    """Return arguments by their places or names, those in lists one by one."""
    values = [*arguments[start:stop], *[options[name] for name in names if name in options]]
    return [
        one for value in values for one in (value if isinstance(value, tuple | list) else (value,))
    ]


def is_inner(dimensions: Sequence[Any], count: int) -> bool:
    """Whether there are dimensions, and none of them is that of the rows."""
    return bool(dimensions) and all(type(one) is int and one % count != 0 for one in dimensions)


def inner(
    start: int = 1,
    stop: int | None = 0,
    *names: str,
    default: int | None = None,
    is_view: bool = False,
) -> Rule:
    """Return the rule of functions along inner dimensions.

    Args:
        start: place of the first argument that names them.
        stop: place behind the last one; 0 for a single one.
        names: further names than `dim` and `axis`.
        default: the dimension without them.
        is_view: results are views of the first argument.
    """
    end = start + 1 if stop == 0 else stop

    def guard(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        return is_inner(
            values_at(arguments, options, start, end, "dim", "axis", *names) or [default],
            rows._rows_own.dim(),
        )

    return by_rows(guard, is_strict=True, is_view=is_view)


def _copies(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return not any(argument is True for argument in arguments)  # `inplace`, the second or third one


def _has_classes(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    # Without a number the length depends on all rows.
    return bool(sum(values_at(arguments, options, 1, 2, "num_classes")) > 0)


def _keeps_first(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return values_at(arguments, options, 1, None, "dims")[:1] in ([0], [-rows._rows_own.dim()])


def _behind_rows(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return is_inner(values_at(arguments, options, 1, 2, "dim"), rows._rows_own.dim() + 1)


def _repeats_inner(rows: Rows, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    sizes = values_at(arguments, options, 1, None)
    return sizes[:1] == [1] and len(sizes) == rows._rows_own.dim()


def extremes(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`max` and `min` of two tensors, or along a dimension."""
    is_of_two = len(arguments) == 2 and isinstance(arguments[1], Tensor)
    return (elementwise if is_of_two else inner())(function, arguments, options)


def where(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Choose between two values; with a condition alone, `where` returns indices."""
    if len(arguments) + len(options) > 2:
        return elementwise(function, arguments, options)
    return NotImplemented


def draw_like(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Draw for all rows and keep the own ones, so that the generator advances as in one process."""
    rows = arguments[0]
    if not is_apart(rows) or options.get("requires_grad"):
        return NotImplemented
    form = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta")
    choices = {"dtype": rows.dtype, "device": rows.device, **options}
    bounds = rows._rows_bounds
    return Rows(own_slice(function(form, *arguments[1:], **choices), bounds).clone(), bounds)


def reshaped(rows: Rows, function: Function, shape: Sequence[int]) -> Any:
    """Return Rows in another shape, of which each row of the batch keeps equally many rows."""
    bounds = rows._rows_bounds
    sizes = [int(size) for size in shape]
    batch = bounds.slices.bounds[-1][1]
    elements = math.prod(rows.shape)
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = elements // max(1, -math.prod(sizes))
    if not sizes or math.prod(sizes) != elements or sizes[0] <= 0 or sizes[0] % batch != 0:
        return NotImplemented
    is_copied = False
    if min(stop - start for start, stop in bounds.slices.by_rank) * bounds.factor == 1:
        # A single row can be viewed in more shapes than several.
        try:
            torch.empty_strided(rows.shape, rows.stride(), device="meta").view(sizes)
        except RuntimeError:
            if function is Tensor.view:
                raise
            is_copied = True
    memory_of(rows)
    result_bounds = bounds.times(sizes[0] // batch)
    result = function(rows._rows_own, [result_bounds.stop - result_bounds.start, *sizes[1:]])
    if is_copied:
        result = result.clone()
    return as_rows(result, rows, result_bounds)


def reshape(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`view`, `reshape`, and those with the shape of another tensor."""
    rows = arguments[0]
    if not is_apart(rows) or options or len(arguments) < 2 or isinstance(arguments[1], torch.dtype):
        return NotImplemented
    sizes = (
        arguments[1].shape
        if isinstance(arguments[1], Tensor)
        else values_at(arguments, {}, 1, None)
    )
    is_view = function in (Tensor.view, Tensor.view_as)
    form: Function = Tensor.view if is_view else Tensor.reshape
    return reshaped(rows, form, sizes)


def flatten(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Flatten a range of dimensions."""
    rows = arguments[0]
    if not is_apart(rows):
        return NotImplemented
    shape = list(rows.shape)
    first = (values_at(arguments, options, 1, 2, "start_dim") or [0])[0] % len(shape)
    last = (values_at(arguments, options, 2, 3, "end_dim") or [-1])[0] % len(shape)
    sizes = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    return reshaped(rows, Tensor.reshape, sizes)


def squeeze(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Remove inner dimensions of size 1: the rows of one rank may be a single one."""
    if len(arguments) > 1 or options:
        return inner(is_view=True)(function, arguments, options)
    dimensions = [index for index, size in enumerate(arguments[0].shape) if index and size == 1]
    return views(torch.squeeze, (arguments[0], tuple(dimensions)), {})


def contiguous(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Copy unless all rows are contiguous; a single one is in more layouts than several."""
    rows = arguments[0]
    (form,) = values_at(arguments, options, 1, 2, "memory_format") or [torch.contiguous_format]
    if not is_apart(rows):
        return NotImplemented
    if rows.is_contiguous(memory_format=form):
        return rows
    return as_rows(rows._rows_own.clone(memory_format=form), rows)


def concatenate(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Concatenate or stack tensors with equally many rows along an inner dimension."""
    if (
        not arguments
        or not isinstance(arguments[0], tuple | list)
        or options.get("out") is not None
    ):
        return NotImplemented
    tensors = arguments[0]
    lead = leading(tensors, is_strict=True)
    if lead is None:
        return NotImplemented
    count = lead._rows_own.dim()
    dimensions = values_at(arguments, options, 1, 2, "dim", "axis")
    if any(tensor.dim() != count for tensor in tensors) or not is_inner(
        dimensions, count + (function is torch.stack)
    ):
        return NotImplemented
    return as_rows(function([own_part(tensor, lead) for tensor in tensors], *dimensions), lead)


# --- indices --------------------------------------------------------------------------------------


def _keeps_rows(index: Any, count: int) -> bool:
    """Whether an index has all rows in order: `:` first, or `...` in front of the inner dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    known = (Tensor, list, tuple, range, Integral, slice, type(None), type(Ellipsis))
    if not index or any(
        isinstance(one, bool | Rows) or not isinstance(one, known) for one in index
    ):
        return False
    if any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index):
        return False
    # Separated lists, or a list and a number, would move their dimension to the front.
    lists = sum(isinstance(one, Tensor | list | tuple | range) for one in index)
    if lists > 1 or (lists and any(isinstance(one, Integral) for one in index)):
        return False
    if index[0] is Ellipsis:
        return not lists and sum(one is not None for one in index[1:]) < count
    return isinstance(index[0], slice) and index[0] == slice(None)


def get_item(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Index inner dimensions."""
    rows, index = arguments
    if not is_apart(rows) or not _keeps_rows(index, rows._rows_own.dim()):
        return NotImplemented
    memory_of(rows)
    return as_rows(rows._rows_own[index], rows)


def set_item(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Write a number, or a value without rows, where a mask or an index of inner dimensions selects."""
    rows, index, value = arguments
    if not is_apart(rows) or (isinstance(value, Tensor) and value.dim() > 0):
        return NotImplemented
    is_mask = (
        is_apart(index)
        and index.dtype == torch.bool
        and index._rows_own.dim() <= rows._rows_own.dim()
    )
    if is_mask and index._rows_bounds.is_equal(rows._rows_bounds):
        index = index._rows_own
    elif isinstance(index, Rows) or not _keeps_rows(index, rows._rows_own.dim()):
        return NotImplemented
    rows._rows_own[index] = own_part(value, rows)
    return None


_ELEMENTWISE = """
    add sub mul div true_divide divide multiply subtract floor_divide remainder fmod pow float_power neg negative abs
    absolute sign sgn signbit exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh sigmoid expit logit erf erfc erfinv lgamma digamma reciprocal floor ceil round trunc fix frac
    clamp clip clamp_min clamp_max maximum minimum fmax fmin masked_fill lerp addcmul addcdiv eq ne lt le gt ge
    not_equal less less_equal greater greater_equal isnan isinf isfinite isposinf isneginf isclose nan_to_num
    logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
    bitwise_right_shift heaviside hypot copysign nextafter ldexp sinc xlogy xlog1py entr atan2 arctan2 rad2deg deg2rad
    softplus softsign tanhshrink softshrink hardshrink logsigmoid gelu clone float double half bfloat16 int
    long bool byte short char type zeros_like ones_like full_like empty_like rsub
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__
    __rxor__ __lshift__ __rshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ angle"""
_ACTIVATIONS = (
    "relu relu6 silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid threshold"
)
_IN_PLACE = """
    add_ sub_ mul_ div_ true_divide_ floor_divide_ remainder_ fmod_ neg_ abs_ sign_ exp_ log_ log1p_ expm1_ sqrt_ rsqrt_
    square_ sin_ cos_ sigmoid_ tanh_ relu_ clamp_ clip_ clamp_min_ clamp_max_ floor_ ceil_ round_ trunc_ frac_ pow_
    reciprocal_ zero_ fill_ masked_fill_ copy_ lerp_ addcmul_ addcdiv_ nan_to_num_ logical_not_ logical_and_ logical_or_
    logical_xor_ bitwise_and_ bitwise_or_ bitwise_xor_ eq_ ne_ lt_ le_ gt_ ge_ erf_ leaky_relu_ hardtanh_ elu_ celu_
    selu_ threshold_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
    __ixor__"""
_IMAGES = """
    interpolate max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"""
_ALONG = """
    softmax log_softmax softmin argmax argmin amax amin cumsum cumprod logcumsumexp logsumexp prod aminmax median
    nanmedian nanmean nansum std var std_mean var_mean mode cummax cummin gather take_along_dim scatter scatter_add
    scatter_ scatter_add_ index_select"""

RULES_BY_ROWS: dict[Any, Rule] = {
    **named(f"{_ELEMENTWISE} {_IMAGES}", elementwise),
    **named(f"{_IN_PLACE} to cuda cpu pin_memory type_as", of_first),
    **named("where", where),
    **named(_ACTIVATIONS, by_rows(_copies)),
    **named("one_hot", by_rows(_has_classes)),
    **named("rand_like randn_like randint_like", draw_like),
    **named(_ALONG, inner()),
    **named("glu sort argsort", inner(default=-1)),
    **named("topk kthvalue diff", inner(2, default=-1)),
    **named("norm", inner(2)),
    **named("normalize cosine_similarity", inner(2, default=1)),
    **named("flip", inner(1, None, "dims")),
    **named("roll", inner(2, 0, "dims")),
    **named("detach", views),
    **named("unbind narrow select unflatten", inner(is_view=True)),
    **named("chunk split tensor_split split_with_sizes", inner(2, is_view=True)),
    Tensor.unfold: inner(1, 0, "dimension", is_view=True),
    **named(
        "transpose swapaxes swapdims movedim moveaxis",
        inner(1, 3, "dim0", "dim1", "axis0", "axis1", "source", "destination", is_view=True),
    ),
    **named("unsqueeze", by_rows(_behind_rows, is_view=True)),
    **named("permute", by_rows(_keeps_first, is_view=True)),
    **named("repeat", by_rows(_repeats_inner)),
    **named("squeeze", squeeze),
    **named("contiguous", contiguous),
    **named("view reshape view_as reshape_as", reshape),
    **named("flatten", flatten),
    **named("cat concat concatenate stack", concatenate),
    Tensor.__getitem__: get_item,
    Tensor.__setitem__: set_item,
}
