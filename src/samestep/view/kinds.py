"""Kinds of calls: the facts behind a verdict, and the knowledge about each kind.

A kind is identified by the structure of a module and of the arguments, not by objects or sizes, so
that a copy of a module, or a batch of another length, needs no new trial.

Switches of a forward belong to the kind: plain values on which a verdict depends, in attributes,
closures, globals and classes. A factor of zero hides the other factor, and the same operations join
samples or not along other dimensions. So bools, strings and whether numbers are zero count; `exact`
values are facts that modules share.
"""

from __future__ import annotations

import hashlib
import types
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from samestep.view.crossings import Sum
from samestep.view.operations import Operation
from samestep.view.reachable import Reachable, cells
from samestep.view.snapshot import Written
from samestep.view.trial_result import Division
from samestep.view.watched_graph import BackwardCode

_MOST_KINDS = 64  # of the calls of a module; each costs memory, a watched call and a trial
_MOST_SWITCHES = 8  # of one type, among the arguments of a call
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "float", "half", "bfloat16", "double", "type", "type_as")
)
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)
_PLAIN = (bool, str, type(None))
_NUMBERS = (int, float)
_SETTINGS = (*_PLAIN, *_NUMBERS, tuple, list, dict)
_CODE = (types.FunctionType, types.MethodType, partial)
_SWITCHES = (*_SETTINGS, *_CODE)
_ITEMS = 64  # of a container; larger ones are data
_DEPTH = 4
_LARGEST_DIMENSION = 3
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)


@dataclass
class Kind:
    """Knowledge about the calls of one kind.

    Attributes:
        reason: why calls of this kind are computed whole; None while that is not decided, or if
            they are divided.
        is_watched: whether a first call was computed whole and watched, without a reason for whole.
        watched_reason: act of the watched call that cannot be divided.
        division: result of the trial.
        known: division of each list of operations that was watched, tried and divided.
        refused: under `exact`, why calls with a list of operations are computed whole.
        last: operations of the watched call.
        outputs: structure of its outputs.
        uses_checkpointing: whether parts are computed again in the backward.
        is_compiled: whether torch.compile replaces the forward of parts.
        written: places that watched calls have changed, to be restored before a call is computed
            again.
        exchanges: sums inside of a divided call; None before the first one.
        gradient_bytes: size of the gradients of the parameters.
        output_bytes_per_row: size of the outputs, per row of the batch.
        backward_code: code of the script that its backward runs; None after the trial.
        surprises: divided calls that had to be computed whole.
    """

    reason: str | None = None
    is_watched: bool = False
    watched_reason: str | None = None
    division: Division | None = None
    known: dict[tuple[Operation, ...], Division] = field(default_factory=dict)
    refused: dict[tuple[Operation, ...], str] = field(default_factory=dict)
    last: tuple[Operation, ...] = ()
    outputs: TreeSpec | None = None
    uses_checkpointing: bool = False
    is_compiled: bool = False
    written: Written = frozenset()
    exchanges: tuple[Sum, ...] | None = None
    gradient_bytes: int = 0
    output_bytes_per_row: float = 0.0
    backward_code: BackwardCode | None = None
    surprises: int = 0

    def divides(self, operations: tuple[Operation, ...]) -> bool:
        """Whether `division` is that of a list of operations."""
        if self.division is None:
            return False
        tried = self.division.operations
        if operations == tried or self.known.get(operations) == self.division:
            return True
        # A trial computes in one precision, and without checkpoints, which have operations of their
        # own.
        functions, tried_functions = (
            [one for one in every if not isinstance(one, str | bool) and one not in _CONVERSIONS]
            for every in (operations, tried)
        )
        is_alike = self.uses_checkpointing or functions == tried_functions
        return is_alike and operations == self.last


class KindsOfModule:
    """Kinds of the calls of one module.

    Args:
        known: kinds of all modules of the process, by their facts.
        device: type of the device.
        batch_norm: statistics of the whole batch, or of the own rows.
    """

    def __init__(self, known: dict[Hashable, Kind], device: str, batch_norm: str) -> None:
        self._known = known
        self._device = device
        self._batch_norm = batch_norm
        self._part_ids: list[int] = []
        self._structure: Hashable = None
        self._outside = Outside(())
        self._added = 0

    def kind(
        self, parts: Sequence[nn.Module], leaves: Sequence[Any], spec: TreeSpec, rows: int
    ) -> Kind:
        """Return the kind of a call.

        Args:
            parts: `submodules` of the module.
            leaves: leaves of the arguments.
            spec: their structure.
            rows: rows of the batch.
        """
        ids = [id(part) for part in parts]
        # By identity: a script may replace a submodule by one with the same structure.
        if ids != self._part_ids:
            self._part_ids = ids
            self._structure = _structure_key(parts)
            self._outside = Outside(parts)
        key = (
            *(self._structure, module_key(parts), self._outside.key()),
            *(arguments_key(leaves, rows), spec, self._batch_norm),
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            torch.get_default_dtype(),
        )
        kind = self._known.get(key)
        if kind is None:
            kind = Kind()
            self._added += 1
            if self._added > _MOST_KINDS:
                kind.reason = f"has arguments or modes of more than {_MOST_KINDS} kinds"
                # Not stored: a kind takes memory, and a script can have any number of them.
                return kind
            self._known[key] = kind
        return kind

    def settings(self) -> list[tuple[str, Any]]:
        """Return plain values that the code of the forward names: of the module, and outside."""
        return self._outside.settings()


