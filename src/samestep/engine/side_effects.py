"""Side effects of a forward outside of buffers: attributes of modules, parameters, and variables outside of the model.

Attributes get one value on all ranks. Writes to parameters, and to numbers and random generators outside of modules'
buffers and attributes, are errors: a counter in a global variable, in a class or in the enclosing function, and a
generator of the script, advance with each microbatch that a rank computes, so their values would depend on the number
of ranks. So would buffers of modules outside of the model. For buffers of the model, see `buffers`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeGuard

import numpy
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from samestep.distributed.logging import logger
from samestep.distributed.world import World, all_gather
from samestep.engine.tensor_bits import any_differs, bits_of, bytes_of, version_of
from samestep.errors import InputError
from samestep.units import format_bytes

_LARGE_BYTES = 2**20
_MISSING = object()  # the attribute does not exist
_LIBRARIES = ("torch.", "builtins", "abc", "typing", "collections")
Variable = tuple[str, partial[Any]]  # name, and call that returns the present value
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


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
                if value is None or isinstance(value, torch.Tensor) or _is_number(value)
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
            own = {path for path, module in self._model.named_modules() if not _is_of_torch(module)}
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
        return not (_is_number(value) and type(value) is type(before) and value == before)

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


class ParameterCheck:
    """Detects parameters that a forward writes.

    Writes are detected by the versions and addresses of parameters. A write through `.data` changes neither; with
    `digests`, hashes of all values are compared too.
    """

    def __init__(self, model: torch.nn.Module | None, ignored: Iterable[str] = ()) -> None:
        named = {} if model is None else dict(model.named_parameters())
        # Parameters that are divided among ranks change while they are gathered.
        is_whole = all(type(parameter.data) is torch.Tensor and not parameter.is_meta for parameter in named.values())
        ignored = set(ignored)
        self._parameters = {name: p for name, p in named.items() if name not in ignored} if is_whole else {}

    def begin(self, *, digests: bool = False) -> None:
        """Record all parameters."""
        parameters = self._parameters.values()
        self._versions = [parameter._version for parameter in parameters]
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._digests = self._read_digests() if digests else []

    def written(self, replica: torch.nn.Module | None = None) -> list[str]:
        """Return the names of parameters that have changed since `begin`, also in a replica of the model."""
        parameters = self._parameters.values()
        versions, addresses = [p._version for p in parameters], [p.data_ptr() for p in parameters]
        digests = self._read_digests() if self._digests else []
        if replica is not None and self._parameters:
            copies = dict(replica.named_parameters())
            for number, (name, parameter) in enumerate(self._parameters.items()):
                if copies[name].device == parameter.device:
                    addresses[number] = copies[name].data_ptr()
        if (versions, addresses, digests) == (self._versions, self._addresses, self._digests):
            return []
        now = zip(versions, addresses, digests or versions, strict=True)
        before = zip(self._versions, self._addresses, self._digests or self._versions, strict=True)
        return [name for name, new, old in zip(self._parameters, now, before, strict=True) if new != old]

    def _read_digests(self) -> list[int]:
        if not self._parameters:
            return []
        sums = [bits_of(parameter.detach()).sum(dtype=torch.int64) for parameter in self._parameters.values()]
        return [int(total) for total in torch.stack([total.to(sums[0].device) for total in sums]).tolist()]


def _is_plain_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor that a later step can use: without a graph, and no subclass."""
    return type(value) is torch.Tensor and not value.requires_grad and value.layout == torch.strided


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _is_plain(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_of_torch(module: torch.nn.Module) -> bool:
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


class OutsideState:
    """The numbers and generators that the forward of a model and its loss can reach by name.

    Covered are generators in attributes of modules; and global variables, variables of enclosing functions and class
    attributes that are named in the classes of modules, in the loss and in the forward function; and attributes of an
    object whose method is the loss or the forward function. Torch's own modules are left out. Without a model, nothing
    is required.

    Buffers of other modules that a forward calls, such as a critic or a loss, are compared in the first microbatch.
    """

    def __init__(self, model: torch.nn.Module | None = None, loss: object = None) -> None:
        self._model, self._places = model, _places_of(loss)
        self._has_new_function, self._own, self._watching = True, set[torch.nn.Module](), 0
        self._function: tuple[object, list[Variable]] = None, []  # the last forward function and its places
        classes: dict[type, None] = {}
        for path, module in model.named_modules() if model is not None else ():
            for key, value in module.__dict__.items():
                if _is_generator(value):
                    self._places.append((f"{path}.{key}" if path else key, partial(module.__dict__.get, key)))
            classes |= {kind: None for kind in type(module).__mro__ if not kind.__module__.startswith(_LIBRARIES)}
        for kind in classes:
            for key, value in vars(kind).items():
                if isinstance(value, FunctionType):
                    self._places += _places_of(value)
                elif _is_watched(value):
                    self._places.append((f"{kind.__qualname__}.{key}", partial(vars(kind).get, key)))
        self._places = list({(read.func, id(read.args[0])): (name, read) for name, read in self._places}.values())

    def numbers(self) -> list[Any]:
        """Return the present values of the numbers."""
        return [value for _, read in self._places if _is_number(value := read())]

    @contextmanager
    def unchanged(self, function: object, module: torch.nn.Module | None = None) -> Iterator[None]:
        """Require that the block, the forward of a microbatch, leaves all unchanged.

        Args:
            function: the forward function, or None.
            module: the model or a replica, to compare buffers of other modules in the first microbatch.

        Raises:
            InputError: a number, a generator or a buffer has changed.
        """
        if function != self._function[0]:  # bound methods are equal, and other objects each time
            self._function, self._has_new_function = (function, _places_of(function)), True
        places = [*self._places, *self._function[1]] if self._model is not None else []
        before = [_snapshot(read()) for _, read in places]
        is_compared = self._has_new_function or self._watching > 0
        with self._equal_buffers(module) if is_compared else nullcontext():
            yield
        for (name, read), value in zip(places, before, strict=True):
            if _snapshot(read()) != value:
                raise _changed_error(name, read())

    @contextmanager
    def _equal_buffers(self, module: torch.nn.Module | None) -> Iterator[None]:
        if module is None or self._model is None:
            yield
            return
        before: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}

        def record(called: torch.nn.Module, _: object) -> None:
            if called not in self._own:
                for name, tensor in _persistent_buffers(called).items():
                    before.setdefault((called, name), tensor.clone())

        # Replicas of the model in other threads can be called within the block.
        self._own.update(self._model.modules(), module.modules())
        self._watching += 1
        handle = register_module_forward_pre_hook(record)
        try:
            yield
        finally:
            handle.remove()
            self._watching -= 1
            if self._watching == 0:
                self._own.clear()
        self._has_new_function = False
        for (called, name), value in before.items():
            if not _has_same_bits(called._buffers.get(name), value):
                raise _changed_buffer_error(called, name)


