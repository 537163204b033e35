"""Side effects of a forward that would make results depend on the number of ranks: these are errors.

Writes to parameters, and to numbers and random generators outside of modules' buffers and attributes, are errors: a
counter in a global variable, in a class or in the enclosing function, and a generator of the script, advance with each
microbatch that a rank computes, so their values would depend on the number of ranks. So would buffers of modules
outside of the model. For buffers of the model, see `buffers`; for attributes, `module_attributes`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from samestep.engine.module_attributes import is_number
from samestep.engine.tensor_bits import any_differs, bits_of
from samestep.errors import InputError

_LIBRARIES = ("torch.", "builtins", "abc", "typing", "collections")
Variable = tuple[str, partial[Any]]  # name, and call that returns the present value
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


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
        # Recurrent modules of torch move the parameters of a replica into one block of memory of a GPU.
        modules = model.named_modules() if model is not None else ()
        recurrent = [path for path, module in modules if isinstance(module, torch.nn.RNNBase)]
        self._moved = {name for name in self._parameters if name.rpartition(".")[0] in recurrent}

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
                if copies[name].device == parameter.device and name not in self._moved:
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


class OutsideState:
    """The numbers and generators that the forward of a model and its loss can reach by name.

    Covered are generators in attributes of modules; and global variables, variables of enclosing functions and class
    attributes that are named in the classes of modules, in the loss and in the forward function; and attributes of an
    object whose method is the loss or the forward function. Torch's own modules are left out. Without a model, nothing
    is required.

    Buffers of other modules that a forward calls, such as a critic or a loss, are compared in the first microbatch,
    unless the model is compiled.
    """

    def __init__(self, model: torch.nn.Module | None = None, loss: object = None) -> None:
        self._model, self._places = model, _places_of(loss)
        self._has_new_function, self._own, self._watching = True, set[torch.nn.Module](), 0
        # The hook for comparison would be compiled too, and the model again without it.
        self._compares = model is not None and all(module._compiled_call_impl is None for module in model.modules())
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
        return [value for _, read in self._places if is_number(value := read())]

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
        is_first = self._has_new_function or self._watching > 0
        with self._equal_buffers(module) if self._compares and is_first and module is not None else nullcontext():
            yield
        for (name, read), value in zip(places, before, strict=True):
            if _snapshot(read()) != value:
                raise _changed_error(name, read())

    @contextmanager
    def _equal_buffers(self, module: torch.nn.Module) -> Iterator[None]:
        """Require that the block changes no buffer of a module outside of the model and `module`."""
        assert self._model is not None
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
    return is_number(value) or _is_generator(value)


def _snapshot(value: Any) -> Any:
    """Return a comparable copy of a number or of the state of a generator; None for other values."""
    if is_number(value):
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