def submodules(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules below it, each once, in the order of a breadth-first walk."""
    # Faster than `modules()`, which is a recursion of generators; this runs in every call.
    collected = [module]
    seen = {id(module)}
    for part in collected:
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                collected.append(child)
    return collected


def has_compiled_parts(parts: Sequence[nn.Module]) -> bool:
    """Whether torch.compile replaces the forward of a submodule."""
    # By name: importing the class would import the compiler.
    return any(
        part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"
        for part in parts
    )


def module_key(parts: Sequence[nn.Module]) -> Hashable:
    """Return facts of a module behind a verdict: types, modes, hooks, switches of own classes.

    Args:
        parts: `submodules` of the module.
    """
    key: list[Any] = []
    seen: set[int] = set()
    for part in parts:
        # The class that `samestep.parallel` made is the module's own.
        kind = getattr(type(part), "_samestep_base", type(part))
        key += [kind, part.training]
        for name in _HOOKS:
            hooks = getattr(part, name)
            if hooks:
                key.append(tuple(code_of(hook) for hook in hooks.values()))
        for parameter in part._parameters.values():
            if parameter is not None:
                key.append(parameter.requires_grad)
        # Of torch's modules, only losses have switches that a script changes between calls.
        if not kind.__module__.startswith("torch.") or issubclass(kind, nn.modules.loss._Loss):
            _add_switches(part, key, seen)
        elif issubclass(kind, nn.modules.dropout._DropoutNd):
            key.append(part.__dict__["p"] == 0)  # then it draws no numbers
    return tuple(key)


def _structure_key(parts: Sequence[nn.Module]) -> Hashable:
    """Return the facts that modules with one verdict share: plain attributes, and shapes."""
    key: list[Any] = []
    seen: set[int] = set()
    for part in parts:
        _add_switches(part, key, seen, exact=True)
        for parameter in part._parameters.values():
            if parameter is not None and not nn.parameter.is_lazy(parameter):
                key.append(parameter.shape)
    return tuple(key)


def _add_switches(part: nn.Module, key: list[Any], seen: set[int], *, exact: bool = False) -> None:
    """Add the switches of a module's attributes, and of objects in them that are not in `seen`."""
    for name, value in part.__dict__.items():
        if name in _TORCH_ATTRIBUTES:
            continue
        kind = type(value)
        if kind in _PLAIN:
            key.append((name, value))
        elif kind in _SWITCHES:
            key.append((name, switch(value, exact=exact)))
        elif _has_settings(value) and id(value) not in seen:  # once, also if all submodules have it
            seen.add(id(value))
            key.append((name, _switches_of(vars(value), exact=exact)))


def arguments_key(leaves: Sequence[Any], rows: int) -> Hashable:
    """Return the facts behind a verdict in the leaves of the arguments of a call."""
    key: list[Any] = []
    counts = Counter(type(leaf) for leaf in leaves)
    # Many numbers or strings are values of rows, such as lengths and names, and not switches.
    have_values = [kind for kind in (int, float, str) if counts[kind] > _MOST_SWITCHES]
    for leaf in leaves:
        kind = type(leaf)
        if isinstance(leaf, torch.Tensor):
            key.append(
                (leaf.dim(), leaf.dtype, leaf.requires_grad, has_rows(leaf, rows), leaf.is_cuda)
            )
        elif kind in _SWITCHES and kind not in have_values:
            key.append((kind, switch(leaf)))
        else:
            key.append(kind)
    return tuple(key)


def has_rows(leaf: Any, rows: int) -> bool:
    """Whether the first dimension of a leaf is the batch."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def operations_hash(functions: Sequence[Operation]) -> int:
    """Return a number below 2**62 for a list of operations, equal in all processes."""
    # By name: identities of functions differ between processes.
    return _hash(",".join(getattr(one, "__name__", None) or repr(one) for one in functions))


def numbers_hash(numbers: Sequence[Any]) -> int:
    """Return a number below 2**62 for values that left tensors, equal in all processes."""
    if numbers:
        return _hash(repr(numbers))
    return 0


def _hash(text: str) -> int:
    # Words are signed, and -1 has a meaning (`_UNEQUAL` of divided.py).
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


# --- switches -------------------------------------------------------------------------------------


def switch(value: Any, *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the facts of a value behind a verdict; None for objects that are not plain or code.

    Args:
        value: any value.
        exact: numbers count as they are, otherwise only zero and those that can be dimensions.
        depth: number of containers around the value.
    """
    kind = type(value)
    collected: Hashable = None
    if kind in _PLAIN:
        collected = value
    elif kind in _NUMBERS:
        collected = kind.__name__
        # A factor that hides a term, or a dimension.
        if exact or value == 0 or (kind is int and abs(value) <= _LARGEST_DIMENSION):
            collected = value
    elif depth > _DEPTH:
        collected = None
    elif kind in _CODE:
        collected = code_of(value, exact=exact, depth=depth + 1)
    elif kind is tuple and len(value) <= _ITEMS:
        collected = tuple(switch(item, exact=exact, depth=depth + 1) for item in value)
    elif kind is list and len(value) <= _ITEMS:  # lists of numbers may grow with the steps
        counted = (bool, str, int) if exact else (bool, str)
        collected = tuple(switch(item, exact=exact) for item in value if type(item) in counted)
    elif isinstance(value, dict) and len(value) <= _ITEMS:
        collected = _switches_of(value, exact=exact, depth=depth)
    return collected


def _switches_of(values: Mapping[str, Any], *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the switches among named values, such as attributes of an object."""
    pairs = [(name, value) for name, value in values.items() if type(name) is str]
    collected = [(name, switch(value, exact=exact, depth=depth + 1)) for name, value in pairs]
    return tuple(pair for pair in collected if pair[1] is not None)


def code_of(function: Any, *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the code of a function, with switches in its closure, defaults and arguments."""
    if isinstance(function, partial):
        values = (*function.args, *function.keywords.items())
        inner = code_of(function.func, exact=exact, depth=depth + 1)
        return (inner, *[switch(value, exact=exact, depth=depth) for value in values])
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        # Builtins, and objects that can be called, have no code of their own.
        return type(function).__qualname__
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    values = (*values, *(cell.cell_contents for _, cell in cells(function)))
    return (function.__code__, *[switch(value, exact=exact, depth=depth + 1) for value in values])


def _has_settings(value: Any) -> bool:
    """Whether a value is an object with attributes that may be switches."""
    if isinstance(value, _NO_SETTINGS):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


class Outside:
    """Switches outside of a module that the code of its forward names, in globals and classes.

    Args:
        parts: `submodules` of the module.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._variables: list[tuple[Mapping[str, Any], str]] = []
        self._attributes: list[tuple[Mapping[str, Any], str]] = []
        if not parts:
            return
        hooks = [hook for name in _HOOKS for hook in getattr(parts[0], name).values()]
        reachable = Reachable(parts[0], hooks)
        self._names = reachable.names
        for _, _, namespace, name in reachable.variables():
            value = namespace.get(name)
            if not name.startswith("__") and (type(value) in _SETTINGS or _has_settings(value)):
                self._variables.append((namespace, name))
        for part in parts:
            names = self._names & vars(part).keys() - _TORCH_ATTRIBUTES
            self._attributes += [(vars(part), name) for name in sorted(names)]

    def settings(self) -> list[tuple[str, Any]]:
        """Return the plain values that the code names, with their names."""
        collected: list[tuple[str, Any]] = []
        for namespace, name in (*self._attributes, *self._variables):
            self._add_settings(name, namespace.get(name), collected)
        return collected

    def _add_settings(
        self, name: str, value: Any, collected: list[tuple[str, Any]], depth: int = 0
    ) -> None:
        kind = type(value)
        items: Iterable[tuple[Any, Any]] = ()
        if kind in _NUMBERS or kind in _PLAIN:
            collected.append((name, value))
        elif kind in (list, tuple) and len(value) <= _ITEMS:
            items = enumerate(value)
        elif isinstance(value, dict) and len(value) <= _ITEMS:
            items = value.items()
        elif _has_settings(value):
            items = [pair for pair in vars(value).items() if pair[0] in self._names]
        if depth < _DEPTH:
            for key, item in items:
                self._add_settings(f"{name}.{key}", item, collected, depth + 1)

    def key(self) -> Hashable:
        """Return the present switches."""
        key: list[Hashable] = []
        for namespace, name in self._variables:
            value = namespace.get(name)
            if _has_settings(value):
                named = [one for attribute, one in vars(value).items() if attribute in self._names]
                key.append(tuple(switch(one) for one in named))
            else:
                key.append(switch(value))
        return tuple(key)
