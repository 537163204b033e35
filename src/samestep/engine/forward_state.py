"""State that a forward changes: buffers, declared parameters, and numbers in attributes of modules.

Each microbatch starts with the state at the beginning of the step. The step ends with one value, by the rule of each
buffer, which depends on its type and on `Engine(buffers=...)`:

- `mean`, for floating-point and complex buffers: the mean over microbatches, in canonical order. For batch norm this
  equals the result of one device per microbatch without SyncBN, on any number of processes.
- `equal`, for integer and bool buffers: the value with which every microbatch ended; an error if they differ.
- `last`, by choice, and for numbers in attributes: the value of the last microbatch of the global batch.
- `sum`, by choice: the value at the beginning plus the sum of the changes by all microbatches.

State that no microbatch changed keeps its bits and is not communicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch

from samestep.config.validation import match_patterns
from samestep.distributed.world import World, all_gather
from samestep.engine.buffers import ParameterCheck, bits_of, bytes_of, copy_tensors, flat, hash_of, listed, size_of
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import Strategy

Rule = Literal["mean", "equal", "last", "sum"]
Kind = Literal["_buffers", "_parameters", "__dict__"]
_MODULE_ATTRIBUTES = ("training", "call_super_init", "dump_patches")
_INEXACT = (torch.float64, torch.complex128)  # the mean of equal values can be rounded


@dataclass(frozen=True, eq=False)
class _Place:
    """Place of a value among the buffers, parameters or attributes of a module."""

    module: torch.nn.Module
    path: str
    key: str
    kind: Kind
    rule: Rule
    is_persistent: bool = True

    def table(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        table: dict[str, Any] = getattr(module or self.module, self.kind)
        return table

    def value(self, module: torch.nn.Module | None = None) -> Any:
        """Return the value in this module, or in a replica of it."""
        value = self.table(module).get(self.key)
        return value.data if self.kind == "_parameters" and value is not None else value

    def put(self, value: Any) -> None:
        if self.kind == "_parameters":
            self.table()[self.key].data = value
        elif self.table().get(self.key) is not value:
            self.table()[self.key] = value


class ForwardState:
    """State of a model that the forward of a microbatch changes; see the module's documentation.

    Args:
        model: the model.
        rules: rules of buffers and of frozen parameters by shell patterns of their names; later patterns win.
        is_whole: parameters are not divided among ranks, so writes to them can be detected.

    Raises:
        InputError: a rule is unknown or does not fit the type of a buffer, or a pattern matches nothing.
    """

    def __init__(
        self, model: torch.nn.Module, rules: Mapping[str, Rule] | None = None, *, is_whole: bool = True
    ) -> None:
        self._model, self._rules, self._is_whole = model, rules or {}, is_whole
        self._modules = list(model.modules())
        self._active: list[str] = []  # names of state that some step has changed
        self._is_first = True
        self._places: dict[str, _Place] = {}
        self._locate()
        self.declared_parameters = [name for name, place in self._places.items() if place.kind == "_parameters"]
        self.parameters = ParameterCheck(model if is_whole else None, self.declared_parameters)

    @property
    def length(self) -> int:
        """Number of elements of the vector of a microbatch."""
        return self._encoded_length(self._active) + len(self._flagged) + 1

    def begin(self, microbatches: int) -> None:
        """Copy the state at the beginning of a step of `microbatches` microbatches."""
        if self._buffer_count(self._modules) != self._count:
            self._locate()
        if self._is_first:
            self._add_attributes(lambda key: True)
        self.parameters.begin(digests=self._is_first)
        self._microbatches = microbatches
        self._objects = {name: place.value() for name, place in self._places.items()}
        self._start = {n: tensor.clone() for n, v in self._objects.items() if (tensor := _tensor(v)) is not None}
        self._active = [name for name in self._active if name in self._start]
        self._compared = [n for n, start in self._start.items() if n not in self._active or start.dtype in _INEXACT]
        self._flagged = [name for name in self._compared if self._places[name].kind != "__dict__"]
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # values that each microbatch changed
        self._results: dict[str, torch.Tensor] = {}
        self._problems: set[str] = set()
        self._changed_attributes: set[str] = set()
        self._dirty: set[str] | None = None  # None: any state may have changed

    def restore(self) -> None:
        """Set the state to that at the beginning of the step."""
        self._put({})
        self._dirty = None

    def read(self, number: int, module: torch.nn.Module | None = None) -> torch.Tensor:
        """Return the contribution of a microbatch after its forward, as a float64 vector of `length` elements.

        Args:
            number: the microbatch.
            module: the replica of the model that computed it; None for the model itself.
        """
        values, unusable = self._read(module)
        changed = self._differing(values, [name for name in self._compared if name not in unusable])
        self._dirty = {*changed, *unusable}
        self._changed_attributes |= {name for name in changed if self._places[name].kind == "__dict__"}
        self._problems |= {f"parameter {name}" for name in self.parameters.written(module)}
        is_last = number == self._microbatches - 1
        kept = [
            name for name in self._active if self._rule(name) == "equal" or (is_last and self._rule(name) == "last")
        ]
        self._kept[number] = {name: values[name].clone() for name in chain(kept, changed)}
        flags = [float(name in changed) for name in self._flagged]
        tail = torch.tensor([*flags, float(bool(self._problems))], dtype=torch.float64)
        head = self._encode(number, values, self._active)
        return torch.cat([head, tail.to(head.device)])

    def combine(self, total: torch.Tensor, tree: MicrobatchTree, strategy: Strategy, world: World) -> None:
        """Compute the state at the end of the step from the sum of the vectors of all microbatches; a collective.

        Raises:
            InputError: the forward changed state for which there is no rule, or microbatches differ.
        """
        head, flags = total.split([self._encoded_length(self._active), len(self._flagged) + 1])
        *is_changed, has_problem = (flag > 0 for flag in flags.tolist())
        if has_problem:
            self._raise_problems(world)
        changed = {name for name, flag in zip(self._flagged, is_changed, strict=True) if flag}
        if self._is_first:
            self._is_first = False
            changed.update(*all_gather(sorted(self._changed_attributes), world))
            self._keep_attributes(changed)
        results = self._decode(self._active, head, tree, world)
        results = {name: value for name, value in results.items() if name not in self._flagged or name in changed}
        new = [name for name in self._places if name in changed and name not in self._active]
        if new:
            vectors = {n: self._encode(n, {**self._start, **kept}, new) for n, kept in self._kept.items()}
            second = strategy.sum_vectors(tree, vectors, self._encoded_length(new)).wait()
            self._active += new
            results |= self._decode(new, second, tree, world)
        self._results = results | self._received(tree, world)

    def commit(self) -> None:
        """Set the state to that at the end of the step."""
        self._put(self._results)

    def _locate(self) -> None:
        """Find all buffers, the frozen parameters with a rule, and the attributes that are known to change."""
        active_attributes = {name for name in self._active if self._places[name].kind == "__dict__"}
        tensors: dict[str, tuple[torch.nn.Module, str, str, Kind, torch.Tensor]] = {}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    tensors[prefix + key] = (module, path, key, "_buffers", buffer)
            for key, parameter in module._parameters.items() if self._is_whole and self._rules else ():
                if parameter is not None and not parameter.requires_grad:
                    tensors[prefix + key] = (module, path, key, "_parameters", parameter)
        rules = _rules_of({name: entry[-1] for name, entry in tensors.items()}, self._rules)
        self._places = {}
        for name, (module, path, key, kind, tensor) in tensors.items():
            default: Rule = "mean" if tensor.is_floating_point() or tensor.is_complex() else "equal"
            if kind == "_buffers" or name in rules:
                is_persistent = key not in module._non_persistent_buffers_set
                self._places[name] = _Place(module, path, key, kind, rules.get(name, default), is_persistent)
        self._add_attributes(active_attributes.__contains__)
        self._count = self._buffer_count(self._modules)

    def _add_attributes(self, is_selected: Callable[[str], bool]) -> None:
        for path, module in self._model.named_modules():
            for key, value in vars(module).items():
                name = f"{path}.{key}" if path else key
                if (
                    _is_number(value)
                    and key not in _MODULE_ATTRIBUTES
                    and name not in self._places
                    and is_selected(name)
                ):
                    self._places[name] = _Place(module, path, key, "__dict__", "last")

    def _keep_attributes(self, changed: Iterable[str]) -> None:
        """Forget the attributes that the first step did not change."""
        names = set(changed)
        self._places = {n: place for n, place in self._places.items() if place.kind != "__dict__" or n in names}

    @staticmethod
    def _buffer_count(modules: Iterable[torch.nn.Module]) -> int:
        return sum(buffer is not None for module in modules for buffer in module._buffers.values())

    def _rule(self, name: str) -> Rule:
        return self._places[name].rule

    def _read(self, module: torch.nn.Module | None) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return the present values, and the names of those that have another shape or type than at the beginning.

        Such a buffer is a cache if it is not persistent, and keeps its value at the beginning; otherwise a problem.
        """
        modules = None if module is None else dict(module.named_modules())
        values, unusable = {}, set()
        for name, start in self._start.items():
            place = self._places[name]
            tensor = _tensor(place.value(None if modules is None else modules[place.path]))
            if tensor is None or tensor.shape != start.shape or tensor.dtype != start.dtype:
                if place.kind != "__dict__":  # an attribute that is no number any longer belongs to the model
                    unusable.add(name)
                if place.kind != "__dict__" and place.is_persistent:
                    self._problems.add(f"buffer {name} of another shape or type")
                tensor = start
            values[name] = tensor.to(start.device)
        self._note_new_buffers(self._modules if modules is None else list(modules.values()), module)
        return values, unusable

    def _note_new_buffers(self, modules: Sequence[torch.nn.Module], replica: torch.nn.Module | None) -> None:
        """Note buffers that the forward registered, and remove those that are caches, which are not persistent."""
        if self._buffer_count(modules) == self._count:
            return
        for path, module in (replica or self._model).named_modules():
            for key in [key for key, buffer in module._buffers.items() if buffer is not None]:
                name = f"{path}.{key}" if path else key
                if name in self._places:
                    continue
                if key in module._non_persistent_buffers_set:
                    del module._buffers[key]
                else:
                    self._problems.add(f"buffer {name}, which it registered")

    def _differing(self, values: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[str]:
        """Return the names of values whose bits differ from those at the beginning of the step."""
        flags = [(bits_of(values[name]) != bits_of(self._start[name])).any() for name in names]
        if not flags:
            return []
        device = flags[0].device
        differ = torch.stack([flag.to(device) for flag in flags]).tolist()  # one synchronization with a GPU
        return [name for name, differs in zip(names, differ, strict=True) if differs]

    def _encoded_length(self, names: Sequence[str]) -> int:
        sizes = [size_of(self._start[name]) for name in names if self._rule(name) in ("mean", "sum")]
        return sum(sizes) + self._microbatches * any(self._rule(name) == "equal" for name in names)

    def _encode(self, number: int, values: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
        """Return the summands of a microbatch, and its hash of the state that must be equal in all microbatches."""
        parts = []
        for name in names:
            if self._rule(name) == "mean":
                parts.append(flat(values[name]))
            elif self._rule(name) == "sum":
                parts.append(flat(values[name]) - flat(self._start[name]))
        if equal := [values[name] for name in names if self._rule(name) == "equal"]:
            hashes = torch.zeros(self._microbatches, dtype=torch.float64, device=equal[0].device)
            hashes[number] = hash_of(equal)
            parts.append(hashes)
        return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0, dtype=torch.float64)

    def _decode(
        self, names: Sequence[str], total: torch.Tensor, tree: MicrobatchTree, world: World
    ) -> dict[str, torch.Tensor]:
        """Return the means and sums of the state, and require that equal state is equal."""
        summed = [name for name in names if self._rule(name) in ("mean", "sum")]
        *parts, hashes = total.split(
            [*(size_of(self._start[name]) for name in summed), len(total) - self._sum_size(summed)]
        )
        results = {}
        for name, part in zip(summed, parts, strict=True):
            start = self._start[name]
            value = part / len(tree.filled) if self._rule(name) == "mean" else part + flat(start).to(part.device)
            results[name] = (
                torch.view_as_complex(value.view(*start.shape, 2)) if start.is_complex() else value.view_as(start)
            )
        by_number = hashes.tolist()
        if by_number and len({by_number[number] for number in tree.filled}) > 1:
            self._raise_unequal([name for name in names if self._rule(name) == "equal"], world)
        return results

    def _sum_size(self, names: Sequence[str]) -> int:
        return sum(size_of(self._start[name]) for name in names)

    def _received(self, tree: MicrobatchTree, world: World) -> dict[str, torch.Tensor]:
        """Return the state that is that of the last microbatch, which the last rank owns."""
        is_complete = tree.is_shared_by_all(world.size)  # otherwise, some ranks have no microbatch
        own = self._kept[max(self._kept)] if self._kept else {}
        equal = [name for name in self._active if self._rule(name) == "equal"]
        last = [name for name in self._active if self._rule(name) == "last"]
        results = {name: own.get(name, self._start[name]) for name in (*equal, *last)}
        sent = last if is_complete else [*equal, *last]
        if sent and world.size > 1:
            data = torch.cat([bytes_of(results[name]).to(world.device) for name in sent])
            world.broadcast(data, world.size - 1)
            pieces = data.split([bytes_of(self._start[name]).numel() for name in sent])
            for name, piece in zip(sent, pieces, strict=True):
                start = self._start[name]
                results[name] = piece.clone().view(start.dtype).view(start.shape)
        return results

    def _put(self, results: Mapping[str, torch.Tensor]) -> None:
        """Set all state that may have changed to `results`, or to that at the beginning of the step."""
        targets, sources = [], []
        for name in self._start if self._dirty is None else self._dirty.union(self._active):
            place, target, value = self._places.get(name), self._objects[name], results.get(name, self._start[name])
            if place is None:  # an attribute that the first step did not change
                continue
            if isinstance(target, torch.Tensor):
                place.put(target)
                targets.append(target.detach())
                sources.append(value)
            else:
                place.put(_number(value.item(), target))
        with torch.no_grad():
            copy_tensors(targets, sources)

    def _raise_problems(self, world: World) -> None:
        names = sorted(set(chain.from_iterable(all_gather(sorted(self._problems), world))))
        raise InputError(
            f"the forward of a training step changed {listed(names)}",
            expected="a forward changes the values of buffers, not their shapes and types; it registers no buffers "
            "and writes no parameters",
            fix="write parameters after engine.step, or declare frozen ones, such as a key encoder: "
            "Engine(..., buffers={'key_encoder.*': 'last'}); register buffers with their final shape in __init__",
            code="E_BUFFER",
        )

    def _raise_unequal(self, names: Sequence[str], world: World) -> None:
        own = {
            name: [int(hash_of([kept.get(name, self._start[name])])) for kept in self._kept.values()] for name in names
        }
        rows = all_gather(own, world)
        unequal = [name for name in names if len({value for row in rows for value in row[name]}) > 1]
        raise InputError(
            f"microbatches of a step ended with different values of {listed(unequal)}",
            expected="integer and bool buffers, such as counters of steps, that are equal after every microbatch",
            fix=f'choose a rule: Engine(..., buffers={{"{(unequal or list(names))[0]}": "last"}}) for the value of the '
            'last microbatch, or "sum" for the sum of all changes',
            code="E_BUFFER",
        )


def _rules_of(tensors: Mapping[str, torch.Tensor], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of each tensor that matches a pattern."""
    result: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        if rule not in get_args(Rule):
            raise InputError(
                f"the rule for {pattern!r} in buffers is {rule!r}",
                expected=f"one of {', '.join(get_args(Rule))}",
                fix=f'buffers={{"{pattern}": "last"}}',
                code="E_BUFFER",
            )
        for name in match_patterns(tensors, [pattern], key="buffers", kind="buffer", example="*.queue"):
            dtype = tensors[name].dtype
            if (rule == "mean" and not dtype.is_floating_point and not dtype.is_complex) or (
                rule == "sum" and dtype == torch.bool
            ):
                raise InputError(
                    f"the rule for {name!r} in buffers is {rule!r}, and its type is {dtype}",
                    expected="mean for floating-point and complex values, sum for these and integers",
                    fix=f'buffers={{"{name}": "last"}}',
                    code="E_BUFFER",
                )
            result[name] = rule
    return result


def _is_number(value: Any) -> bool:
    """Return whether an attribute is a number that float64 holds exactly."""
    return type(value) in (bool, float) or (type(value) is int and abs(value) < 2**53)


def _tensor(value: Any) -> torch.Tensor | None:
    """Return a value as a tensor; None for anything but tensors and numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64) if _is_number(value) else None


def _number(value: float, before: bool | int | float) -> bool | int | float:
    """Return a value with the type of the value before, if this holds it exactly."""
    kind = type(before)
    return kind(value) if math.isfinite(value) and kind(value) == value else value
