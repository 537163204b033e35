"""Watched call: the first call of a kind, computed whole, and its other effects than the outputs."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten  # private; the only one that opens classes registered with torch

from samestep.distributed.devices import accelerator_module
from samestep.view.backward_code import BackwardCode
from samestep.view.graph import captures, sequence_number
from samestep.view.leaves import VALUES, flatten, is_held_elsewhere
from samestep.view.operations import RULES, Operation, Operations
from samestep.view.reachable import Reachable, changed, is_library_class, tensor_mark

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_ARGUMENTS = (*VALUES, *_FUNCTIONS, torch.layout, torch.memory_format, range, slice, type(Ellipsis))
_HOOKS = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}
)
# Private: torch.distributions checks its arguments with the fifth, nn.TransformerEncoder masks with the last.
_ROW_TESTS = frozenset({torch.any, torch.all, torch.Tensor.any, torch.Tensor.all, torch._is_all_true})
_ALIGNED = torch._nested_tensor_from_mask_left_aligned
_SUMS = frozenset({torch.sum, torch.Tensor.sum})
_EQUALS = frozenset({torch.eq, torch.Tensor.eq, torch.Tensor.__eq__})
_ATTRIBUTE_DEPTH = 6


@dataclass(frozen=True)
class Watched:
    """Result of a watched call.

    Attributes:
        result: result of the call.
        reason: why calls of this kind must be computed whole, as a phrase after "the forward"; None if no reason was
            found, and the next call can be tried.
        operations: operations in order, with their switches.
        draws: shapes of the random draws, in order.
        uses_checkpointing: tensors are packed when they are saved for the backward, or parts are computed again in it.
        row_tests: places in `operations` of each `any`, `all` or the like over rows that became a Python bool.
        backward_code: code of the script that the backward runs.
        is_first_again: `reason` holds for this call only, since it has created parameters, buffers or submodules. The
            next call is to be watched again.
    """

    result: Any
    reason: str | None
    operations: tuple[Operation, ...]
    draws: tuple[tuple[int, ...], ...]
    uses_checkpointing: bool
    row_tests: tuple[int, ...]
    backward_code: BackwardCode
    is_first_again: bool = False


def watch(
    module: nn.Module, compute: Callable[[], Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Watched:
    """Compute a whole call and report its effects by other ways than arguments and outputs.

    Args:
        module: the module that is called.
        compute: function that computes the call; run once. Its exceptions propagate.
        arguments: positional arguments of the call.
        options: keyword arguments of the call.
    """
    received = tree_flatten((arguments, options))[0]
    marks = _Arguments(arguments, options, received)
    structure = _structure(module)
    gradients = _gradients(module)
    reachable = Reachable(
        module, (*(leaf for leaf in received if isinstance(leaf, _FUNCTIONS)), *_classes(module, received))
    )
    before = reachable.digest()
    recorder = _Recorder([leaf for leaf in received if isinstance(leaf, torch.Tensor)])
    start = sequence_number()
    with Operations(None, recorder) as operations:
        recorder.operations = operations
        result = compute()
    recorder.open.clear()
    returned = flatten(result)[0]
    kept = _returned_elsewhere(result)  # not in a function below, which would hold the result too
    collected = captures(module, received, returned, recorder.made, start)
    uses_checkpointing = recorder.uses_checkpointing or collected.has_checkpoint
    backward_code = BackwardCode(module.modules(), collected.functions, recorder.saving)
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _foreign_leaf(received, _ARGUMENTS, "is given"),
        lambda: _property_of_submodules(module),
        marks.changed,
        lambda: changed(before, reachable.digest()),
        lambda: recorder.reason,
        lambda: None if _gradients(module) == gradients else "writes gradients of parameters",
        lambda: _foreign_leaf(returned, VALUES, "returns"),
        lambda: kept,
        lambda: collected.reason,
        backward_code.reason,
        lambda: _survivors(module, [*received, *returned], recorder, uses_checkpointing),
    )
    is_first_again = structure != _structure(module)
    if is_first_again:  # other effects of the call are seen in the next one
        reason: str | None = "creates parameters, buffers or submodules"
    else:
        reason = next((words for words in (check() for check in checks) if words is not None), None)
    return Watched(
        result=result,
        reason=reason,
        operations=tuple(operations.functions),
        draws=tuple(operations.draws),
        uses_checkpointing=uses_checkpointing,
        row_tests=tuple(recorder.row_tests),
        backward_code=backward_code,
        is_first_again=is_first_again,
    )


# ----- module and arguments ------------------------------------------------------------------------------------------


def _structure(module: nn.Module) -> list[Any]:
    """Return the changes of a call that creates parameters, buffers or submodules. Buffers may be replaced."""
    collected: list[Any] = []
    for name, part in module.named_modules():
        parameters = [(key, id(value), type(value)) for key, value in part._parameters.items()]
        collected.append((name, id(part), parameters, list(part._buffers.keys())))
    return collected


def _gradients(module: nn.Module) -> list[Any]:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.is_leaf]
    return [None if gradient is None else tensor_mark(gradient, content=False) for gradient in gradients]


def _property_of_submodules(module: nn.Module) -> str | None:
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"has parameters of torch.jit in {type(part).__name__}"
        if part is not module and (part._backward_hooks or part._backward_pre_hooks):
            return f"has a backward hook on {type(part).__name__}"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return "has sparse gradients"
    return None


def _classes(module: nn.Module, received: Sequence[Any]) -> set[type]:
    """Return the script's own classes of tensors with a `__torch_function__` that runs in the call."""
    tensors = (*module.parameters(), *module.buffers(), *(leaf for leaf in received if isinstance(leaf, torch.Tensor)))
    return {type(tensor) for tensor in tensors if not is_library_class(type(tensor))}


