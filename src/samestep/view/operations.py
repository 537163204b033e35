"""Operations of a call: their list, numbers taken out of tensors, and rules in divided calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from samestep.view.batch_norm import BATCH_NORM_RULES
from samestep.view.draws import DRAW_RULES, Draws, Rule
from samestep.view.losses import LOSS_RULES
from samestep.view.region import Region

RULES: dict[Callable[..., Any], Rule] = {**DRAW_RULES, **LOSS_RULES, **BATCH_NORM_RULES}
# A function, or a switch of the next function in a list of operations: one of its arguments that is
# not a tensor.
Operation = Callable[..., Any] | str | bool | int


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    owners = (torch, torch.Tensor, torch.nn.functional)
    return frozenset(
        getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)
    )


# Functions with Python numbers as results that depend on shapes and dtypes, not on values.
_SHAPE_FUNCTIONS = _functions("""
    size dim ndimension numel nelement __len__ stride storage_offset element_size is_contiguous
    is_floating_point is_complex is_signed is_tensor is_same_size is_set_to is_inference is_neg
    is_conj is_shared is_pinned data_ptr get_device __hash__ __format__""")
# Functions that copy values of a tensor into Python objects.
_VALUE_FUNCTIONS = _functions("tolist numpy __array__ __repr__ __format__")
# Functions of which all integers are dimensions, among them that of the rows.
_DIMENSION_FUNCTIONS = _functions("""
    all amax amin any argmax argmin argsort aminmax count_nonzero cummax cummin cumprod cumsum flip
    log_softmax logcumsumexp logsumexp max mean median min mode movedim nanmean nanmedian nansum
    normalize permute prod softmax softmin sort squeeze std std_mean sum transpose unsqueeze var
    var_mean""")
# Functions with a message, which may have the number of rows in it.
_ASSERTIONS = frozenset({torch._assert, torch._assert_async})


def is_number(function: Callable[..., Any], result: Any) -> bool:
    """Whether the result of a function has values of a tensor as Python objects."""
    if isinstance(result, bool | int | float | complex):
        return function not in _SHAPE_FUNCTIONS
    return function in _VALUE_FUNCTIONS


class Operations(Draws):
    """Function mode around a call: records the operations, applies the rules of a divided call.

    Attributes:
        functions: operations in order, each after its switches, such as the `reduction` of a loss.
        numbers: values that left tensors (`item`, `bool`, `tolist`, ...), in order.
    """

    def __init__(self, region: Region | None = None, *, is_compared: bool = False) -> None:
        super().__init__(region, is_compared=is_compared)
        self.functions: list[Operation] = []
        self.numbers: list[Any] = []

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
            self.note_attribute(arguments[0], value)
            return value
        # Checkpointing, which a trial leaves out, calls this one.
        if function is torch._C._set_grad_enabled:
            return function(*arguments, **options)
        self._note_switches(function, arguments, options)
        self.functions.append(function)
        rule = RULES.get(function)
        compute = partial(function, *arguments, **options)
        if rule is not None:
            compute = partial(rule, self, function, arguments, options)
        result = self.observe(function, arguments, options, compute)
        if is_number(function, result):
            self.numbers.append(result)
        return result

    def observe(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Return the result of an operation, which `compute` computes."""
        return compute()

    def note_attribute(self, tensor: torch.Tensor, value: Any) -> None:
        """Receive an attribute of a tensor, such as `data`, `shape` or the node of a graph."""

    def _note_switches(
        self, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Note the facts behind a verdict in the arguments of an operation.

        Scripts take it from closures, globals and configurations, which the kind of a call does not
        contain.
        """
        if function in _ASSERTIONS:
            return
        has_dimensions = function in _DIMENSION_FUNCTIONS
        for value in (*arguments, *options.values()):
            kind = type(value)
            # "cuda:1" is the device of one rank.
            if kind is bool or (kind is str and ":" not in value):
                self.functions.append(value)
            elif kind is float:
                self.functions.append(value == 0)  # hides its factor
            elif has_dimensions:  # integers of other functions can be numbers of rows
                if kind is int:
                    self.functions.append(value)
                elif kind is tuple or kind is list:
                    self.functions += [number for number in value if type(number) is int]
