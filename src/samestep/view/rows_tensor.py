"""Rows: a tensor with the shape of the whole batch that holds only the rows of this rank.

Rules (`rows_rules`) compute on the own rows. Any other operation gathers the rows of all ranks
first, and works on a plain tensor. A gathered tensor is whole for good, with all views of its
memory. All of this is above autograd, in `__torch_function__`: gradients flow through the own
tensors.

Decisions: docs/decisions/global-view.md
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.config.exclusions import excluded
from samestep.errors import RankDesyncError, SamestepError
from samestep.view.crossings import RowBounds, crossing, cut, gather
from samestep.view.messages import RaisedElsewhere, RowMessages
from samestep.view.region import current_region

# Returns the result of a function on own rows, or NotImplemented if all rows are needed.
Rule = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
RULES: dict[Any, Rule] = {}
METADATA: dict[Any, Rule] = {}  # rules of functions that may be called anywhere
# Whether this is inside of the forward of an `autograd.Function`, whose results get their graph
# below Rows.
in_function: ContextVar[bool] = ContextVar("in_function", default=False)
_new = torch.Tensor._make_wrapper_subclass  # private


class Rows(torch.Tensor):
    """A tensor of all rows that holds the own ones.

    Args:
        own: own rows, a plain tensor. Gradients are those of this tensor.
        bounds: rows that the ranks hold, with messages that begin with a word (`RowMessages`).
        memory: memory that `own` shares with other views; None if it shares none.
    """

    # Attributes of a subclass hide methods of tensors, so their names have a prefix.
    _rows_own: torch.Tensor
    _rows_bounds: RowBounds
    _rows_memory: Memory | None

    @staticmethod
    def __new__(
        cls: type[Rows], own: torch.Tensor, bounds: RowBounds, memory: Memory | None = None
    ) -> Rows:
        """Make a tensor whose memory is that of the own rows."""
        # A wrapper has the whole shape, and no memory for the rows of other ranks.
        shape = (bounds.rows, *own.shape[1:])
        rows: Rows = _new(
            cls, shape, own.stride(), None, None, own.dtype, torch.strided, own.device
        )
        rows._rows_own = own
        rows._rows_bounds = bounds
        rows._rows_memory = memory
        return rows

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a function of Rows by its rule, or on all rows."""
        options = options or {}
        rule = METADATA.get(function)
        if rule is not None:
            return rule(function, arguments, options)
        rule = RULES.get(function)
        result = NotImplemented
        # Other classes of tensors have operations of their own.
        is_alone = len(types) == 1 or _CLASSES.issuperset(types)
        is_outside = current_region() is None and not in_function.get()
        if rule is not None and is_alone and is_outside:
            try:
                result = rule(function, arguments, options)
            except (SamestepError, RecursionError):
                raise
            except RaisedElsewhere:
                result = NotImplemented
            except Exception as error:  # boundary: that of the script comes from all rows
                # A checkpoint ends its recomputation with an exception.
                if torch._C._current_graph_task_id() != -1:  # private
                    raise
                try:
                    return on_all_rows(function, arguments, options)
                except RankDesyncError as desync:  # other ranks have gone on
                    raise error from desync
        if result is NotImplemented:
            return on_all_rows(function, arguments, options)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks the function
        cls,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a function that does not ask `__torch_function__`.

        Raises:
            RunError: a gradient would be lost.
        """
        if function._overloadpacket in (torch.ops.aten.set_, torch.ops.aten.resize_):
            raise excluded("other memory for divided rows")
        for leaf in tree_leaves((arguments, options)):
            if isinstance(leaf, Rows) and leaf.requires_grad:
                raise excluded("divided rows below autograd", function)
        return function(
            *tree_map_only(Rows, gathered, arguments),
            **tree_map_only(Rows, gathered, options or {}),
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy a plain tensor."""
        return gathered(self).__reduce_ex__(protocol)


_CLASSES = {Rows, torch.Tensor, nn.Parameter}


