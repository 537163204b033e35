"""Rules of Rows for functions that compute each row by itself: elementwise ones, layers, and random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.view.crossings import RowBounds
from samestep.view.rows_tensor import Rows, Rule, cut_own, enter_own, memory_of, own_rows, own_slice

Function = Callable[..., Any]
_HOMES: tuple[Any, ...] = (torch, Tensor, functional, torch.special, torch._C._nn)


def named(names: str, rule: Rule) -> dict[Any, Rule]:
    """Return a rule for all functions and methods of torch with these names."""
    return {getattr(home, name): rule for name in names.split() for home in _HOMES if hasattr(home, name)}


def leading(operands: Iterable[Any], *, is_strict: bool = False) -> Rows | None:
    """Return the first Rows if the rows of all other tensors are beside its rows, otherwise None.

    Args:
        operands: arguments of a function.
        is_strict: no tensor is broadcast to more rows.
    """
    first: Rows | None = None
    plain: list[Tensor] = []
    for operand in operands:
        if type(operand) is Rows:
            if first is None:
                first = operand
            elif not _is_beside(operand, first):
                return None
        elif isinstance(operand, Tensor):
            plain.append(operand)
        elif type(operand) in (list, tuple, dict) and any(isinstance(item, Tensor) for item in operand):
            return None
    if first is None or not plain:
        return first
    dimensions = first._rows_own.dim()
    sizes = (first._rows_bounds.rows,) if is_strict else (first._rows_bounds.rows, 1)
    for operand in plain:
        missing = dimensions - operand.dim()
        if missing < 0 or (missing == 0 and operand.shape[0] not in sizes):
            return None
    return first


def _is_beside(rows: Rows, other: Rows) -> bool:
    return rows._rows_own.dim() == other._rows_own.dim() and rows._rows_bounds.is_equal(other._rows_bounds)


def own_part(operand: Any, lead: Rows) -> Any:
    """Return the part that this rank needs of an operand of a function with Rows."""
    if type(operand) is Rows:
        return own_rows(operand)
    if not isinstance(operand, Tensor):
        return operand
    bounds = lead._rows_bounds
    if operand.dim() == lead._rows_own.dim() and operand.shape[0] == bounds.rows:
        return cut_own(operand, bounds)
    return entered(operand, bounds)


def entered(operand: Any, bounds: RowBounds) -> Any:
    """Return a value without rows for a function with Rows; its gradient is the sum over ranks."""
    if isinstance(operand, Tensor) and operand.requires_grad and torch.is_grad_enabled():
        return enter_own(operand, bounds)
    return operand


def as_rows(result: Any, bounds: RowBounds) -> Any:
    """Return results of own rows as Rows."""
    if isinstance(result, Tensor):
        return Rows(result, bounds)
    if not isinstance(result, tuple | list):
        return result
    items = [as_rows(item, bounds) for item in result]
    return type(result)(items) if type(result).__module__ == "torch.return_types" else tuple(items)


def elementwise(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compute a function of aligned tensors on the own rows."""
    lead = leading(arguments if not options else (*arguments, *options.values()))
    if lead is None or "out" in options or options.get("inplace"):
        return NotImplemented
    own = [own_part(argument, lead) for argument in arguments]
    if options:
        result = function(*own, **{name: own_part(value, lead) for name, value in options.items()})
    else:
        result = function(*own)
    if result is lead._rows_own:  # such as `contiguous`
        return lead
    return as_rows(result, lead._rows_bounds)


