"""Tensors of a whole batch that hold the rows of this rank, and rules for sums and autograd.

Constructor: `Rows(own, bounds)`, or `rows_of(own, bounds, limit)`, which gathers small tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from samestep.config.exclusions import excluded
from samestep.view.crossings import cut, leave
from samestep.view.losses import CLASS_LOSSES, arguments_of, divisor, mean
from samestep.view.rows_rules import (
    RULES_BY_ROWS,
    Arguments,
    Function,
    Options,
    as_rows,
    is_inner,
    leading,
    named,
    of_own,
    own_part,
    values_at,
)
from samestep.view.rows_tensor import (
    METADATA,
    RULES,
    Rows,
    Rule,
    gathered,
    graph_of,
    in_function,
    is_apart,
    memory_of,
    on_all_rows,
    set_operation,
)

BATCH_LIMIT = 2**16  # bytes of a tensor of a batch that is Rows
OUTPUT_LIMIT = 2**20  # bytes of an output that is Rows
_SHOWS_TRACEBACKS = (
    *("traceback", "rich.traceback", "pdb", "bdb", "reprlib", "_pytest._io.saferepr", "pydevd"),
    "cgitb",
)


# --- sums and losses ------------------------------------------------------------------------------


def _total(function: Function, part: Tensor, rows: Rows) -> Tensor:
    set_operation(rows, function)
    return leave([part], rows._rows_bounds.ranks)


def _share(rows: Rows) -> float:
    """Return the part of the own rows in all of them: the weight of their mean."""
    return rows._rows_own.shape[0] / rows._rows_bounds.rows


def _sum_or_mean(function: Function, arguments: Arguments, options: Options) -> Any:
    rows: Any = next(iter(arguments), None)
    if not is_apart(rows) or "out" in options:
        return NotImplemented
    part = of_own(function, rows, arguments, options)
    # Each row has a result of its own, so no message is needed.
    if is_inner(values_at(arguments, options, 1, 2, "dim", "axis"), rows._rows_own.dim()):
        return as_rows(part, rows)
    # Ranks may have different numbers of rows, so the mean of each counts by its share.
    if function in (torch.mean, Tensor.mean):
        part = part * _share(rows)
    return _total(function, part, rows)


def _loss(function: Function, arguments: Arguments, options: Options) -> Any:
    """Losses with equally many values in each row, or a divisor that `losses.divisor` knows."""
    values = arguments_of(function, arguments, options)
    target = values["target"]
    has_classes = function in CLASS_LOSSES
    lead = leading([value for name, value in values.items() if name != "target" or not has_classes])
    if lead is None or (has_classes and not _is_beside(target, lead)):
        return on_all_rows(function, (), values)
    own = {name: own_part(value, lead) for name, value in values.items()}
    # Here: with a dimension less than the inputs, `own_part` would not cut the targets.
    if has_classes and not is_apart(target):
        own["target"] = cut(target, lead._rows_bounds)[0]
    reduction = own["reduction"]
    if reduction == "none":
        return as_rows(function(**own), lead)
    if reduction == "mean":
        count = divisor(function, own)
        if count is not None:
            return mean(function, own, count, lambda part: _total(function, part, lead))
    part = function(**own)
    if reduction != "sum":
        part = part * _share(lead)
    return _total(function, part, lead)


def _is_beside(target: Any, lead: Rows) -> bool:
    """Whether targets of classes have the rows of inputs with a dimension of classes."""
    if lead._rows_own.dim() < 2 or not isinstance(target, Tensor) or target.dim() == 0:
        return False
    if is_apart(target):
        return target._rows_bounds.is_equal(lead._rows_bounds)
    return target.shape[0] == lead._rows_bounds.rows


# --- metadata and autograd ------------------------------------------------------------------------


def _metadata(function: Function, arguments: Arguments, options: Options) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **options)


def _of_graph(function: Function, arguments: Arguments, options: Options) -> Any:
    if type(arguments[0]) is not Rows:
        return NotImplemented
    return function(graph_of(arguments[0]), *arguments[1:], **options)


def _gradient(function: Function, arguments: Arguments, options: Options) -> Any:
    """Return `grad`: that of a leaf, or the gradient that `retain_grad` keeps of own rows."""
    rows = arguments[0]
    gradient = function(graph_of(rows))
    if gradient is not None and _has_own_graph(rows):
        gradient = gathered(Rows(gradient, rows._rows_bounds))
    return gradient


def _set_gradient(function: Function, arguments: Arguments, options: Options) -> Any:
    rows, gradient = arguments
    if type(rows) is not Rows:
        return NotImplemented
    if _has_own_graph(rows):
        return function(rows._rows_own, own_part(gradient, rows))
    return function(graph_of(rows), gathered(gradient))


def _change_graph(function: Function, arguments: Arguments, options: Options) -> Any:
    """`requires_grad_`, `requires_grad = ...` and `retain_grad`.

    A leaf is gathered: its gradient is a tensor that the script may write, and autograd adds to it.
    """
    rows = arguments[0]
    is_needed = all(values_at(arguments, options, 1, 2, "requires_grad"))
    if is_needed and function not in _RETAIN and not graph_of(rows).requires_grad:
        memory_of(rows).make_leaf(rows)
    result = function(graph_of(rows), *arguments[1:], **options)
    if isinstance(result, Tensor):
        return rows
    return result


def _register_hook(function: Function, arguments: Arguments, options: Options) -> Any:
    rows, hook = arguments
    if not _has_own_graph(rows):
        return NotImplemented

    def with_rows(gradient: Tensor) -> Tensor | None:
        result = hook(Rows(gradient, rows._rows_bounds))
        if result is not None:
            result = own_part(result, rows)
        return result  # type: ignore[no-any-return]

    return function(rows._rows_own, with_rows)


def _grad(function: Function, arguments: Arguments, options: Options) -> Any:
    names = (
        *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
        *("only_inputs", "allow_unused"),
    )
    values = {**dict(zip(names, arguments, strict=False)), **options}
    if values.get("is_grads_batched"):
        return NotImplemented
    inputs = values.pop("inputs")
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    others = tree_map_only(Rows, gathered, values)
    gradients = list(function(inputs=tree_map_only(Rows, graph_of, list(inputs)), **others))
    for number, one in enumerate(inputs):
        if gradients[number] is not None and _has_own_graph(one):
            gradients[number] = Rows(gradients[number], one._rows_bounds)
    return tuple(gradients)


def _has_own_graph(tensor: Any) -> bool:
    return type(tensor) is Rows and graph_of(tensor) is tensor._rows_own


def _shows_traceback() -> bool:
    """Whether a debugger, or code that shows a traceback, asks: on one rank, at any time."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_SHOWS_TRACEBACKS):
            return True
        frame = frame.f_back
    return False