class Memory:
    """Memory of the own rows that several Rows share as views, and of all rows after a gather.

    After a gather all of them are whole: functions receive plain tensors that are views of the
    memory of all rows.

    Args:
        rows: the tensor whose memory it is; its own rows are made contiguous if other rows would
            lie between them.

    Attributes:
        whole: all rows after a gather.
    """

    def __init__(self, rows: Rows) -> None:
        own = rows._rows_own
        span = 1 + sum(
            (size - 1) * stride
            for size, stride in zip(own.shape[1:], own.stride()[1:], strict=True)
        )
        if own.shape[0] > 1 and own.stride(0) < span:
            rows._rows_own = own = own.contiguous()
        self.whole: torch.Tensor | None = None
        self._own = own
        self._bounds = rows._rows_bounds
        self._offset = own.storage_offset()
        self._stride = max(own.stride(0), span)
        # All rows with a graph, and their node.
        self._joined: list[tuple[weakref.ref[Rows], torch.Tensor, Any]] = []

    def all_rows(self, rows: Rows) -> torch.Tensor:
        """Return the rows of all ranks of a tensor, with the graph of the own ones.

        Raises:
            RunError: a graph would be that of values before a write.
        """
        self._gather()
        own = rows._rows_own
        for reference, whole, _ in self._joined:
            if reference() is rows:
                return whole
        if not (own.requires_grad and torch.is_grad_enabled()):
            return self._view(rows)
        assert self.whole is not None
        if self.whole.requires_grad or any(
            whole.grad_fn is not node for _, whole, node in self._joined
        ):
            raise excluded("views of rows that were gathered")
        bounds = rows._rows_bounds
        (whole,) = crossing(
            [own], lambda _: [self._view(rows).detach()], lambda gradient: cut(gradient, bounds)
        )
        self._joined.append((weakref.ref(rows), whole, whole.grad_fn))
        return whole

    def graph_of(self, rows: Rows) -> torch.Tensor:
        """Return the tensor with the graph of a gathered one: own rows, or all after a write."""
        for reference, whole, node in self._joined:
            if reference() is rows and whole.grad_fn is not node:
                return whole
        if rows._rows_own.requires_grad:
            return rows._rows_own
        return self.all_rows(rows)

    def make_leaf(self, rows: Rows) -> None:
        """Gather a tensor without a graph, and let all its rows require gradients."""
        leaf = self.all_rows(rows).detach().requires_grad_()  # other views have no graph
        others = [entry for entry in self._joined if entry[0]() is not rows]
        self._joined = [*others, (weakref.ref(rows), leaf, None)]

    def _gather(self) -> None:
        if self.whole is None:
            every = self._bounds.gather([self._own.detach()])
            strides = (self._stride, *self._own.stride()[1:])
            # Strides of the own rows, from which those of views of all rows are made.
            if every.stride() != strides:
                every = every.new_empty_strided(every.shape, strides).copy_(every)
            self.whole = every

    def _view(self, rows: Rows) -> torch.Tensor:
        """Return the memory of all rows in the form of a tensor that is a view of it."""
        assert self.whole is not None
        own = rows._rows_own
        if own is self._own:
            return self.whole
        bounds = rows._rows_bounds
        strides = (self._stride * self._bounds.factor // bounds.factor, *own.stride()[1:])
        return self.whole.as_strided(
            (bounds.rows, *own.shape[1:]), strides, own.storage_offset() - self._offset
        )


def memory_of(rows: Rows) -> Memory:
    """Return the memory of a tensor, for a view of it or a gather."""
    if rows._rows_memory is None:
        rows._rows_memory = Memory(rows)
    return rows._rows_memory


def is_apart(value: Any) -> TypeGuard[Rows]:
    """Whether a value is Rows whose other rows are elsewhere, which ends with a gather."""
    return type(value) is Rows and (value._rows_memory is None or value._rows_memory.whole is None)


def own_rows(rows: Rows) -> torch.Tensor:
    """Return the own rows."""
    if is_apart(rows):
        return rows._rows_own
    return cut(gathered(rows), rows._rows_bounds)[0]


def graph_of(rows: Rows) -> torch.Tensor:
    """Return the tensor that has the graph of Rows."""
    if is_apart(rows):
        return rows._rows_own
    return memory_of(rows).graph_of(rows)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows as a plain tensor; a plain tensor is returned as it is."""
    if type(tensor) is Rows:
        return memory_of(tensor).all_rows(tensor)
    return tensor


def with_all_rows(value: Any) -> Any:
    """Return arguments of a call with all rows. Lists and dictionaries stay: it may write them."""
    if type(value) is Rows:
        return gathered(value)
    if type(value) is dict:
        value.update({key: with_all_rows(item) for key, item in value.items()})
        return value
    if type(value) is list:
        value[:] = [with_all_rows(item) for item in value]
        return value
    if type(value) is tuple:
        return tuple([with_all_rows(item) for item in value])
    if any(type(leaf) is Rows for leaf in tree_leaves(value)):
        return tree_map_only(Rows, gathered, value)
    return value


def on_all_rows(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Compute a function on all rows; it may write into them."""
    wholes: list[tuple[Rows, torch.Tensor]] = []

    def whole_of(rows: Rows) -> torch.Tensor:
        set_operation(rows, function)
        whole = gathered(rows)
        wholes.append((rows, whole))
        return whole

    arguments = tree_map_only(Rows, whole_of, arguments)
    result = function(*arguments, **tree_map_only(Rows, whole_of, options))
    for rows, whole in wholes:
        if result is whole:  # in place
            return rows
    return result


def set_operation(rows: Rows, function: Any) -> None:
    """Name the operation that needs the next messages, for the comparison of ranks."""
    messages = rows._rows_bounds.ranks
    if isinstance(messages, RowMessages):
        messages.operation = getattr(function, "__name__", "")


def is_large(own: torch.Tensor, bounds: RowBounds, limit: int) -> bool:
    """Whether own rows can stay where they are: a plain tensor of at least `limit` bytes in all."""
    if (
        type(own) is not torch.Tensor
        or own.layout is not torch.strided
        or len(bounds.slices.by_rank) == 1
    ):
        return False
    # Under `exact`, and with several own slices, the own rows are several tensors.
    if bounds.slices.copies or len(bounds.slices.own) > 1 or in_function.get():
        return False
    # The size of all rows: own ones differ between ranks, which must decide alike.
    return own.nbytes // max(1, own.shape[0]) * bounds.rows >= limit


def rows_of(own: torch.Tensor, bounds: RowBounds, limit: int) -> torch.Tensor:
    """Return the own rows of a batch as Rows; small tensors, and those of other classes, whole.

    Args:
        own: own rows.
        bounds: rows that the ranks hold.
        limit: bytes of all rows below which they are gathered.
    """
    if is_large(own, bounds, limit):
        return Rows(own, bounds)
    return gather([own], bounds)