def _places_of(function: object) -> list[Variable]:
    """Return the variables outside of a function that its code names, if they hold a number or a generator.

    Of a method, or an object that is called, also the attributes of the object.
    """
    function = getattr(function, "func", function)  # of a partial function
    owner = getattr(function, "__self__", None)
    if not isinstance(function, FunctionType | MethodType | torch.nn.Module):
        owner, function = function, type(function).__call__
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return []
    code, variables = function.__code__, function.__globals__
    names = sorted(_names(code))
    places: list[Variable] = [(name, partial(variables.get, name)) for name in names if name in variables]
    if not isinstance(owner, torch.nn.Module):  # attributes of modules have rules
        own = getattr(owner, "__dict__", {})
        places += [(f"{type(owner).__name__}.{name}", partial(own.get, name)) for name in names if name in own]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        places.append((name, partial(_contents, cell)))
    return [(name, read) for name, read in places if _is_watched(read())]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and value is not torch.default_generator


def _is_watched(value: Any) -> bool:
    return _is_number(value) or _is_generator(value)


def _snapshot(value: Any) -> Any:
    """Return a comparable copy of a number or of the state of a generator; None for other values."""
    if _is_number(value):
        return type(value), value
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    return value.getstate() if isinstance(value, random.Random) else None


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Others are caches, which may be computed in the first forward.
    caches = module._non_persistent_buffers_set
    return {name: tensor for name, tensor in module._buffers.items() if tensor is not None and name not in caches}


def _has_same_bits(now: torch.Tensor | None, value: torch.Tensor) -> bool:
    if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
        return False
    return not any_differs([now], [value.to(now.device)])


def _changed_buffer_error(module: torch.nn.Module, name: str) -> InputError:
    return InputError(
        f"the forward of a microbatch changes the buffer {name} of a {type(module).__name__} outside of the model",
        expected="a forward changes buffers of the model of the engine only, which are equal on all ranks",
        fix="eval() of that module before the step; or make it a part of the model: "
        'nn.ModuleDict({"net": net, "other": other}) and a forward function, with other.requires_grad_(False)',
        code="E_BUFFER",
    )


def _changed_error(name: str, value: Any) -> InputError:
    is_generator = isinstance(value, _GENERATORS)
    return InputError(
        f"the forward of a microbatch {'draws from the generator' if is_generator else 'changes the variable'} {name}",
        expected="random numbers of torch, random and numpy.random themselves, which are seeded for each microbatch"
        if is_generator
        else "a forward changes buffers and attributes of modules only, which are equal on all ranks",
        fix="torch.randn(..., generator=None) or numpy.random.normal(...)"
        if is_generator
        else f"self.{name.rpartition('.')[2]} in a module, or change the variable after engine.step; return values for "
        "logging in a mapping",
        code="E_BUFFER",
    )