def _represent(function: Function, arguments: Arguments, options: Options) -> Any:
    rows = arguments[0]
    own = rows._rows_own
    if is_apart(rows) and _shows_traceback():  # on this rank only: the values would be a message
        bounds = rows._rows_bounds
        here = f"rows {bounds.start} to {bounds.stop - 1} are here"
        return f"tensor(shape={[bounds.rows, *own.shape[1:]]}, dtype={own.dtype}, {here})"
    text = on_all_rows(function, arguments, options)
    if own.grad_fn is not None:
        # As on one process, which has no node of a gather.
        text = text.replace("<_CrossingBackward>", f"<{type(own.grad_fn).__name__}>")
    return text


def _refuse(function: Function, arguments: Arguments, options: Options) -> Any:
    """Refuse to give a tensor other memory."""
    if type(arguments[0]) is not Rows:
        return NotImplemented
    raise excluded("other memory for divided rows")


def _of_attributes(names: str, rule: Rule, method: str = "__get__") -> dict[Any, Rule]:
    return {getattr(getattr(Tensor, name), method): rule for name in names.split()}


_METADATA = """
    size dim numel nelement ndimension __len__ is_floating_point is_complex is_signed element_size
    get_device is_contiguous stride is_same_size"""
_ATTRIBUTES = """
    shape dtype device ndim layout is_cuda is_sparse is_quantized is_meta itemsize nbytes is_mps
    is_mkldnn"""
_RETAIN = (Tensor.retain_grad,)
_OTHER_MEMORY = "resize_ resize_as_ set_ as_strided_ t_ transpose_ unsqueeze_ squeeze_ swapaxes_"
_LOSSES = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss
    soft_margin_loss hinge_embedding_loss binary_cross_entropy binary_cross_entropy_with_logits"""
METADATA.update(
    {
        **named(_METADATA, _metadata),
        torch.is_tensor: _metadata,
        Tensor.__hash__: _metadata,
        **_of_attributes(_ATTRIBUTES, _metadata),
        **_of_attributes(
            "requires_grad is_leaf grad_fn _version output_nr retains_grad", _of_graph
        ),
        **named("is_pinned is_inference is_conj is_neg", _of_graph),
    }
)
RULES.update(
    {
        **RULES_BY_ROWS,
        **named("sum mean", _sum_or_mean),
        **{getattr(functional, name): _loss for name in _LOSSES.split()},
        **_of_attributes("grad", _gradient),
        **_of_attributes("grad", _set_gradient, "__set__"),
        **_of_attributes("data", _refuse, "__set__"),
        **_of_attributes("requires_grad", _change_graph, "__set__"),
        **named("requires_grad_ retain_grad", _change_graph),
        **named("register_hook", _register_hook),
        torch.autograd.grad: _grad,
        Tensor.__repr__: _represent,
        **named(_OTHER_MEMORY, _refuse),
        **named("new_zeros new_ones new_full new_empty new_tensor", _of_graph),
    }
)

# The descriptor, because it is a class method of Python or of C, depending on the version of torch.
_apply = vars(torch.autograd.Function)["apply"]
_new_parameter = nn.Parameter.__new__


def _apply_to_all_rows(cls: Any, *arguments: Any, **options: Any) -> Any:
    own = [argument for argument in arguments if type(argument) is Rows]
    if own:
        for rows in own:
            set_operation(rows, cls)
        arguments = tree_map_only(Rows, gathered, arguments)
    token = in_function.set(True)
    try:
        return _apply.__get__(None, cls)(*arguments, **options)
    finally:
        in_function.reset(token)


def _parameter_of_all_rows(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    return _new_parameter(cls, gathered(data), requires_grad)


@contextmanager
def torch_gathers() -> Iterator[None]:
    """Let functions of torch that do not ask `__torch_function__` gather Rows during the block."""
    torch.autograd.Function.apply = classmethod(_apply_to_all_rows)  # type: ignore[assignment]
    nn.Parameter.__new__ = _parameter_of_all_rows  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
        nn.Parameter.__new__ = _new_parameter  # type: ignore[method-assign]