def select(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Choose between two values; with a condition alone, `where` returns indices."""
    return elementwise(function, arguments, options) if len(arguments) + len(options) > 2 else NotImplemented


def strict(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compute a function of tensors with all rows on the own rows."""
    if leading((*arguments, *options.values()), is_strict=True) is None:
        return NotImplemented
    return elementwise(function, arguments, options)


def in_place(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Write into the own rows."""
    target = arguments[0]
    if type(target) is not Rows or leading((*arguments, *options.values())) is not target:
        return NotImplemented
    memory = target._rows_memory
    if memory is not None and memory.is_gathered:
        return NotImplemented
    own = [own_part(argument, target) for argument in arguments]
    function(*own, **{name: own_part(value, target) for name, value in options.items()})
    if memory is not None and target._rows_own.requires_grad:
        memory.has_graph = True
    return target


def activation(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compute a function of one tensor with an argument `inplace`, the second or third one."""
    if options.get("inplace") or any(argument is True for argument in arguments):
        options = {name: value for name, value in options.items() if name != "inplace"}
        if len(arguments) > 1:
            return NotImplemented
        return in_place(lambda own, **others: function(own, inplace=True, **others), arguments, options)
    return elementwise(function, arguments, options)


def convert(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Convert the own rows; a plain tensor may be converted to the type of Rows."""
    if type(arguments[0]) is Rows:
        return elementwise(function, (arguments[0], *map(_likeness, arguments[1:])), options)
    return function(arguments[0], *map(_likeness, arguments[1:]), **options)


def _likeness(value: Any) -> Any:
    """Return a tensor of the type and device of Rows without rows."""
    if type(value) is Rows:
        return torch.empty((), dtype=value._rows_own.dtype, device=value._rows_own.device)
    return value


def per_sample(least: int) -> Rule:
    """Return the rule of layers whose first argument has rows and whose other tensors have none.

    Args:
        least: smallest number of dimensions of an input with rows; fewer may be a single sample.
    """

    def rule(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        first = arguments[0] if arguments else options.get("input")
        others = [value for value in (*arguments, *options.values()) if value is not first]
        if type(first) is not Rows or any(type(value) is Rows for value in others):
            return NotImplemented
        if first._rows_own.dim() < least or options.get("inplace") or options.get("out") is not None:
            return NotImplemented
        bounds = first._rows_bounds

        def own(value: Any) -> Any:
            return own_rows(first) if value is first else entered(value, bounds)

        result = function(*map(own, arguments), **{name: own(value) for name, value in options.items()})
        return as_rows(result, bounds)

    return rule


def normalized(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Layer norm over inner dimensions."""
    shape = options.get("normalized_shape", arguments[1] if len(arguments) > 1 else ())
    if type(arguments[0]) is not Rows or len(shape) >= arguments[0]._rows_own.dim():
        return NotImplemented
    return _layer(function, arguments, options)


def padded(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Pad inner dimensions."""
    pads = options.get("pad", arguments[1] if len(arguments) > 1 else ())
    mode = options.get("mode", arguments[2] if len(arguments) > 2 else "constant")
    dimensions = arguments[0].dim() if arguments else 0
    # Modes other than `constant` take an input without the dimension of samples, too.
    if len(pads) > 2 * (dimensions - 1) or (mode != "constant" and len(pads) > 2 * (dimensions - 2)):
        return NotImplemented
    return _layer(function, arguments, options)


def one_hot(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """One-hot vectors of a given length; without it the length depends on all rows."""
    classes = options.get("num_classes", arguments[1] if len(arguments) > 1 else -1)
    return elementwise(function, arguments, options) if classes > 0 else NotImplemented


def embedding(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Look up rows of a table by indices that have rows."""
    if function is not functional.embedding or options.get("max_norm") is not None or len(arguments) > 3:
        return NotImplemented
    return _layer(function, arguments, options)


def product(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Multiply Rows with a plain matrix on the right, or matrices of rows with those of other Rows."""
    if len(arguments) != 2 or options:
        return NotImplemented
    left, right = arguments
    if type(left) is not Rows or not isinstance(right, Tensor):
        return NotImplemented
    if type(right) is Rows:
        return strict(function, arguments, options) if right._rows_own.dim() >= 3 else NotImplemented
    if left._rows_own.dim() < 2 or right.dim() > 2:
        return NotImplemented
    bounds = left._rows_bounds
    return as_rows(function(own_rows(left), entered(right, bounds)), bounds)


def attention(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Attention between positions of each row, without dropout."""
    if options.get("dropout_p") or len(arguments) != 3 or options.get("attn_mask") is not None:
        return NotImplemented
    if any(type(argument) is not Rows or argument._rows_own.dim() < 3 for argument in arguments):
        return NotImplemented
    return strict(function, arguments, options)


def draw_like(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Draw for all rows and keep the own ones, so that the generator advances as in one process."""
    rows = arguments[0]
    form = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta")
    choices = {"dtype": rows.dtype, "device": rows.device, **options}
    return kept(function(form, *arguments[1:], **choices), rows)


def dropout(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Draw the factors of all rows, and multiply the own rows with theirs."""
    rows = arguments[0] if arguments else options.get("input")
    if type(rows) is not Rows or options.get("inplace") or len(arguments) > 3:
        return NotImplemented
    training = options.get("training", options.get("train", arguments[2] if len(arguments) > 2 else True))
    if not training:
        return view_of(rows, own_rows(rows).view_as(own_rows(rows)))
    ones = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device).fill_(1)
    others = {name: value for name, value in options.items() if name != "input"}
    factors = own_slice(function(ones, *arguments[1:], **others), rows._rows_bounds)
    return Rows(own_rows(rows) * factors, rows._rows_bounds)


def kept(whole: Tensor, rows: Rows) -> Rows:
    """Return the own rows of a fresh tensor as Rows with memory of their own."""
    requires_grad = whole.requires_grad
    own = own_slice(whole.detach(), rows._rows_bounds).clone()
    return Rows(own.requires_grad_(requires_grad), rows._rows_bounds)


def view_of(rows: Rows, own: Tensor, bounds: RowBounds | None = None) -> Rows:
    """Return Rows of a result that may be a view of the own rows of `rows`."""
    memory = memory_of(rows)
    is_view = own.untyped_storage()._cdata == rows._rows_own.untyped_storage()._cdata
    return Rows(own, bounds or rows._rows_bounds, memory if is_view else None)


_ELEMENTWISE = """
    add sub mul div true_divide divide multiply subtract floor_divide remainder fmod pow float_power neg negative abs
    absolute sign sgn signbit exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh sigmoid expit logit erf erfc erfinv lgamma digamma reciprocal floor ceil round trunc fix frac
    clamp clip clamp_min clamp_max maximum minimum fmax fmin masked_fill lerp addcmul addcdiv eq ne lt le gt ge
    not_equal less less_equal greater greater_equal isnan isinf isfinite isposinf isneginf isclose nan_to_num
    logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
    bitwise_right_shift heaviside hypot copysign nextafter ldexp sinc xlogy xlog1py entr atan2 arctan2 rad2deg deg2rad
    softplus softsign tanhshrink softshrink hardshrink logsigmoid gelu clone float double half bfloat16 int
    long bool byte short char zeros_like ones_like full_like empty_like rsub
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__
    __rxor__ __lshift__ __rshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ angle"""
_ACTIVATIONS = "relu relu6 silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid threshold"
_IN_PLACE = """
    add_ sub_ mul_ div_ true_divide_ floor_divide_ remainder_ fmod_ neg_ abs_ sign_ exp_ log_ log1p_ expm1_ sqrt_ rsqrt_
    square_ sin_ cos_ sigmoid_ tanh_ relu_ clamp_ clip_ clamp_min_ clamp_max_ floor_ ceil_ round_ trunc_ frac_ pow_
    reciprocal_ zero_ fill_ masked_fill_ copy_ lerp_ addcmul_ addcdiv_ nan_to_num_ logical_not_ logical_and_ logical_or_
    logical_xor_ bitwise_and_ bitwise_or_ bitwise_xor_ eq_ ne_ lt_ le_ gt_ ge_ erf_ leaky_relu_ hardtanh_ elu_ celu_
    selu_ threshold_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
    __ixor__"""
_LAYERS = {  # smallest number of dimensions of an input with rows
    2: "linear group_norm",
    3: "conv1d conv_transpose1d max_pool1d avg_pool1d lp_pool1d adaptive_max_pool1d adaptive_avg_pool1d interpolate "
    "upsample fold local_response_norm max_pool1d_with_indices adaptive_max_pool1d_with_indices",
    4: "conv2d conv_transpose2d max_pool2d avg_pool2d lp_pool2d adaptive_max_pool2d adaptive_avg_pool2d pixel_shuffle "
    "pixel_unshuffle max_pool2d_with_indices adaptive_max_pool2d_with_indices",
    5: "conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_max_pool3d adaptive_avg_pool3d "
    "max_pool3d_with_indices adaptive_max_pool3d_with_indices",
}
_layer = per_sample(1)

ELEMENTWISE_RULES: dict[Any, Rule] = {
    **named(_ELEMENTWISE, elementwise),
    **named("where", select),
    **named("to cuda cpu pin_memory type_as", convert),
    **named(_ACTIVATIONS, activation),
    **named(_IN_PLACE, in_place),
    **{
        function: rule for least, names in _LAYERS.items() for function, rule in named(names, per_sample(least)).items()
    },
    functional.unfold: per_sample(4),
    **named("layer_norm rms_norm", normalized),
    **named("pad", padded),
    **named("one_hot", one_hot),
    **named("embedding", embedding),
    **named("matmul __matmul__ bmm", product),
    **named("scaled_dot_product_attention", attention),
    **named("rand_like randn_like randint_like", draw_like),
    **named("dropout dropout1d dropout2d dropout3d", dropout),
}
