"""Rules of Rows for functions along dimensions, views, and indices. The first dimension must stay that of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from samestep.view.rows_elementwise import (
    as_rows,
    elementwise,
    entered,
    in_place,
    leading,
    named,
    own_part,
    strict,
    view_of,
)
from samestep.view.rows_tensor import Rows, Rule, memory_of, own_rows

Function = Callable[..., Any]
_ALL = slice(None)


def is_inner(dimension: Any, count: int) -> bool:
    """Whether an argument names dimensions, and none of them is that of the rows."""
    if isinstance(dimension, bool) or dimension is None:
        return False
    dimensions = dimension if isinstance(dimension, tuple | list) else (dimension,)
    return len(dimensions) > 0 and all(isinstance(one, int) and one % count != 0 for one in dimensions)


def argument_of(arguments: Sequence[Any], options: Mapping[str, Any], index: int, *names: str) -> Any:
    """Return an argument by its place or one of its names; None without it."""
    for name in names:
        if name in options:
            return options[name]
    return arguments[index] if len(arguments) > index else None


def views(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compute a function of the own rows of the first argument, whose results may be views of it."""
    rows = arguments[0]
    memory_of(rows)
    others = [own_part(argument, rows) for argument in arguments[1:]]
    result = function(own_rows(rows), *others, **{name: own_part(value, rows) for name, value in options.items()})
    if isinstance(result, Tensor):
        return rows if result is rows._rows_own else view_of(rows, result)
    return type(result)([view_of(rows, item) for item in result])


