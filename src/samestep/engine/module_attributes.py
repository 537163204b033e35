"""Attributes of modules that a forward changes: each microbatch starts with one value, and all ranks get one value.

Numbers and tensors in attributes are state like buffers, such as a counter or the state of a recurrent model. For other
side effects of a forward, see `side_effects`; for buffers, `buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from samestep.distributed.logging import logger
from samestep.distributed.world import World, all_gather
from samestep.engine.tensor_bits import bytes_of, version_of
from samestep.units import format_bytes

_LARGE_BYTES = 2**20
_MISSING = object()  # the attribute does not exist


class ModuleAttributes:
    """Tensors in attributes of a model's modules that the forward of a microbatch changes.

    Each microbatch starts with the attributes at the beginning of the step; the step ends with those of the last
    microbatch, on every rank. Tensors with a graph are left alone: those are activations, and the backward of a later
    step cannot use them. After the first step, only attributes that have changed are copied. The others, of modules
    that are not torch's, are watched, numbers too: one that changes later is handled from then on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names: list[str] | None = None  # of those that change; unknown before the first step
        self._watched: list[str] = []
        self._tables: dict[str, dict[str, Any]] = {}  # attributes of each module by path
        self._before: dict[str, Any] = {}
        self._values: dict[str, torch.Tensor] = {}  # copies of the tensors before the step
        self._versions: dict[str, int] = {}
        self._changed: set[str] = set()
        self._ends: dict[str, Any] = {}
        self._large: set[str] = set()  # with a warning

    @property
    def are_changed_by_forward(self) -> bool:
        """Whether a step has changed attributes."""
        return bool(self._names)

    @property
    def has_changed_late(self) -> bool:
        """Whether an attribute that earlier steps left unchanged has changed on this rank."""
        return self._names is not None and not self._changed.issubset(self._names)

    def begin(self) -> None:
        """Record the attributes at the beginning of a step."""
        if self._names is None:
            self._tables = {path: module.__dict__ for path, module in self._model.named_modules()}
            self._before = {
                f"{path}.{key}": value
                for path, table in self._tables.items()
                for key, value in table.items()
                if value is None or isinstance(value, torch.Tensor) or is_number(value)
            }
        else:
            self._before = dict(self._read(self._tables, [*self._names, *self._watched]))
        names = set(self._before if self._names is None else self._names)
        tensors = {name: value for name, value in self._before.items() if _is_plain_tensor(value)}
        self._values = {name: value.clone() for name, value in tensors.items() if name in names}
        self._versions = {name: version_of(value) for name, value in tensors.items()}
        self._changed, self._ends = set(), {}

    def restore(self) -> None:
        """Set the attributes to those at the beginning of the step."""
        names = self._changed.union(self._names or ())
        self._put({name: self._before.get(name, _MISSING) for name in names})
        for name, values in self._values.items():
            if version_of(self._before[name]) != self._versions[name]:
                with torch.no_grad():
                    self._before[name].copy_(values)
                self._versions[name] = version_of(self._before[name])

    def read(self, module: torch.nn.Module | None, *, is_last: bool) -> Iterator[str]:
        """Record the attributes after the forward of a microbatch.

        Args:
            module: the replica of the model that computed it; None for the model itself.
            is_last: it is the last microbatch of the global batch.

        Yields:
            problems: tensors that were written in place, and cannot be restored for other microbatches: by a replica,
            because all replicas have them, or for the first time after the first step.
        """
        tables = self._tables if module is None else {p: child.__dict__ for p, child in module.named_modules()}
        if self._names is None:
            keys = (
                f"{path}.{key}" for path, table in tables.items() for key, v in table.items() if _is_plain_tensor(v)
            )
            now = dict(self._read(tables, {**self._before, **dict.fromkeys(keys)}))
            self._changed |= {name for name in {**self._values, **now} if self._is_changed(name, now.get(name))}
        else:
            now = dict(self._read(tables, [*self._names, *self._watched]))
            self._changed |= {name for name in self._watched if self._is_late(name, now.get(name, _MISSING))}
        if is_last:
            names = self._changed.union(self._names or ())
            self._ends = {name: self._end(name, now.get(name, _MISSING)) for name in names}
        for name, version in self._versions.items():
            is_copied = module is None and name in self._values
            if not is_copied and version_of(self._before[name]) != version:
                yield f"attribute {name.lstrip('.')} in place"

    def combine(self, world: World, handled: Iterable[str], *, may_grow: bool) -> None:
        """Receive the attributes at the end of the step from the rank of the last microbatch; a collective.

        Args:
            world: the ranks.
            handled: names of numbers that have their own rule.
            may_grow: an attribute may have changed for the first time, on some rank.
        """
        if self._names is None or may_grow:
            self._select(world, handled)
        if self._names and world.size > 1:
            self._ends = self._exchange(self._names, world)

    def _select(self, world: World, handled: Iterable[str]) -> None:
        """Add the attributes that have changed on some rank, and select those to watch; a collective."""
        is_first = self._names is None
        self._names = sorted(set(self._names or ()).union(*all_gather(sorted(self._changed), world)))
        if is_first:
            own = {path for path, module in self._model.named_modules() if not is_of_torch(module)}
            known = {*self._names, *(name if "." in name else f".{name}" for name in handled)}
            names = [name for name in self._before if name not in known and name.rpartition(".")[0] in own]
            names = [name for name in names if not name.endswith(".training")]
            # Without those that every forward computes anew, with equal values.
            self._watched = [name for name in names if not self._is_late(name, self._value(name))]
        self._watched = [name for name in self._watched if name not in self._names]

    def _exchange(self, names: Sequence[str], world: World) -> dict[str, Any]:
        """Return the attributes of the last rank at the end of the step; a collective."""
        is_source, ends = world.rank == world.size - 1, dict[str, Any]()
        values = {name: self._ends.get(name, self._value(name)) for name in names} if is_source else {}
        descriptions = all_gather([_description(value) for value in values.values()], world)[-1]
        for name, (kind, value, shape) in zip(names, descriptions, strict=True):
            if kind == "tensor":
                ends[name] = _received(values.get(name), value, shape, world)
                self._warn_of_size(name, ends[name], world)
            elif kind == "value":
                ends[name] = value
        return ends

    def _warn_of_size(self, name: str, tensor: torch.Tensor, world: World) -> None:
        if tensor.nbytes > _LARGE_BYTES and name not in self._large:
            self._large.add(name)
            if world.is_main:
                logger.warning(
                    "the attribute %s (%s) is sent to all ranks after every step, because the forward changes it; "
                    "activations that no later step uses belong in a list",
                    name.lstrip("."),
                    format_bytes(tensor.nbytes),
                )

    def commit(self) -> None:
        """Set the attributes to those at the end of the step."""
        self._put({name: value for name, value in self._ends.items() if _is_state(value)})

    def _read(self, tables: dict[str, dict[str, Any]], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            path, _, key = name.rpartition(".")
            if path in tables and key in tables[path]:
                yield name, tables[path][key]

    def _value(self, name: str) -> Any:
        return dict(self._read(self._tables, [name])).get(name, _MISSING)

    def _is_changed(self, name: str, value: Any) -> bool:
        before = self._values.get(name)
        if not _is_plain_tensor(value):  # deleted, no tensor any longer, or an activation
            return before is not None and value is None
        return before is None or before.dtype != value.dtype or not torch.equal(before, value.to(before.device))

    def _is_late(self, name: str, value: Any) -> bool:
        before = self._before.get(name, _MISSING)
        if value is before or not _is_state(value):
            return False
        return not (is_number(value) and type(value) is type(before) and value == before)

    def _end(self, name: str, value: Any) -> Any:
        # A copy of a tensor that was written in place: `restore` writes the tensor again.
        is_written = value is self._before.get(name)
        return value.clone() if is_written and _is_plain_tensor(value) else value

    def _put(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            path, _, key = name.rpartition(".")
            if value is _MISSING:
                self._tables[path].pop(key, None)
            else:
                self._tables[path][key] = value


class AttributeCopies:
    """Numbers and tensors in attributes of a model's modules, with which each microbatch of an evaluation starts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
        tensors = [value for _, before in self._tables for value in before.values() if _is_plain_tensor(value)]
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in tensors]

    def restore(self) -> None:
        """Set attributes that have changed to their values at the beginning; delete those that are new.

        Activations with a graph are left alone.
        """
        for table, before in self._tables:
            for key in [key for key, value in table.items() if value is not before.get(key, _MISSING)]:
                if key == "training" or not _is_state(table[key]):
                    continue
                if key not in before:
                    del table[key]
                elif _is_state(before[key]):
                    table[key] = before[key]
        for number, (tensor, values) in enumerate(self._tensors):
            if version_of(tensor) != self._versions[number]:
                tensor.copy_(values)
                self._versions[number] = version_of(tensor)


def _is_plain_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor that a later step can use: without a graph, and no subclass."""
    return type(value) is torch.Tensor and not value.requires_grad and value.layout == torch.strided


def is_number(value: Any) -> bool:
    """Return whether a value is a number or a boolean of Python."""
    return type(value) in (bool, int, float)


def _is_plain(value: Any) -> bool:
    return value is None or is_number(value)


def is_of_torch(module: torch.nn.Module) -> bool:
    """Return whether a module is one of torch's own."""
    return type(module).__module__.startswith("torch.")


def _is_state(value: Any) -> bool:
    return _is_plain(value) or _is_plain_tensor(value)


def _description(value: Any) -> tuple[str, Any, list[int]]:
    """Return a value of the last rank as kind, value or type, and shape; `own` for one that stays on each rank."""
    if _is_plain_tensor(value):
        return "tensor", str(value.dtype).removeprefix("torch."), list(value.shape)
    return ("value", value, []) if _is_plain(value) else ("own", None, [])


def _received(value: torch.Tensor | None, name: str, shape: list[int], world: World) -> torch.Tensor:
    """Return the tensor of the last rank, which passes it as `value`."""
    dtype: torch.dtype = getattr(torch, name)
    if value is None:
        value = torch.empty(shape, dtype=dtype, device=world.device)
    if value.numel() == 0:
        return value
    data = bytes_of(value).to(world.device, copy=True)
    world.broadcast(data, world.size - 1)
    return data.view(dtype).view(shape)
