"""Operations of a call: their list, numbers taken out of tensors, random draws, and the rules inside divided calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from samestep.view.batch_norm import BATCH_NORM_RULES
from samestep.view.draws import DRAW_RULES
from samestep.view.losses import LOSS_RULES
from samestep.view.region import Make, Region

# A rule receives the operations of the call, the function, and its arguments; it returns the result.
Rule = Callable[["Operations", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
RULES: dict[Callable[..., Any], Rule] = {**DRAW_RULES, **LOSS_RULES, **BATCH_NORM_RULES}
# A function, or a switch of the next function in a list of operations: one of its arguments that is not a tensor.
Operation = Callable[..., Any] | str | bool | int
Compute = Callable[[], Any]

_SUMS = frozenset({torch.sum, torch.Tensor.sum})
_EQUALS = frozenset({torch.eq, torch.Tensor.eq, torch.Tensor.__eq__})
# Private: nn.TransformerEncoder and torch.distributions check with the last.
_ANY_OR_ALL = frozenset({torch.any, torch.all, torch.Tensor.any, torch.Tensor.all, torch._is_all_true})

# Functions with Python numbers as results that depend on shapes and dtypes, not on values.
_SHAPE_FUNCTIONS = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement),
        *(torch.Tensor.__len__, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.element_size),
        *(torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed),
        *(torch.Tensor.data_ptr, torch.Tensor.get_device, torch.Tensor.is_shared, torch.Tensor.is_pinned),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_same_size),
        *(torch.Tensor.is_same_size, torch.Tensor.is_set_to, torch.Tensor.__hash__, torch.Tensor.__format__),
        *(torch.Tensor.is_inference, torch.is_inference, torch.Tensor.is_neg, torch.Tensor.is_conj),
        *(torch.is_neg, torch.is_conj),
    }
)
# Functions that copy values of a tensor into Python objects.
_VALUE_FUNCTIONS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.__format__}
)
# Functions of which all integers are dimensions, among them that of the rows.
_DIMENSION_NAMES = (
    *("all", "amax", "amin", "any", "argmax", "argmin", "argsort", "aminmax", "count_nonzero", "cummax", "cummin"),
    *("cumprod", "cumsum", "flip", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "mode"),
    *("movedim", "nanmean", "nanmedian", "nansum", "normalize", "permute", "prod", "softmax", "softmin", "sort"),
    *("squeeze", "std", "std_mean", "sum", "transpose", "unsqueeze", "var", "var_mean"),
)
_DIMENSION_FUNCTIONS = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor, torch.nn.functional)
    for name in _DIMENSION_NAMES
    if hasattr(owner, name)
)


def has_rules(functions: Iterable[Operation]) -> bool:
    """Whether a rule applies to one of the functions."""
    return any(function in RULES for function in functions)


class Recorder(Protocol):
    """Observer of the operations of a call."""

    def observe(
        self, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any], compute: Compute
    ) -> Any:
        """Return the result of an operation, which `compute` computes."""
        ...

    def attribute(self, tensor: torch.Tensor, value: Any) -> None:
        """Called with an attribute of a tensor that is a tensor, such as `data`, or a node of a graph."""
        ...


class Conditions:
    """Observer that finds numbers which say whether any or all values of a tensor are true.

    Args:
        keeps_sources: whether to keep these tensors.

    Attributes:
        sources: the tensors, by the index of the number among all numbers of the call.
    """

    def __init__(self, *, keeps_sources: bool = True) -> None:
        self.sources: dict[int, torch.Tensor] = {}
        self._keeps_sources = keeps_sources
        self._numbers = 0
        # Scalars by identity, with the elements of their source.
        self._counts: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]] = {}

    def attribute(self, tensor: torch.Tensor, value: Any) -> None:
        """Do nothing with attributes."""

    def observe(
        self, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any], compute: Compute
    ) -> Any:
        """Compute an operation and note its result."""
        result = compute()
        self.note(function, arguments, result)
        if is_number(function, result):
            count = self.of(arguments[0]) if arguments else None
            if count is not None and count[2] is not None:
                self.sources[self._numbers] = count[2]
            self._numbers += 1
        return result

    def note(self, function: Callable[..., Any], arguments: Sequence[Any], result: Any) -> None:
        """Note the result of an operation, if it is a scalar that such a number comes from."""
        if not isinstance(result, torch.Tensor) or result.dim() or not arguments:
            return
        first = arguments[0]
        count = self.of(first)
        if function in _ANY_OR_ALL or (function in _SUMS and first.dtype is torch.bool):
            source = first if self._keeps_sources else None
            self._counts[id(result)] = (weakref.ref(result), first.numel(), source)
        elif function in _EQUALS and count is not None and arguments[1] == count[1]:
            self._counts[id(result)] = (weakref.ref(result), *count[1:])  # `mask.sum() == mask.numel()` is `mask.all()`

    def of(self, scalar: Any) -> tuple[Any, int, torch.Tensor | None] | None:
        """Return (reference, elements of the source, source) for a noted scalar, None for others."""
        count = self._counts.get(id(scalar))
        if count is None or count[0]() is not scalar:
            return None
        return count


def is_number(function: Callable[..., Any], result: Any) -> bool:
    """Whether the result of a function has values of a tensor as Python objects."""
    if isinstance(result, bool | int | float | complex):
        return function not in _SHAPE_FUNCTIONS
    return function in _VALUE_FUNCTIONS


class Operations(TorchFunctionMode):
    """Function mode around a call. It records the operations and applies the rules of a divided call.

    Attributes:
        region: the rows that are computed; None for a whole call, in which every function runs as it is.
        functions: operations in order, each after its switches, such as the `reduction` of a loss.
        numbers: values that left tensors (`item`, `bool`, `tolist`, ...), in order.
        draws: shapes of the random draws, in order.
    """

    def __init__(self, region: Region | None = None, recorder: Recorder | None = None) -> None:
        super().__init__()
        self.region = region
        self.recorder = recorder
        self.functions: list[Operation] = []
        self.numbers: list[Any] = []
        self.draws: list[tuple[int, ...]] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if function.__name__ == "__get__":  # attributes of tensors, such as `shape`
            value = function(*arguments, **options)
            if self.recorder is not None and isinstance(value, torch.Tensor | Node):
                self.recorder.attribute(arguments[0], value)
            return value
        if function is torch._C._set_grad_enabled:  # checkpointing, which a trial leaves out, calls it
            return function(*arguments, **options)
        self._note_switches(function, arguments, options)
        self.functions.append(function)
        rule = RULES.get(function)
        compute = partial(function, *arguments, **options)
        if rule is not None:
            compute = partial(rule, self, function, arguments, options)
        if self.recorder is None:
            result = compute()
        else:
            result = self.recorder.observe(function, arguments, options, compute)
        if is_number(function, result):
            self.numbers.append(result)
        return result

    def _note_switches(
        self, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Note the facts behind a verdict in the arguments of an operation.

        Scripts take it from closures, globals and configurations, which the kind of a call does not contain.
        """
        has_dimensions = function in _DIMENSION_FUNCTIONS
        for value in (*arguments, *options.values()):
            kind = type(value)
            if kind is bool or (kind is str and ":" not in value):  # "cuda:1" is the device of one rank
                self.functions.append(value)
            elif kind is float:
                self.functions.append(value == 0)  # hides its factor
            elif has_dimensions:  # integers of other functions can be numbers of rows
                if kind is int:
                    self.functions.append(value)
                elif kind is tuple or kind is list:
                    self.functions += [number for number in value if type(number) is int]

    def draw(self, shape: Sequence[int], make: Make, device: torch.device) -> torch.Tensor:
        """Return the numbers of a random draw inside of a divided call, for the own rows."""
        assert self.region is not None
        self.draws.append(tuple(shape))
        return self.region.draw(len(self.draws) - 1, shape, make, device)
