"""Kinds of calls: the facts behind a verdict, and the knowledge about each kind.

A kind is identified by the structure of a module and of the arguments, not by objects or sizes, so
that a copy of a module, or a batch of another length, needs no new trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from samestep.view.division import Division
from samestep.view.exchange import Sum
from samestep.view.graph import BackwardCode
from samestep.view.operations import Operation
from samestep.view.snapshot import Written
from samestep.view.switches import (
    HOOKS,
    PLAIN,
    SWITCHES,
    Outside,
    code_of,
    has_settings,
    switch,
    switches_of,
)

_MOST_KINDS = 64  # of the calls of a module; each costs memory, a watched call and a trial
_MOST_SWITCHES = 8  # of one type, among the arguments of a call
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "float", "half", "bfloat16", "double", "type", "type_as")
)
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)


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
        is_alike = self.uses_checkpointing or _but_conversions(tried) == _but_conversions(
            operations
        )
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
        if ids != self._part_ids:
            self._part_ids = ids
            self._structure = structure_key(parts)
            self._outside = Outside(parts)
        key = (
            self._structure,
            module_key(parts),
            self._outside.key(),
            arguments_key(leaves, rows),
            spec,
            mode_key(self._device),
            self._batch_norm,
        )
        kind = self._known.get(key)
        if kind is None:
            kind = Kind()
            self._added += 1
            if self._added > _MOST_KINDS:
                kind.reason = f"has arguments or modes of more than {_MOST_KINDS} kinds"
                return kind
            self._known[key] = kind
        return kind


def _but_conversions(operations: Sequence[Operation]) -> list[Operation]:
    """Return functions without conversions of precision, which a trial may leave out or add."""
    return [
        one for one in operations if not isinstance(one, str | bool) and one not in _CONVERSIONS
    ]


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
    """Return the facts of a module behind a verdict: types, modes, hooks, switches of the user's classes.

    Args:
        parts: `submodules` of the module.
    """
    key: list[Any] = []
    seen: set[int] = set()
    for part in parts:
        kind = type(part)
        kind = getattr(
            kind, "_samestep_base", kind
        )  # the class that `samestep.parallel` made is the module's own
        key.append(kind)
        key.append(part.training)
        for name in HOOKS:
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


def structure_key(parts: Sequence[nn.Module]) -> Hashable:
    """Return the facts that modules with one verdict share: plain attributes and shapes of parameters."""
    key: list[Any] = []
    seen: set[int] = set()
    for part in parts:
        _add_switches(part, key, seen, exact=True)
        for parameter in part._parameters.values():
            if parameter is not None and not nn.parameter.is_lazy(parameter):
                key.append(parameter.shape)
    return tuple(key)


def _add_switches(part: nn.Module, key: list[Any], seen: set[int], *, exact: bool = False) -> None:
    """Add the switches among the attributes of a module, and of objects in them that are not in `seen`."""
    for name, value in part.__dict__.items():
        if name in _TORCH_ATTRIBUTES:
            continue
        kind = type(value)
        if kind in PLAIN:
            key.append((name, value))
        elif kind in SWITCHES:
            key.append((name, switch(value, exact=exact)))
        elif has_settings(value) and id(value) not in seen:  # once, also if all submodules have it
            seen.add(id(value))
            key.append((name, switches_of(vars(value), exact=exact)))


def arguments_key(leaves: Sequence[Any], rows: int) -> Hashable:
    """Return the facts behind a verdict in the leaves of the arguments of a call.

    Many numbers or strings are values of rows, such as lengths and names, and not switches: only
    their types count.
    """
    key: list[Any] = []
    have_values = [
        kind
        for kind in (int, float, str)
        if sum(type(leaf) is kind for leaf in leaves) > _MOST_SWITCHES
    ]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            key.append(
                (leaf.dim(), leaf.dtype, leaf.requires_grad, has_rows(leaf, rows), leaf.is_cuda)
            )
        elif type(leaf) in have_values:
            key.append(type(leaf))
        elif type(leaf) in SWITCHES:
            key.append((type(leaf), switch(leaf)))
        else:
            key.append(type(leaf))
    return tuple(key)


def has_rows(leaf: Any, rows: int) -> bool:
    """Whether the first dimension of a leaf is the batch."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def mode_key(device: str) -> Hashable:
    """Return the facts behind a verdict outside of modules and arguments."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
    )


def operations_hash(functions: Sequence[Operation]) -> int:
    """Return a number below 2**62 for a list of operations, equal in all processes."""
    return _hash(
        ",".join(getattr(function, "__name__", None) or repr(function) for function in functions)
    )


def numbers_hash(numbers: Sequence[Any]) -> int:
    """Return a number below 2**62 for values that left tensors, equal in all processes."""
    if numbers:
        return _hash(repr(numbers))
    return 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
