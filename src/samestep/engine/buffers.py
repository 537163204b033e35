"""State that a forward changes: buffers, declared parameters, and numbers and tensors in attributes of modules.

Each microbatch starts with the state at the beginning of the step. The step ends with one value, by the rule of each
buffer, which depends on its type and on `Engine(buffers=...)`:

- `mean`, for floating-point and complex buffers: the mean over microbatches, in canonical order. For batch norm this
  equals the result of one device per microbatch without SyncBN, on any number of processes.
- `equal`, for integer and bool buffers: the value with which every microbatch ended; an error if they differ.
- `last`, by choice, and for attributes: the value of the last microbatch of the global batch.
- `sum`, by choice: the value at the beginning plus the sum of the changes by all microbatches.

State that no microbatch changed keeps its bits and is not communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch

from samestep.distributed.world import World, all_gather
from samestep.engine.buffer_rules import (
    Kind,
    Place,
    Rule,
    StateVector,
    as_number,
    as_tensor,
    changed_state_error,
    is_number,
    rules_of,
    unequal_state_error,
)
from samestep.engine.module_attributes import ModuleAttributes
from samestep.engine.side_effects import ParameterCheck
from samestep.engine.tensor_bits import any_differs, bytes_of, copies, copy_tensors, hash_of, version_of
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.strategy import Strategy

_MODULE_ATTRIBUTES = ("training", "call_super_init", "dump_patches")
_INEXACT = (torch.float64, torch.complex128)  # the mean of equal values can be rounded
_SMALL = 2**16  # elements of tensors that are kept and compared in every microbatch


class Snapshot:
    """Contiguous copies of tensors; each update writes the same memory, with one call per type and device.

    Args:
        tensors: the first values, by name.

    Attributes:
        copies: by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.copies = dict(zip(tensors, copies(list(tensors.values())), strict=True))
        groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.dtype, tensor.device), []).append(name)
        self._groups = [(names, [self.copies[name] for name in names]) for names in groups.values()]

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors with the same names, shapes, types and devices as the first ones."""
        for names, targets in self._groups:
            with torch.no_grad():
                torch._foreach_copy_(targets, [tensors[name] for name in names])


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
        devices = (tensor.device for tensor in chain(model.buffers(), model.parameters()))
        self._device = next(devices, torch.device("cpu"))
        self.active: list[str] = []  # names of state that some step has changed
        self._is_first, self.attributes = True, ModuleAttributes(model)
        self._places: dict[str, Place] = {}
        self._arrangement: object = None  # for which the state is arranged
        self._locate()
        self.declared_parameters = [name for name, place in self._places.items() if place.kind == "_parameters"]
        self.parameters = ParameterCheck(model if is_whole else None, self.declared_parameters)

    @property
    def length(self) -> int:
        """Number of elements of the vector of a microbatch."""
        return len(self._inexact) + 2 + self._vector.length

    @property
    def control_length(self) -> int:
        """Number of the first elements of the vector, which `combine` needs as numbers."""
        return len(self._inexact) + 2 + self._vector.hashes

    def begin(self, microbatches: int) -> None:
        """Copy the state at the beginning of a step of `microbatches` microbatches."""
        if self._buffer_count(self._modules) != self._count:
            self._locate()
        if self._is_first:
            self._add_attributes(lambda key: True)
        self.parameters.begin(digests=self._is_first)
        self.attributes.begin()
        self._objects = {name: place.value() for name, place in self._places.items()}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self._objects.items():
            tensor = value if type(value) is torch.Tensor else as_tensor(value)
            if tensor is not None:
                tensors[name] = tensor
        forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors.values()]
        arrangement = microbatches, self._places, list(tensors), forms
        if self._arrangement == (arrangement, self.active):
            self._snapshot.update(tensors)
        else:
            self._arrange(microbatches, tensors)
            self._arrangement = arrangement, list(self.active)
        self._versions = {name: version_of(self._objects[name]) for name in self._large}
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # values with which each microbatch may have ended
        self._touched: set[str] = set()  # by the last microbatch
        self._results: dict[str, torch.Tensor] = {}
        self._problems, self._changed_attributes = set[str](), set[str]()
        self._dirty: set[str] | None = None  # None: any state may have changed

    def _arrange(self, microbatches: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Arrange the state for steps in which its names, shapes, types and devices are these."""
        self._microbatches = microbatches
        self._snapshot = Snapshot({name: tensor.detach() for name, tensor in tensors.items()})
        self._start = self._snapshot.copies
        self.active = [name for name in self.active if name in self._start]
        tensors = {n: start for n, start in self._start.items() if self._places[n].kind != "__dict__"}
        self._inexact = [name for name in self.active if name in tensors and tensors[name].dtype in _INEXACT]
        self._inactive = {name: start for name, start in tensors.items() if name not in self.active}
        self._large = {name for name, start in self._inactive.items() if start.numel() > _SMALL}
        self._vector = self._vector_of(self.active)

    def _vector_of(self, names: Sequence[str]) -> StateVector:
        return StateVector(names, self._places, self._start, self._microbatches, self._device)

    def restore(self) -> None:
        """Set the state to that at the beginning of the step."""
        if self._start:
            self._put({})
        self._dirty = None
        self.attributes.restore()

    def read(self, number: int, module: torch.nn.Module | None = None, *, last: bool = True) -> torch.Tensor | None:
        """Return the contribution of a microbatch after its forward: `length` elements in float64; None for zeros.

        Small tensors are always kept and compared, without a wait for the device. Writes to large ones are detected by
        a comparison in the first step and by their versions later; a write that changes no version, by a comparison in
        the last microbatch, is an error.

        Args:
            number: the microbatch.
            module: the replica of the model that computed it; None for the model itself.
            last: it is the last microbatch of this rank.
        """
        values, unusable = self._read(module)
        self._touched = {name for name in values if name in self._inactive}
        if self._is_first:  # attributes are numbers of the host
            attributes = self._differing(values, [name for name in values if self._places[name].kind == "__dict__"])
            self._changed_attributes.update(attributes)
            large = self._differing(values, [name for name in self._large if name not in unusable])
            self._touched = {*attributes, *large, *(self._touched - self._large)}
        self._dirty = {*self._touched, *unusable}
        self._problems |= {f"parameter {name}" for name in self.parameters.written(module)}
        is_last = number == self._microbatches - 1
        self._problems.update(self.attributes.read(module, is_last=is_last))
        if not (self._start or self._problems or self.attributes.has_changed_late):
            return None
        return self._encode(number, values, module, is_last=is_last, last=last)

    def _encode(
        self,
        number: int,
        values: Mapping[str, torch.Tensor],
        module: torch.nn.Module | None,
        *,
        is_last: bool,
        last: bool,
    ) -> torch.Tensor:
        """Return the vector of a microbatch, and keep the values that the end of the step needs.

        `is_last` marks the last microbatch of the global batch, `last` that of this rank.
        """
        kept = [*self._vector.equal, *(self._vector.last if is_last else ())]
        kept = list(dict.fromkeys([*kept, *self._touched])) if self._touched else kept
        ends = [values[name] for name in kept]
        self._kept[number] = dict(zip(kept, copies(ends) if module is None else ends, strict=True))
        count = len(self._inexact)
        vector = self._vector.encode(number, values, control=count + 2)
        for position, name in enumerate(self._inexact):
            vector[position : position + 1].copy_(any_differs([values[name]], [self._start[name]]))
        if compared := [name for name in self._inactive if name in self._touched]:
            differs = any_differs([values[n] for n in compared], [self._start[n] for n in compared])
            vector[count : count + 1].copy_(differs)
        if self.attributes.has_changed_late:
            vector[count : count + 1].fill_(1.0)
        if self._problems:
            vector[count + 1 : count + 2].fill_(1.0)
        elif last and module is None and (names := self._unobserved()):
            objects = [self._objects[name].detach() for name in names]
            vector[count + 1 : count + 2].copy_(any_differs(objects, [self._start[name] for name in names]))
        return vector

    def combine(
        self, total: torch.Tensor, control: Sequence[float], tree: MicrobatchTree, strategy: Strategy, world: World
    ) -> None:
        """Compute the state at the end of the step from the sum of the vectors of all microbatches; a collective.

        Args:
            total: the sum.
            control: its first `control_length` elements.
            tree: the microbatches.
            strategy: sums further vectors, if state has changed for the first time.
            world: the ranks.

        Raises:
            InputError: the forward changed state for which there is no rule, or microbatches differ.
        """
        if self.active or self._is_first or any(control):
            self._combine(total, control, tree, strategy, world)
        else:
            self.attributes.combine(world, (), may_grow=False)

    def _combine(
        self, total: torch.Tensor, control: Sequence[float], tree: MicrobatchTree, strategy: Strategy, world: World
    ) -> None:
        """Combine state that steps change; arguments as in `combine`."""
        count = len(self._inexact)
        (is_changed, has_problem), hashes = control[count : count + 2], control[count + 2 :]
        if has_problem != 0:
            self._raise_problems(world)
        changed = {name for name, flag in zip(self._inexact, control[:count], strict=True) if flag > 0}
        if is_changed or self._is_first:
            kept = [self._differing(ends, [n for n in ends if n in self._inactive]) for ends in self._kept.values()]
            changed.update(*all_gather(sorted(self._changed_attributes.union(*kept)), world))
        if self._is_first:
            self._is_first = False
            self._keep_attributes(changed)
        results = self._decode(self._vector, hashes, total[self.control_length :], tree, world)
        if self._inexact:
            results = {name: value for name, value in results.items() if name not in self._inexact or name in changed}
        new = [name for name in self._places if name in changed and name not in self.active]
        if new:
            vector = self._vector_of(new)
            vectors = {(n, n + 1): vector.encode(n, {**self._start, **ends}) for n, ends in self._kept.items()}
            second = strategy.sum_vectors(tree, vectors, vector.length)()
            results |= self._decode(vector, second[: vector.hashes].tolist(), second[vector.hashes :], tree, world)
            self.active += new
            self._vector = self._vector_of(self.active)
        self._results = results | self._received(tree, world)
        self.attributes.combine(world, changed, may_grow=bool(is_changed))

    def commit(self) -> None:
        """Set the state to that at the end of the step."""
        if self._start:
            self._put(self._results)
        self.attributes.commit()

    def _locate(self) -> None:
        """Find all buffers, the frozen parameters with a rule, and the attributes that are known to change."""
        active_attributes = {name for name in self.active if self._places[name].kind == "__dict__"}
        tensors: dict[str, tuple[torch.nn.Module, str, str, Kind, torch.Tensor]] = {}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    tensors[prefix + key] = (module, path, key, "_buffers", buffer)
            for key, parameter in module._parameters.items() if self._is_whole and self._rules else ():
                if parameter is not None and not parameter.requires_grad:
                    tensors[prefix + key] = (module, path, key, "_parameters", parameter)
        rules = rules_of({name: entry[-1] for name, entry in tensors.items()}, self._rules)
        self._places = {}
        for name, (module, path, key, kind, tensor) in tensors.items():
            default: Rule = "mean" if tensor.is_floating_point() or tensor.is_complex() else "equal"
            if kind == "_buffers" or name in rules:
                is_persistent = key not in module._non_persistent_buffers_set
                self._places[name] = Place(module, path, key, kind, rules.get(name, default), is_persistent)
        self._add_attributes(active_attributes.__contains__)
        self._count = self._buffer_count(self._modules)

    def _add_attributes(self, is_selected: Callable[[str], bool]) -> None:
        for path, module in self._model.named_modules():
            for key, value in vars(module).items():
                name = f"{path}.{key}" if path else key
                if (
                    is_number(value)
                    and key not in _MODULE_ATTRIBUTES
                    and name not in self._places
                    and is_selected(name)
                ):
                    self._places[name] = Place(module, path, key, "__dict__", "last")

    def _keep_attributes(self, changed: set[str]) -> None:
        """Forget the attributes that the first step did not change."""
        self._places = {n: place for n, place in self._places.items() if place.kind != "__dict__" or n in changed}

    @staticmethod
    def _buffer_count(modules: Iterable[torch.nn.Module]) -> int:
        tables = [table for module in modules if (table := module._buffers)]
        return len([1 for table in tables for buffer in table.values() if buffer is not None])

    def _read(self, module: torch.nn.Module | None) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return the values that may have changed, and the names of those with another shape or type than before.

        Such a buffer is a cache if it is not persistent, and keeps its value at the beginning; otherwise a problem.
        """
        modules = None if module is None else dict(module.named_modules())
        values, unusable = {}, set()
        for name, start in self._start.items():
            place = self._places[name]
            value = place.value(None if modules is None else modules[place.path])
            is_known = name in self._large and modules is None and not self._is_first
            if is_known and value is self._objects[name] and version_of(value) == self._versions[name] >= 0:
                continue
            if type(value) is torch.Tensor and not value.requires_grad and modules is None:
                form = value.shape, value.dtype, value.device
                if form == (start.shape, start.dtype, start.device):
                    values[name] = value
                    continue
            tensor = as_tensor(value)
            if tensor is None or tensor.shape != start.shape or tensor.dtype != start.dtype:
                if place.kind != "__dict__":  # an attribute that is no number any longer belongs to the model
                    unusable.add(name)
                if place.kind != "__dict__" and place.is_persistent:
                    self._problems.add(f"buffer {name} of another shape or type")
                tensor = start
            values[name] = tensor.to(start.device)
        if self._buffer_count(self._modules if modules is None else modules.values()) != self._count:
            self._note_new_buffers(module)
        return values, unusable

    def _unobserved(self) -> list[str]:
        """Return the names of large tensors that the last microbatch has not changed, unless without a new version."""
        names = []
        for name in sorted(self._large) if not self._is_first else ():
            place, start = self._places[name], self._start[name]
            value = place.table().get(place.key)
            if name not in self._touched and value is self._objects[name] and value.shape == start.shape:
                names.append(name)
        return names

    def _note_new_buffers(self, replica: torch.nn.Module | None) -> None:
        """Note buffers that the forward registered, and remove those that are caches, which are not persistent."""
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
        flags = [any_differs([values[name]], [self._start[name]]) for name in names]
        if not flags:
            return []
        device = flags[0].device
        differ = torch.stack([flag.to(device) for flag in flags]).tolist()  # one synchronization with a GPU
        return [name for name, is_different in zip(names, differ, strict=True) if is_different]

    def _decode(
        self, vector: StateVector, hashes: Sequence[float], sums: torch.Tensor, tree: MicrobatchTree, world: World
    ) -> dict[str, torch.Tensor]:
        """Return the means and sums of the state, and require that equal state is equal."""
        filled = tree.filled
        if hashes and len({hashes[number] for number in filled}) > 1:
            self._raise_unequal(vector.equal, world)
        return vector.decode(sums, len(filled))

    def _received(self, tree: MicrobatchTree, world: World) -> dict[str, torch.Tensor]:
        """Return the state that is that of the last microbatch, which the last rank owns."""
        own = self._kept[max(self._kept)] if self._kept else {}
        equal, last = self._vector.equal, self._vector.last
        results = {name: own.get(name, self._start[name]) for name in (*equal, *last)}
        sent = last if tree.is_shared_by_all(world.shares) else [*equal, *last]  # some ranks have no microbatch
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
        written = set(self._start) if self._dirty is None else self._dirty.union(self.active)
        for name in written:
            place, target, value = self._places.get(name), self._objects[name], results.get(name, self._start[name])
            if place is None:  # an attribute that the first step did not change
                continue
            if isinstance(target, torch.Tensor):
                place.put(target)
                targets.append(target.detach() if target.requires_grad else target)
                sources.append(value)
            else:
                place.put(as_number(value.item(), target))
        with torch.no_grad():
            copy_tensors(targets, sources)
        self._versions |= {name: version_of(self._objects[name]) for name in written.intersection(self._versions)}

    def _raise_problems(self, world: World) -> None:
        written = self._differing({n: self._objects[n].detach() for n in self._large}, self._unobserved())
        self._problems |= {f"buffer {name} without a new version, as by .data" for name in written}
        self._dirty = None
        names = sorted(set(chain.from_iterable(all_gather(sorted(self._problems), world))))
        raise changed_state_error(names)

    def _raise_unequal(self, names: Sequence[str], world: World) -> None:
        own = {
            name: [int(hash_of([kept.get(name, self._start[name])])) for kept in self._kept.values()] for name in names
        }
        rows = all_gather(own, world)
        unequal = [name for name in names if len({value for row in rows for value in row[name]}) > 1]
        raise unequal_state_error(unequal or list(names))


class AveragedBuffers:
    """Buffers of a model whose mean over microbatches ends a step of a pipeline.

    These are persistent buffers of floating-point type, and counters: integers of one element, whose mean over equal
    values is exact. Masks and tables are left alone.

    Attributes:
        control_length: 0; see `ForwardState`.
    """

    control_length = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self._locations = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and _is_averaged(buffer)
        }
        self.names = list(self._locations)
        self._start: list[torch.Tensor] = []
        self._end = torch.empty(0)
        self.length = sum(buffer.numel() for buffer in self._current())

    def begin(self, microbatches: int = 1) -> None:
        """Copy the buffers at the beginning of a step."""
        self._start = [buffer.clone() for buffer in self._current()]

    def restore(self) -> None:
        """Set the buffers to their values at the beginning of the step."""
        copy_tensors(self._current(), self._start)

    def read(self) -> torch.Tensor:
        """Return all buffers as one float64 vector of `length` elements."""
        current = self._current()
        if not current:
            return torch.empty(0, dtype=torch.float64)
        return torch.cat([buffer.detach().reshape(-1).double().to(current[0].device) for buffer in current])

    def write(self, vector: torch.Tensor) -> None:
        """Set the buffers from a vector as returned by `read`."""
        current = self._current()
        parts = zip(vector.split([buffer.numel() for buffer in current]), current, strict=True)
        copy_tensors(current, [values.view_as(buffer) for values, buffer in parts])

    def combine(
        self, total: torch.Tensor, control: Sequence[float], tree: MicrobatchTree, strategy: Strategy, world: World
    ) -> None:
        """Compute the values at the end of the step from the sum of the vectors of all microbatches."""
        self._end = total / len(tree.filled)

    def commit(self) -> None:
        """Set the buffers to the values at the end of the step."""
        self.write(self._end)

    def _current(self) -> list[torch.Tensor]:
        # Looked up by name each time: a module may replace a buffer by a new tensor.
        return [getattr(module, name) for module, name in self._locations.values()]


def _is_averaged(buffer: torch.Tensor) -> bool:
    is_counter = buffer.numel() == 1 and not buffer.is_complex() and buffer.dtype != torch.bool
    return buffer.is_floating_point() or is_counter