def along(index: int = 1, *names: str, default: int | None = None, compute: Rule = views) -> Rule:
    """Return the rule of functions along dimensions.

    Args:
        index: place of the argument that names them.
        names: further names of it.
        default: the dimension without it.
        compute: rule for inner dimensions.
    """

    def rule(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if not arguments or type(arguments[0]) is not Rows or options.get("out") is not None:
            return NotImplemented
        dimension = argument_of(arguments, options, index, "dim", "axis", *names)
        if dimension is None:
            dimension = default
        if not is_inner(dimension, arguments[0]._rows_own.dim()):
            return NotImplemented
        if leading((*arguments, *options.values()), is_strict=True) is None:
            return NotImplemented
        return compute(function, arguments, options)

    return rule


def largest(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`max` and `min` of two tensors, or along a dimension."""
    if len(arguments) == 2 and isinstance(arguments[1], Tensor):
        return elementwise(function, arguments, options)
    return along()(function, arguments, options)


def index_select(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Select along an inner dimension by indices that have no rows."""
    if len(arguments) != 3 or type(arguments[0]) is not Rows or type(arguments[2]) is Rows:
        return NotImplemented
    rows, dimension, indices = arguments
    if not is_inner(dimension, rows._rows_own.dim()):
        return NotImplemented
    return as_rows(function(own_rows(rows), dimension, indices), rows._rows_bounds)


def reshaped(rows: Rows, function: Function, shape: Sequence[int]) -> Any:
    """Return Rows in another shape, of which each row of the batch keeps equally many rows."""
    own = own_rows(rows)
    bounds = rows._rows_bounds
    sizes = [int(size) for size in shape]
    batch = bounds.slices.bounds[-1][1]
    elements = bounds.rows * math.prod(own.shape[1:])
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = elements // max(1, -math.prod(sizes))
    if not sizes or sizes[0] <= 0 or sizes[0] % batch or math.prod(sizes) != elements:
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
    own_shape = [result_bounds.stop - result_bounds.start, *sizes[1:]]
    result = function(own_rows(rows), own_shape)
    return view_of(rows, result.clone() if is_copied else result, result_bounds)


def reshape(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`view` and `reshape`."""
    if options or len(arguments) < 2 or isinstance(arguments[1], torch.dtype):
        return NotImplemented
    rows = arguments[0]
    shape = arguments[1:]
    if isinstance(shape[0], tuple | list):
        shape = shape[0]
    return reshaped(rows, Tensor.view if function is Tensor.view else Tensor.reshape, shape)


def reshape_as(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`view_as` and `reshape_as`."""
    if type(arguments[0]) is not Rows:
        return NotImplemented
    return reshaped(arguments[0], Tensor.view if function is Tensor.view_as else Tensor.reshape, arguments[1].shape)


def flatten(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Flatten a range of dimensions."""
    shape = list(arguments[0].shape)
    start = argument_of(arguments, options, 1, "start_dim") or 0
    end = argument_of(arguments, options, 2, "end_dim")
    first = start % len(shape)
    last = (-1 if end is None else end) % len(shape)
    return reshaped(
        arguments[0], Tensor.reshape, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    )


def squeeze(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Remove inner dimensions of size 1: the rows of one rank may be a single one."""
    if argument_of(arguments, options, 1, "dim") is not None:
        return along()(function, arguments, options)
    inner = [index for index, size in enumerate(arguments[0].shape) if index and size == 1]
    return views(torch.squeeze, (arguments[0], tuple(inner)), {})


def unsqueeze(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Insert a dimension behind that of the rows."""
    dimension = argument_of(arguments, options, 1, "dim")
    if dimension % (arguments[0]._rows_own.dim() + 1) == 0:
        return NotImplemented
    return views(function, arguments, options)


def permute(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Permute inner dimensions."""
    dimensions = options.get("dims", arguments[1:])
    if len(dimensions) == 1 and isinstance(dimensions[0], tuple | list):
        dimensions = dimensions[0]
    if not dimensions or dimensions[0] % arguments[0]._rows_own.dim() != 0:
        return NotImplemented
    return views(function, arguments, options)


def flip(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Reverse inner dimensions."""
    dimensions = options.get("dims", arguments[1:])
    if isinstance(dimensions, tuple) and len(dimensions) == 1 and isinstance(dimensions[0], tuple | list):
        dimensions = dimensions[0]
    return views(function, arguments, options) if is_inner(dimensions, arguments[0]._rows_own.dim()) else NotImplemented


def matrix_transpose(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Swap the last two dimensions."""
    return views(function, arguments, options) if arguments[0]._rows_own.dim() > 2 else NotImplemented


def contiguous(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Copy unless all rows are contiguous; a single one is in more layouts than several."""
    rows = arguments[0]
    if rows.is_contiguous(*arguments[1:], **options):
        return rows
    own = own_rows(rows)
    copied = function(own, *arguments[1:], **options)
    return Rows(own.clone(*arguments[1:], **options) if copied is own else copied, rows._rows_bounds)


def transpose(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Swap or move inner dimensions."""
    count = arguments[0]._rows_own.dim()
    first = argument_of(arguments, options, 1, "dim0", "axis0", "source")
    second = argument_of(arguments, options, 2, "dim1", "axis1", "destination")
    return views(function, arguments, options) if is_inner(first, count) and is_inner(second, count) else NotImplemented


def expand(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Expand inner dimensions."""
    if options or type(arguments[0]) is not Rows or len(arguments) < 2:
        return NotImplemented
    rows = arguments[0]
    sizes = arguments[1:]
    if function is Tensor.expand_as:
        sizes = (tuple(arguments[1].shape),)
    if isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    if len(sizes) != rows._rows_own.dim() or sizes[0] not in (-1, rows._rows_bounds.rows):
        return NotImplemented
    return views(Tensor.expand, (rows, (-1, *sizes[1:])), {})


def repeat(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Repeat along inner dimensions."""
    sizes = arguments[1] if len(arguments) == 2 and isinstance(arguments[1], tuple | list) else arguments[1:]
    if options or len(sizes) != arguments[0]._rows_own.dim() or sizes[0] != 1:
        return NotImplemented
    return as_rows(function(own_rows(arguments[0]), *arguments[1:]), arguments[0]._rows_bounds)


def concatenate(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Concatenate or stack tensors with equally many rows along an inner dimension."""
    if len(arguments) not in (1, 2) or not isinstance(arguments[0], tuple | list) or options.get("out") is not None:
        return NotImplemented
    tensors = arguments[0]
    lead = leading(tensors, is_strict=True)
    dimension = argument_of(arguments, options, 1, "dim", "axis") or 0
    if lead is None:
        return NotImplemented
    count = lead._rows_own.dim()
    if any(tensor.dim() != count for tensor in tensors) or dimension % (count + (function is torch.stack)) == 0:
        return NotImplemented
    return as_rows(function([own_part(tensor, lead) for tensor in tensors], dimension), lead._rows_bounds)


def _keeps_rows(index: Any, count: int) -> bool:
    """Whether an index has all rows in order: `:` first, or `...` in front of the inner dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    known = (Tensor, list, tuple, range, Integral, slice, type(None), type(Ellipsis))
    if not index or any(isinstance(one, bool | Rows) or not isinstance(one, known) for one in index):
        return False
    if any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index):
        return False
    # Separated lists, or a list and a number, would move their dimension to the front.
    lists = sum(isinstance(one, Tensor | list | tuple | range) for one in index)
    if lists > 1 or (lists and any(isinstance(one, Integral) for one in index)):
        return False
    if index[0] is Ellipsis:
        return not lists and sum(one is not None for one in index[1:]) < count
    return isinstance(index[0], slice) and index[0] == _ALL


def get_item(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Index inner dimensions."""
    rows, index = arguments
    if type(rows) is not Rows or not _keeps_rows(index, rows._rows_own.dim()):
        return NotImplemented
    memory_of(rows)
    return view_of(rows, own_rows(rows)[index])


def set_item(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Write a number, or a value without rows, where a mask or an index of inner dimensions selects."""
    rows, index, value = arguments
    if type(rows) is not Rows or type(value) is Rows or (isinstance(value, Tensor) and value.dim() > 0):
        return NotImplemented
    if memory_of(rows).is_gathered:
        return NotImplemented
    if type(index) is Rows and index.dtype == torch.bool and leading((rows, index)) is rows:
        if index._rows_own.dim() > rows._rows_own.dim():
            return NotImplemented
        own_index: Any = own_rows(index)
    elif type(index) is not Rows and _keeps_rows(index, rows._rows_own.dim()):
        own_index = index
    else:
        return NotImplemented
    own_rows(rows)[own_index] = entered(value, rows._rows_bounds)
    if rows._rows_own.requires_grad:
        memory_of(rows).has_graph = True
    return None


_ALONG = """
    softmax log_softmax softmin argmax argmin amax amin cumsum cumprod logcumsumexp logsumexp prod all any
    count_nonzero aminmax median nanmedian nanmean nansum std var std_mean var_mean mode cummax cummin unbind narrow
    select"""
_MATRIX_TRANSPOSE: Any = Tensor.mT.__get__  # type: ignore[attr-defined]
DIMENSION_RULES: dict[Any, Rule] = {
    **named(_ALONG, along()),
    **named("max min", largest),
    **named("gather take_along_dim", along(1)),
    **named("scatter scatter_add", along(1, compute=strict)),
    **named("index_select", index_select),
    **named("glu sort argsort", along(1, default=-1)),
    **named("topk kthvalue", along(2, default=-1)),
    **named("chunk split tensor_split split_with_sizes norm", along(2)),
    **named("normalize", along(2, default=1)),
    **named("cosine_similarity", along(2, default=1, compute=strict)),
    **named("flip", flip),
    **named("diff", along(2, default=-1)),
    **named("scatter_ scatter_add_", along(1, compute=in_place)),
    Tensor.unfold: along(1, "dimension"),
    _MATRIX_TRANSPOSE: matrix_transpose,
    **named("contiguous", contiguous),
    **named("roll", along(2, "dims")),
    **named("unflatten", along(1)),
    **named("view reshape", reshape),
    **named("view_as reshape_as", reshape_as),
    **named("flatten", flatten),
    **named("squeeze", squeeze),
    **named("unsqueeze", unsqueeze),
    **named("permute", permute),
    **named("transpose swapaxes swapdims movedim moveaxis", transpose),
    **named("expand expand_as", expand),
    **named("repeat", repeat),
    **named("cat concat concatenate stack", concatenate),
    **named("detach", views),
    Tensor.__getitem__: get_item,
    Tensor.__setitem__: set_item,
}
