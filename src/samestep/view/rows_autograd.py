"""Rules of Rows for metadata, autograd, printed text, and functions that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.errors import RunError
from samestep.view.rows_dimensions import views
from samestep.view.rows_elementwise import named, own_part
from samestep.view.rows_tensor import (
    REPLACED_MEMORY,
    Rows,
    Rule,
    gathered,
    in_function,
    memory_of,
    on_all_rows,
    own_rows,
    set_operation,
    shows_traceback,
)

Function = Callable[..., Any]


def _metadata(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **options)


def _of_own(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return function(own_rows(arguments[0]), *arguments[1:], **options)


def _gradient(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return `grad` as Rows, the same ones while it is the same tensor."""
    rows = arguments[0]
    gradient = function(own_rows(rows))
    if gradient is None:
        return None
    kept = rows._rows_gradient
    if kept is None or kept[0] is not gradient:
        rows._rows_gradient = kept = (gradient, Rows(gradient, rows._rows_bounds))
        memory_of(kept[1]).has_graph = True  # autograd adds to it
    return kept[1]


def _set_gradient(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    rows, gradient = arguments
    function(own_rows(rows), None if gradient is None else own_part(gradient, rows))


def _require_gradients(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`requires_grad_`, `requires_grad = ...`, `retain_grad` and `detach_`."""
    rows = arguments[0]
    memory_of(rows)
    result = function(own_rows(rows), *arguments[1:], **options)
    if rows._rows_own.requires_grad:
        memory_of(rows).has_graph = True
    return rows if isinstance(result, Tensor) else result


def _register_hook(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    rows, hook = arguments
    bounds = rows._rows_bounds

    def with_rows(gradient: Tensor) -> Tensor | None:
        result = hook(Rows(gradient, bounds))
        return None if result is None else own_part(result, rows)

    return function(own_rows(rows), with_rows)


def _backward(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    rows = arguments[0]
    others = [own_part(argument, rows) for argument in arguments[1:]]
    return function(own_rows(rows), *others, **{name: own_part(value, rows) for name, value in options.items()})


def _listed(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, Tensor) else list(value)


def _grad(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`torch.autograd.grad`."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    values = {**dict(zip(names, arguments, strict=False)), **options}
    if values.get("is_grads_batched"):
        return NotImplemented
    outputs = _listed(values.pop("outputs"))
    inputs = _listed(values.pop("inputs"))
    seeds = _listed(values.pop("grad_outputs", None))
    if len(seeds) != len(outputs):
        seeds = [None] * len(outputs)
    own_seeds = [
        own_part(seed, output) if type(output) is Rows and seed is not None else tree_map_only(Rows, gathered, seed)
        for seed, output in zip(seeds, outputs, strict=True)
    ]
    gradients = function(_own_list(outputs), _own_list(inputs), own_seeds, **values)
    return tuple(
        Rows(gradient, one._rows_bounds) if type(one) is Rows and gradient is not None else gradient
        for gradient, one in zip(gradients, inputs, strict=True)
    )


def _own_list(tensors: Sequence[Any]) -> list[Any]:
    return [own_rows(one) if type(one) is Rows else one for one in tensors]


def _represent(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the text of all rows; in a debugger and in tracebacks, which are on one rank, without their values."""
    rows = arguments[0]
    memory = rows._rows_memory
    if shows_traceback() and (memory is None or not memory.is_gathered):
        bounds = rows._rows_bounds
        shape = [bounds.rows, *rows._rows_own.shape[1:]]
        return f"tensor(shape={shape}, dtype={rows._rows_own.dtype}, rows {bounds.start} to {bounds.stop - 1} are here)"
    own = own_rows(rows)
    text = on_all_rows(function, arguments, options)
    if own.grad_fn is not None:
        text = text.replace("<_CrossingBackward>", f"<{type(own.grad_fn).__name__}>")
    return text


def _refuse(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Refuse to give a tensor other memory.

    Raises:
        RunError: always.
    """
    raise RunError(*REPLACED_MEMORY, code="E_INCOMPATIBLE")


def _data(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return views(Tensor.detach, arguments, options)


def _set_data(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if type(arguments[0]) is not Rows:
        return NotImplemented
    return _refuse(Tensor.set_, arguments, options)


def _type(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`type`: a name, or a conversion."""
    if len(arguments) == 1 and not options:
        return function(own_rows(arguments[0]))
    result = function(own_rows(arguments[0]), *arguments[1:], **options)
    return arguments[0] if result is arguments[0]._rows_own else Rows(result, arguments[0]._rows_bounds)


def _new(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`new_zeros` and others: plain tensors."""
    return _of_own(function, arguments, options) if type(arguments[0]) is Rows else NotImplemented


def _of_attributes(names: str, rule: Rule, method: str = "__get__") -> dict[Any, Rule]:
    return {getattr(getattr(Tensor, name), method): rule for name in names.split()}


_METADATA = "size dim numel nelement ndimension __len__ is_floating_point is_complex is_signed element_size get_device"
_METADATA_ATTRIBUTES = (
    "shape dtype device ndim layout is_cuda is_sparse is_quantized is_meta itemsize nbytes is_mps is_xpu is_mkldnn"
)
_OWN_ATTRIBUTES = "requires_grad is_leaf grad_fn _version output_nr retains_grad"
METADATA_RULES: dict[Any, Rule] = {
    **named(f"{_METADATA} is_contiguous stride is_same_size", _metadata),
    torch.is_tensor: _metadata,
    Tensor.__hash__: _metadata,
    **_of_attributes(_METADATA_ATTRIBUTES, _metadata),
    **_of_attributes(_OWN_ATTRIBUTES, _of_own),
    **named("is_pinned is_inference is_conj is_neg", _of_own),
}
AUTOGRAD_RULES: dict[Any, Rule] = {
    **_of_attributes("grad", _gradient),
    **_of_attributes("grad", _set_gradient, "__set__"),
    **_of_attributes("data", _data),
    **_of_attributes("data", _set_data, "__set__"),
    **_of_attributes("requires_grad", _require_gradients, "__set__"),
    **named("requires_grad_ retain_grad detach_", _require_gradients),
    **named("register_hook", _register_hook),
    **named("backward", _backward),
    torch.autograd.grad: _grad,
    Tensor.__repr__: _represent,
    **named("resize_ resize_as_ set_ as_strided_ t_ transpose_ unsqueeze_ squeeze_ swapaxes_", _refuse),
    **named("new_zeros new_ones new_full new_empty new_tensor", _new),
    Tensor.type: _type,
}
WRITERS = frozenset(named("numpy __array__ data_ptr untyped_storage storage __dlpack__ share_memory_", _metadata))

_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_new_parameter = nn.Parameter.__new__


def _apply_to_all_rows(cls: Any, *arguments: Any, **options: Any) -> Any:
    if any(type(argument) is Rows for argument in arguments):
        for argument in arguments:
            if type(argument) is Rows:
                set_operation(argument, cls.__name__)
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