def _foreign_leaf(leaves: Sequence[Any], known: tuple[type, ...], verb: str) -> str | None:
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *known)):
            return f"{verb} an object of type {type(leaf).__name__}"
    return None


def _returned_elsewhere(result: Any) -> str | None:
    if is_held_elsewhere(result):
        return "returns an object that is kept elsewhere too"
    return None


class _Arguments:
    """Arguments of a call, to find writes of the call."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any], leaves: Sequence[Any]) -> None:
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Inference tensors count no versions.
        self._marks = [tensor_mark(tensor, content=tensor.is_inference()) for tensor in self._tensors]
        self._containers: list[tuple[Any, list[Any]]] = []
        for value in (*arguments, *options.values()):
            self._add(value)

    def _add(self, value: Any) -> None:
        items = _items(value)
        if items is None:
            return
        self._containers.append((value, items))
        for item in items:
            self._add(item)

    def changed(self) -> str | None:
        for tensor, mark in zip(self._tensors, self._marks, strict=True):
            if tensor_mark(tensor, content=tensor.is_inference()) != mark:
                return "writes into an argument"
        for container, items in self._containers:
            now = _items(container) or []
            if len(now) != len(items) or any(new is not old for new, old in zip(now, items, strict=True)):
                return "changes a container among its arguments"
        return None


def _items(value: Any) -> list[Any] | None:
    """Return the items of a container that `tree_flatten` opens; None for other values."""
    items: list[Any] | None = None
    if isinstance(value, list | tuple | collections.deque):
        items = list(value)
    elif isinstance(value, dict):
        items = [*value.keys(), *value.values()]
    elif not isinstance(value, (torch.Tensor, *_ARGUMENTS)) and hasattr(value, "__dict__"):
        leaves = tree_flatten(value)[0]
        if not (len(leaves) == 1 and leaves[0] is value):
            items = list(vars(value).values())
    return items


# ----- operations ----------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """An operation that runs."""

    arguments: Sequence[Any]
    existing: set[int]
    place: int
    tainted: list[torch.Tensor]
    versions: list[tuple[torch.Tensor, int]]
    generators: tuple[Any, ...] | None


@dataclass
class _Recorder:
    """Observer of the operations of a watched call.

    A tensor that is computed from tensors with rows is tainted: in a divided call its value differs between ranks.
    `by_rows` says that its first dimension has followed the rows of the batch all the way.
    """

    received: Sequence[torch.Tensor]
    operations: Operations | None = None
    reason: str | None = None
    uses_checkpointing: bool = False
    saving: dict[Callable[..., Any], None] = field(default_factory=dict)  # hooks of saved tensors
    row_tests: list[int] = field(default_factory=list)
    made: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    open: list[_Open] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = next((tensor.shape[0] for tensor in self.received if tensor.dim()), 0)
        self._taints: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        self._tests: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # with place, elements of the source
        self._numbers = 0
        for tensor in self.received:
            if tensor.dim() and tensor.shape[0] == self._rows:
                self._taint(tensor, True)

    def operation(self, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        assert self.operations is not None
        tensors = list(_tensors((arguments, options)))
        tainted = [tensor for tensor in tensors if self._is_tainted(tensor) is not None]
        versions = []
        if tainted:
            versions = [(t, t._version) for t in tensors if not t.is_inference() and self._is_tainted(t) is None]
        generators = None
        if function not in RULES:
            generators = _generators()
        place = len(self.operations.functions) - 1
        existing = {id(tensor) for tensor in tensors}
        self.open.append(_Open(arguments, existing, place, tainted, versions, generators))
        # Private; the hooks of torch.utils.checkpoint and torch.autograd.graph.saved_tensors_hooks.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            self.uses_checkpointing = True
            self.saving.update(dict.fromkeys(hooks))
        if function in _HOOKS:
            self._refuse("sets a hook of a tensor")
        if function is torch.Tensor.backward:
            self._refuse("calls backward")
        if options.get("sparse") is True:
            self._refuse("has sparse gradients")

    def result(self, function: Callable[..., Any], arguments: Sequence[Any], result: Any) -> None:
        assert self.operations is not None
        if getattr(function, "__name__", "") == "__get__":  # such as `x.data`
            if isinstance(result, Node):
                self._refuse("uses the graph of a tensor")  # to hook into it
            elif self._is_tainted(arguments[0]) is not None:
                self._taint(result, False)
            return
        entry = self.open.pop()
        while entry.arguments is not arguments:  # left by an operation that has failed
            entry = self.open.pop()
        self._spread(entry, result)
        if isinstance(result, torch.Tensor) and result.dim() == 0 and entry.tainted:
            self._note_test(function, arguments, entry, result)
        if len(self.operations.numbers) > self._numbers:
            self._numbers = len(self.operations.numbers)
            self._judge_number(function, entry)
        if entry.generators is not None and entry.generators != _generators():
            self._refuse(f"draws random numbers inside of {_name(function)}")

    def _spread(self, entry: _Open, result: Any) -> None:
        """Taint the results of an operation with tainted arguments, and the tensors that it wrote into."""
        by_rows = all(self._is_tainted(tensor) for tensor in entry.tainted)
        for tensor in _tensors(result):
            if id(tensor) not in entry.existing:  # operations in place, and `to` where nothing is to do
                self.made[id(tensor)] = weakref.ref(tensor)
            if entry.tainted:
                self._taint(tensor, by_rows)
        for tensor, version in entry.versions:
            if tensor._version != version:
                self._taint(tensor, False)
                if tensor._base is not None:
                    self._taint(tensor._base, False)

    def _note_test(
        self, function: Callable[..., Any], arguments: Sequence[Any], entry: _Open, result: torch.Tensor
    ) -> None:
        """Note a scalar that says whether any or all values of a tensor with rows are true."""
        source = entry.tainted[0]
        if self._is_tainted(source):
            if function in _ROW_TESTS or (function in _SUMS and source.dtype is torch.bool):
                self._tests[id(result)] = (weakref.ref(result), entry.place, source.numel())
        elif function in _EQUALS:  # `mask.sum() == mask.numel()` is `mask.all()`
            test = self._test(source)
            if test is not None and len(arguments) == 2 and arguments[1] == test[2]:
                self._tests[id(result)] = (weakref.ref(result), *test[1:])

    def _test(self, tensor: torch.Tensor) -> tuple[Any, int, int] | None:
        test = self._tests.get(id(tensor))
        if test is None or test[0]() is not tensor:
            return None
        return test

    def _judge_number(self, function: Callable[..., Any], entry: _Open) -> None:
        if not entry.tainted:
            return
        if function is torch.Tensor.__bool__:
            test = self._test(entry.arguments[0])
            if test is not None:
                self.row_tests.append(test[1])
                return
        if function is _ALIGNED and all(self._is_tainted(tensor) for tensor in entry.tainted):
            self.row_tests.append(entry.place)
            return
        self._refuse(f"turns values of rows into Python numbers ({_name(function)})")

    def _taint(self, tensor: torch.Tensor, by_rows: bool) -> None:
        # With one row every dimension is a multiple of it.
        has_rows = self._rows > 1 and tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self._rows == 0
        self._taints[id(tensor)] = (weakref.ref(tensor), by_rows and has_rows)

    def _is_tainted(self, tensor: torch.Tensor) -> bool | None:
        """Return `by_rows` of a tainted tensor or of the one whose view it is, and None for another tensor."""
        reference, by_rows = self._taints.get(id(tensor), (None, False))
        if reference is not None and reference() is tensor:
            return by_rows
        base = tensor._base
        if base is not None:
            reference, _ = self._taints.get(id(base), (None, False))
            if reference is not None and reference() is base:
                return False
        return None

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function)).strip("_")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _generators() -> tuple[Any, ...]:
    """Return the states of torch's generators, from which each operation may draw."""
    states: list[Any] = [torch.default_generator.get_state().numpy().tobytes()]
    module = accelerator_module()
    if module.is_initialized():
        states.extend(generator.get_offset() for generator in module.default_generators)
    return tuple(states)


