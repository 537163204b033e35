"""Rules of Rows for functions of each row: elementwise ones, inner dimensions, views, indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.crossings import RowBounds, cut, enter
from samestep.view.rows_tensor import Rows, Rule, gathered, is_apart, memory_of

Function = Callable[..., Any]
Arguments = Sequence[Any]
Options = Mapping[str, Any]
Guard = Callable[[Rows, Arguments, Options], bool]
_HOMES: tuple[Any, ...] = (torch, Tensor, functional, torch.special, torch._C._nn)
# Names of arguments that are dimensions.
_DIMENSIONS = (
    *("dim", "dims", "dim0", "dim1", "dimension", "axis", "axis0", "axis1"),
    *("source", "destination"),
)


def named(names: str, rule: Rule) -> dict[Any, Rule]:
    """Return a rule for all functions and methods of torch with these names."""
    return {
        getattr(home, name): rule
        for name in names.split()
        for home in _HOMES
        if hasattr(home, name)
    }


def own_part(operand: Any, lead: Rows) -> Any:
    """Return the part that this rank needs of an operand of a function with Rows."""
    if is_apart(operand):
        return operand._rows_own
    if not isinstance(operand, Tensor):
        return operand
    bounds = lead._rows_bounds
    operand = gathered(operand)
    if operand.dim() == lead._rows_own.dim() and operand.shape[0] == bounds.rows:
        return cut(operand, bounds)[0]
    # Own rows give a part of its gradient only.
    if operand.requires_grad and torch.is_grad_enabled():
        return enter(operand, bounds.ranks, 1)[0]
    return operand


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
            if first is None:
                first = operand
            if operand._rows_own.dim() != first._rows_own.dim():
                return None
            if not operand._rows_bounds.is_equal(first._rows_bounds):
                return None
        elif isinstance(operand, Tensor):
            plain.append(operand)
        elif type(operand) in (list, tuple, dict) and any(
            isinstance(item, Tensor) for item in operand
        ):
            # `own_part` cuts no tensors inside of containers.
            return None
    if first is None:
        return None
    sizes = [first._rows_bounds.rows]
    if not is_strict:
        sizes.append(1)
    for operand in plain:
        missing = first._rows_own.dim() - operand.dim()
        if missing < 0 or (missing == 0 and operand.shape[0] not in sizes):
            return None
    return first


def as_rows(result: Any, lead: Rows, bounds: RowBounds | None = None) -> Any:
    """Return results of own rows as Rows; they may be the own rows of `lead`, or views of them."""
    if isinstance(result, Tensor):
        if result is lead._rows_own:
            return lead
        memory = lead._rows_memory
        if memory is not None:
            storage = lead._rows_own.untyped_storage()
            # A copy stays divided when the rows of `lead` are gathered.
            if result.untyped_storage()._cdata != storage._cdata:
                memory = None
        return Rows(result, bounds or lead._rows_bounds, memory)
    if isinstance(result, tuple | list):
        return type(result)([as_rows(item, lead) for item in result])
    return result


def of_own(function: Function, lead: Rows, arguments: Arguments, options: Options) -> Any:
    """Return a function of the own rows of tensors."""
    own = [own_part(argument, lead) for argument in arguments]
    return function(*own, **{name: own_part(value, lead) for name, value in options.items()})


def _by_rows(guard: Guard | None = None, *, is_strict: bool = False, is_view: bool = False) -> Rule:
    """Return the rule of a function of each row.

    Args:
        guard: whether arguments, of which the first is Rows, let the function compute each row.
        is_strict: no tensor is broadcast to more rows.
        is_view: results are views of the first argument.
    """

    def rule(function: Function, arguments: Arguments, options: Options) -> Any:
        lead = leading((*arguments, *options.values()), is_strict=is_strict)
        if lead is None or "out" in options:
            return NotImplemented
        if options.get("inplace") or options.get("requires_grad"):  # the second one makes a leaf
            return NotImplemented
        if guard is not None and not (
            arguments and arguments[0] is lead and guard(lead, arguments, options)
        ):
            return NotImplemented
        if is_view:
            memory_of(lead)  # which the view shares, so that a gather of one makes both whole
        return as_rows(of_own(function, lead, arguments, options), lead)

    return rule


elementwise = _by_rows()
_of_first = _by_rows(lambda *call: True)
views = _by_rows(lambda *call: True, is_view=True)


# --- dimensions and sizes -------------------------------------------------------------------------


def values_at(
    arguments: Arguments, options: Options, start: int, stop: int | None, *names: str
) -> list[Any]:
    """Return arguments by their places or names, those in lists one by one."""
    values: list[Any] = []
    for value in [*arguments[start:stop], *[options[name] for name in names if name in options]]:
        if isinstance(value, tuple | list):
            values += value
        else:
            values.append(value)
    return values


def is_inner(dimensions: Sequence[Any], count: int) -> bool:
    """Whether there are dimensions, and none of them is that of the rows."""
    return bool(dimensions) and all(type(one) is int and one % count != 0 for one in dimensions)


def _inner(
    start: int = 1, stop: int | None = 2, *, default: int | None = None, is_view: bool = False
) -> Rule:
    """Return the rule of functions along inner dimensions.

    Args:
        start: place of the first argument that names them.
        stop: place behind the last one; None: the end.
        default: the dimension without them.
        is_view: results are views of the first argument.
    """

    def guard(rows: Rows, arguments: Arguments, options: Options) -> bool:
        dimensions = values_at(arguments, options, start, stop, *_DIMENSIONS)
        return is_inner(dimensions or [default], rows._rows_own.dim())

    return _by_rows(guard, is_strict=True, is_view=is_view)


along_inner = _inner()


def _copies(rows: Rows, arguments: Arguments, options: Options) -> bool:
    return not any(argument is True for argument in arguments)  # `inplace`, the second or third one


def _has_classes(rows: Rows, arguments: Arguments, options: Options) -> bool:
    # Without a number the length depends on all rows.
    return bool(sum(values_at(arguments, options, 1, 2, "num_classes")) > 0)


def _keeps_first(rows: Rows, arguments: Arguments, options: Options) -> bool:
    return values_at(arguments, options, 1, None, "dims")[:1] in ([0], [-rows._rows_own.dim()])


def _behind_rows(rows: Rows, arguments: Arguments, options: Options) -> bool:
    return is_inner(values_at(arguments, options, 1, 2, "dim"), rows._rows_own.dim() + 1)


def _where(function: Function, arguments: Arguments, options: Options) -> Any:
    if len(arguments) + len(options) > 2:
        return elementwise(function, arguments, options)
    return NotImplemented  # with a condition alone, it returns indices


def _draw_like(function: Function, arguments: Arguments, options: Options) -> Any:
    """Draw for all rows and keep the own ones, so that the generator advances as in one process."""
    rows = arguments[0]
    if not is_apart(rows) or options.get("requires_grad"):
        return NotImplemented
    # With the strides of all rows, on which the order of the numbers depends.
    form = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta")
    choices = {"dtype": rows.dtype, "device": rows.device, **options}
    bounds = rows._rows_bounds
    whole = function(form, *arguments[1:], **choices)
    return Rows(whole[bounds.start : bounds.stop].clone(), bounds)


def _reshaped(rows: Rows, function: Function, shape: Sequence[int]) -> Any:
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
    # The result may be a view, which shares the memory.
    memory_of(rows)
    result_bounds = bounds.times(sizes[0] // batch)
    result = function(rows._rows_own, [result_bounds.stop - result_bounds.start, *sizes[1:]])
    if is_copied:
        result = result.clone()
    return as_rows(result, rows, result_bounds)


def _reshape(function: Function, arguments: Arguments, options: Options) -> Any:
    """`view`, `reshape`, and those with the shape of another tensor."""
    rows = arguments[0]
    if not is_apart(rows) or options or len(arguments) < 2 or isinstance(arguments[1], torch.dtype):
        return NotImplemented
    sizes: Sequence[int] = values_at(arguments, {}, 1, None)
    if isinstance(arguments[1], Tensor):
        sizes = arguments[1].shape
    form: Function = Tensor.reshape
    if function in (Tensor.view, Tensor.view_as):
        form = Tensor.view
    return _reshaped(rows, form, sizes)


def _flatten(function: Function, arguments: Arguments, options: Options) -> Any:
    rows = arguments[0]
    if not is_apart(rows):
        return NotImplemented
    shape = list(rows.shape)
    first = (values_at(arguments, options, 1, 2, "start_dim") or [0])[0] % len(shape)
    last = (values_at(arguments, options, 2, 3, "end_dim") or [-1])[0] % len(shape)
    sizes = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    return _reshaped(rows, Tensor.reshape, sizes)


def _contiguous(function: Function, arguments: Arguments, options: Options) -> Any:
    """Copy unless all rows are contiguous; a single one is in more layouts than several."""
    rows = arguments[0]
    (form,) = values_at(arguments, options, 1, 2, "memory_format") or [torch.contiguous_format]
    if not is_apart(rows):
        return NotImplemented
    if rows.is_contiguous(memory_format=form):
        return rows
    return as_rows(rows._rows_own.clone(memory_format=form), rows)


def _concatenate(function: Function, arguments: Arguments, options: Options) -> Any:
    """Concatenate or stack tensors with equally many rows along an inner dimension."""
    if not arguments or not isinstance(arguments[0], tuple | list):
        return NotImplemented
    tensors = arguments[0]
    lead = leading(tensors, is_strict=True)
    if lead is None or options.get("out") is not None:
        return NotImplemented
    count = lead._rows_own.dim()
    dimensions = values_at(arguments, options, 1, 2, "dim", "axis")
    if any(tensor.dim() != count for tensor in tensors):
        return NotImplemented
    # The result of `stack` has one dimension more.
    if not is_inner(dimensions, count + (function is torch.stack)):
        return NotImplemented
    return as_rows(function([own_part(tensor, lead) for tensor in tensors], *dimensions), lead)


# --- indices --------------------------------------------------------------------------------------


def _keeps_rows(index: Any, count: int) -> bool:
    """Whether an index has all rows in order: `:`, or `...` in front of the inner dimensions."""
    if not isinstance(index, tuple):
        index = (index,)
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


def _get_item(function: Function, arguments: Arguments, options: Options) -> Any:
    rows, index = arguments
    if not is_apart(rows) or not _keeps_rows(index, rows._rows_own.dim()):
        return NotImplemented
    memory_of(rows)
    return as_rows(rows._rows_own[index], rows)


def _set_item(function: Function, arguments: Arguments, options: Options) -> Any:
    """Write a value without rows where a mask or an index of inner dimensions selects."""
    rows, index, value = arguments
    if not is_apart(rows) or (isinstance(value, Tensor) and value.dim() > 0):
        return NotImplemented
    is_mask = is_apart(index) and index.dtype == torch.bool
    if (
        is_mask
        and index._rows_own.dim() <= rows._rows_own.dim()
        and index._rows_bounds.is_equal(rows._rows_bounds)
    ):
        index = index._rows_own
    elif isinstance(index, Rows) or not _keeps_rows(index, rows._rows_own.dim()):
        return NotImplemented
    rows._rows_own[index] = own_part(value, rows)
    return None


_ELEMENTWISE = """
    add sub mul div true_divide divide multiply subtract floor_divide remainder fmod pow
    float_power neg negative abs absolute sign sgn signbit exp exp2 expm1 log log1p log2 log10
    sqrt rsqrt square sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid expit
    logit erf erfc erfinv lgamma digamma reciprocal floor ceil round trunc fix frac clamp clip
    clamp_min clamp_max maximum minimum fmax fmin masked_fill lerp addcmul addcdiv eq ne lt le
    gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite isposinf isneginf
    isclose nan_to_num logical_not logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift heaviside hypot copysign
    nextafter ldexp sinc xlogy xlog1py entr atan2 arctan2 rad2deg deg2rad softplus softsign
    tanhshrink softshrink hardshrink logsigmoid gelu clone float double half bfloat16 int long
    bool byte short char type zeros_like ones_like full_like empty_like rsub __add__ __radd__
    __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __abs__ __invert__ __and__ __or__
    __xor__ __rand__ __ror__ __rxor__ __lshift__ __rshift__ __eq__ __ne__ __lt__ __le__ __gt__
    __ge__ angle"""
_ACTIVATIONS = (
    "relu relu6 silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid threshold"
)
_IN_PLACE = """
    add_ sub_ mul_ div_ true_divide_ floor_divide_ remainder_ fmod_ neg_ abs_ sign_ exp_ log_
    log1p_ expm1_ sqrt_ rsqrt_ square_ sin_ cos_ sigmoid_ tanh_ relu_ clamp_ clip_ clamp_min_
    clamp_max_ floor_ ceil_ round_ trunc_ frac_ pow_ reciprocal_ zero_ fill_ masked_fill_ copy_
    lerp_ addcmul_ addcdiv_ nan_to_num_ logical_not_ logical_and_ logical_or_ logical_xor_
    bitwise_and_ bitwise_or_ bitwise_xor_ eq_ ne_ lt_ le_ gt_ ge_ erf_ leaky_relu_ hardtanh_
    elu_ celu_ selu_ threshold_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__
    __imod__ __ipow__ __iand__ __ior__ __ixor__"""
_IMAGES = """
    interpolate max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d"""
_ALONG = """
    softmax log_softmax softmin any all count_nonzero max min argmax argmin amax amin cumsum cumprod
    logcumsumexp logsumexp
    prod aminmax median nanmedian nanmean nansum std var std_mean var_mean mode cummax cummin
    gather take_along_dim scatter scatter_add scatter_ scatter_add_ index_select"""

RULES_BY_ROWS: dict[Any, Rule] = {
    **named(f"{_ELEMENTWISE} {_IMAGES}", elementwise),
    **named(f"{_IN_PLACE} to cuda cpu pin_memory type_as", _of_first),
    **named("where", _where),
    **named(_ACTIVATIONS, _by_rows(_copies)),
    **named("one_hot", _by_rows(_has_classes)),
    **named("rand_like randn_like randint_like", _draw_like),
    **named(_ALONG, along_inner),
    **named("glu sort argsort", _inner(default=-1)),
    **named("topk kthvalue diff", _inner(2, 3, default=-1)),
    **named("norm", _inner(2, 3)),
    **named("normalize cosine_similarity", _inner(2, 3, default=1)),
    **named("flip", _inner(1, None)),
    **named("roll", _inner(2, 3)),
    **named("detach", views),
    **named("unbind narrow select squeeze unflatten", _inner(is_view=True)),
    **named("chunk split tensor_split split_with_sizes", _inner(2, 3, is_view=True)),
    Tensor.unfold: _inner(is_view=True),
    **named("transpose swapaxes swapdims movedim moveaxis", _inner(1, 3, is_view=True)),
    **named("unsqueeze", _by_rows(_behind_rows, is_view=True)),
    **named("permute", _by_rows(_keeps_first, is_view=True)),
    **named("contiguous", _contiguous),
    **named("view reshape view_as reshape_as", _reshape),
    **named("flatten", _flatten),
    **named("cat concat concatenate stack", _concatenate),
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
}
