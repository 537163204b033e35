"""Rules of Rows for metadata, autograd, printed text, and functions that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.errors import RunError
from samestep.view.rows_rules import named, own_part, views
from samestep.view.rows_tensor import (
    REPLACED_MEMORY,
    Rows,
    Rule,
    gathered,
    graph_of,
    in_function,
    is_apart,
    memory_of,
    on_all_rows,
    set_operation,
    shows_traceback,
)

Function = Callable[..., Any]


def _metadata(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **options)


def _of_graph(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if type(arguments[0]) is not Rows:
        return NotImplemented
    return function(graph_of(arguments[0]), *arguments[1:], **options)


def _gradient(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return `grad` as Rows, the same ones while it is the same tensor."""
    rows = arguments[0]
    gradient = function(rows._rows_own)
    if gradient is None:
        return None
    kept = rows._rows_gradient
    if kept is None or kept[0] is not gradient:
        rows._rows_gradient = kept = (gradient, Rows(gradient, rows._rows_bounds))
        memory_of(kept[1]).is_gradient = True
    return kept[1]


def _set_gradient(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    rows, gradient = arguments
    if type(rows) is not Rows:
        return NotImplemented
    function(rows._rows_own, own_part(gradient, rows))


def _change_graph(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`requires_grad_`, `requires_grad = ...`, `retain_grad` and `detach_`."""
    rows = arguments[0]
    memory_of(rows).separate(rows)
    result = function(rows._rows_own, *arguments[1:], **options)
    return rows if isinstance(result, Tensor) else result


def _register_hook(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    rows, hook = arguments
    if not _has_own_graph(rows):
        return NotImplemented

    def with_rows(gradient: Tensor) -> Tensor | None:
        result = hook(Rows(gradient, rows._rows_bounds))
        return None if result is None else own_part(result, rows)

    return function(rows._rows_own, with_rows)


def _backward(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    rows = arguments[0]
    if not is_apart(rows):
        return NotImplemented
    others = [own_part(argument, rows) for argument in arguments[1:]]
    return function(
        rows._rows_own, *others, **{name: own_part(value, rows) for name, value in options.items()}
    )


def _listed(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, Tensor) else list(value)


def _grad(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`torch.autograd.grad`."""
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
    )
    values = {**dict(zip(names, arguments, strict=False)), **options}
    if values.get("is_grads_batched"):
        return NotImplemented
    outputs = _listed(values.pop("outputs"))
    inputs = _listed(values.pop("inputs"))
    seeds = _listed(values.pop("grad_outputs", None))
    if len(seeds) != len(outputs):
        seeds = [None] * len(outputs)
    own_seeds = [
        own_part(seed, output) if _has_own_graph(output) else tree_map_only(Rows, gathered, seed)
        for seed, output in zip(seeds, outputs, strict=True)
    ]
    own = [
        [graph_of(one) if type(one) is Rows else one for one in tensors]
        for tensors in (outputs, inputs)
    ]
    gradients = function(*own, own_seeds, **values)
    return tuple(
        Rows(gradient, one._rows_bounds)
        if gradient is not None and _has_own_graph(one)
        else gradient
        for gradient, one in zip(gradients, inputs, strict=True)
    )


def _has_own_graph(tensor: Any) -> bool:
    return type(tensor) is Rows and graph_of(tensor) is tensor._rows_own


def _represent(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the text of all rows; in a debugger and in tracebacks, which are on one rank, without their values."""
    rows = arguments[0]
    own = rows._rows_own
    if shows_traceback() and is_apart(rows):
        bounds = rows._rows_bounds
        shape = [bounds.rows, *own.shape[1:]]
        return f"tensor(shape={shape}, dtype={own.dtype}, rows {bounds.start} to {bounds.stop - 1} are here)"
    text = on_all_rows(function, arguments, options)
    if own.grad_fn is not None:
        text = text.replace("<_CrossingBackward>", f"<{type(own.grad_fn).__name__}>")
    return text


def _refuse(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Refuse to give a tensor other memory.

    Raises:
        RunError: the tensor is Rows.
    """
    if type(arguments[0]) is not Rows:
        return NotImplemented
    raise RunError(*REPLACED_MEMORY, code="E_INCOMPATIBLE")


def _data(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`data`, which is `detach` apart from the version."""
    if not is_apart(arguments[0]):
        return NotImplemented
    return views(Tensor.detach, arguments, options)


def _of_attributes(names: str, rule: Rule, method: str = "__get__") -> dict[Any, Rule]:
    return {getattr(getattr(Tensor, name), method): rule for name in names.split()}


_METADATA = """
    size dim numel nelement ndimension __len__ is_floating_point is_complex is_signed element_size get_device
    is_contiguous stride is_same_size"""
_ATTRIBUTES = "shape dtype device ndim layout is_cuda is_sparse is_quantized is_meta itemsize nbytes is_mps is_mkldnn"
METADATA_RULES: dict[Any, Rule] = {
    **named(_METADATA, _metadata),
    torch.is_tensor: _metadata,
    Tensor.__hash__: _metadata,
    **_of_attributes(_ATTRIBUTES, _metadata),
    **_of_attributes("requires_grad is_leaf grad_fn _version output_nr retains_grad", _of_graph),
    **named("is_pinned is_inference is_conj is_neg", _of_graph),
}
AUTOGRAD_RULES: dict[Any, Rule] = {
    **_of_attributes("grad", _gradient),
    **_of_attributes("grad", _set_gradient, "__set__"),
    **_of_attributes("data", _data),
    **_of_attributes("data", _refuse, "__set__"),
    **_of_attributes("requires_grad", _change_graph, "__set__"),
    **named("requires_grad_ retain_grad detach_", _change_graph),
    **named("register_hook", _register_hook),
    **named("backward", _backward),
    torch.autograd.grad: _grad,
    Tensor.__repr__: _represent,
    **named(
        "resize_ resize_as_ set_ as_strided_ t_ transpose_ unsqueeze_ squeeze_ swapaxes_", _refuse
    ),
    **named("new_zeros new_ones new_full new_empty new_tensor", _of_graph),
}

_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_new_parameter = nn.Parameter.__new__


def _apply_to_all_rows(cls: Any, *arguments: Any, **options: Any) -> Any:
    if any(type(argument) is Rows for argument in arguments):
        for argument in arguments:
            if type(argument) is Rows:
                set_operation(argument, cls)
        arguments = tree_map_only(Rows, gathered, arguments)
    token = in_function.set(True)
    try:
        return _apply(cls, *arguments, **options)
    finally:
        in_function.reset(token)


def _parameter_of_all_rows(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    return _new_parameter(cls, gathered(data), requires_grad)


@contextmanager
def torch_gathers() -> Iterator[None]:
    """Let the functions of torch that do not ask `__torch_function__` gather Rows during the block."""
    torch.autograd.Function.apply = classmethod(_apply_to_all_rows)  # type: ignore[assignment]
    nn.Parameter.__new__ = _parameter_of_all_rows  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
        nn.Parameter.__new__ = _new_parameter  # type: ignore[method-assign]