# ----- survivors -----------------------------------------------------------------------------------------------------


def _survivors(module: nn.Module, leaves: Sequence[Any], recorder: _Recorder, uses_checkpointing: bool) -> str | None:
    """Return a reason if tensors that the call made are kept by other ways than its outputs."""
    known = {id(leaf) for leaf in leaves}
    known.update(id(tensor) for tensor in module.parameters())
    references = [reference for number, reference in recorder.made.items() if number not in known]
    if not _held(references):
        return None
    held_by_module: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, value in list(vars(part).items()):
            for tensor in _tensors_below(value):
                made = recorder.made.get(id(tensor))
                if made is None or made() is not tensor or id(tensor) in known:
                    continue
                if tensor.grad_fn is not None:
                    return f"keeps a tensor with a graph in {type(part).__name__} ({name})"
                held_by_module[id(tensor)] = tensor
    del part, value
    references = [reference for reference in references if id(reference()) not in held_by_module]
    if not _held(references) or uses_checkpointing:  # checkpoints keep inputs of their parts
        return None
    gc.collect()  # tensors in cycles of objects
    if all(_is_held_by_graph(reference) for reference in _held(references)):
        return None
    return "keeps a tensor of the call outside of the module"


def _tensors_below(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in an attribute of a module, in containers and attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    if isinstance(value, (torch.Tensor, nn.Module, *_ARGUMENTS)) or depth > _ATTRIBUTE_DEPTH:
        return
    items: list[Any] = []
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        items.extend(value)
    elif isinstance(value, Mapping):
        items.extend(value.values())
    items.extend(getattr(value, "__dict__", {}).values())
    for item in items:
        yield from _tensors_below(item, depth + 1)


def _held(references: Sequence[weakref.ref[torch.Tensor]]) -> list[weakref.ref[torch.Tensor]]:
    """Return the references to tensors that Python objects hold; a graph holds tensors without their Python objects."""
    probe = [torch.empty(0)]
    once = _holders(weakref.ref(probe[0]))
    return [reference for reference in references if reference() is not None and _holders(reference) >= once]


def _holders(reference: weakref.ref[torch.Tensor]) -> int:
    tensor = reference()
    if tensor is None:
        return 0
    # Private; more than one: C++ objects hold the tensor, which together count as one holder of the Python object.
    shared: bool = tensor._use_count() > 1  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) - int(shared)


def _is_held_by_graph(reference: weakref.ref[torch.Tensor]) -> bool:
    """Whether all objects that hold a tensor belong to the contexts of `autograd.Function`s."""
    level = [reference()]
    frame = sys._getframe()
    for _ in range(3):
        skipped = {id(level), id(frame)}
        level = [holder for holder in gc.get_referrers(*level) if id(holder) not in skipped]
        if any(isinstance(holder, BackwardCFunction) for holder in level):
            return True
    return False
