"""Digest of the values outside of a module that the code of its forward can reach, to find changes by a call.

The code is followed from the methods of classes that the script defines, through the functions, classes and objects
that they name. The code of installed libraries is not followed, and the state of their objects is not read, with the
exception of random generators and iterators.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import dis
import functools
import itertools
import os
import random
import sys
import sysconfig
import types
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

Digest = Hashable

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_SKIPPED_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules"})
_GLOBAL_OPERATIONS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"})
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, numpy.generic)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_NAMESPACES = frozenset({"types.SimpleNamespace", "argparse.Namespace", "_thread._local", "queue.Queue"})
_SAMPLED = 4096  # elements of a tensor that are compared
_ITEMS = 1000  # items of a container that are compared
_VALUES_IN_ALL = 100_000
_DEPTH = 50
_ABSENT = object()


def _generators_of_process() -> frozenset[int]:
    """Return the identities of generators that advance alike on every rank."""
    python: Any = random.random
    array: Any = numpy.random.rand
    return frozenset({id(python.__self__), id(array.__self__), id(torch.default_generator)})


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, to an installed library or to this package."""
    if name.startswith("<frozen"):
        return True
    if "site-packages" in name or "dist-packages" in name:
        return True
    return name.startswith((_STANDARD_LIBRARY + os.sep, _PACKAGE + os.sep))


def is_library_module(module: types.ModuleType | None) -> bool:
    """Whether a Python module belongs to Python, to an installed library or to this package."""
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or is_library_file(file)


def is_library_class(kind: type) -> bool:
    """Whether a class belongs to Python, to an installed library or to this package."""
    if kind.__module__ == "__main__":
        return False
    return is_library_module(sys.modules.get(kind.__module__))


def is_library_function(function: Any) -> bool:
    """Whether a function, method or callable object belongs to Python, to an installed library or to this package."""
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return is_library_file(function.__code__.co_filename)
    if isinstance(function, types.BuiltinFunctionType):
        return True
    return is_library_class(type(function))


def tensor_mark(tensor: torch.Tensor, *, content: bool = True) -> Digest:
    """Return facts of a tensor that a write changes: version, address, shape and up to 4,096 of its elements."""
    version = None if tensor.is_inference() else tensor._version
    facts = (id(tensor), version, tensor.requires_grad)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return facts
    shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr())
    if not content or not tensor.numel():
        return (*facts, *shape)
    flat = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() > _SAMPLED:
        # A strided view; `reshape` would copy the whole tensor where it is not contiguous.
        step = -(-tensor.numel() // _SAMPLED)
        places = torch.arange(0, tensor.numel(), step, device=tensor.device)
        flat = flat[torch.unravel_index(places, tensor.shape)]
    return (*facts, *shape, flat.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, string or tensor, or a container of such values."""
    if isinstance(value, (*_VALUES, torch.Tensor)):
        return True
    if depth > 4:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(item, depth + 1) for item in value)
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        return all(is_plain(item, depth + 1) for item in value.values())
    return False


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _parts_of_code(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of a wrapper of functions; None for other values."""
    parts: tuple[Any, ...] | None = None
    if isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    elif isinstance(value, property):
        parts = (value.fget, value.fset)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    elif isinstance(value, functools._lru_cache_wrapper):
        parts = (value.__wrapped__,)  # it keeps a function of the arguments
    return parts


class Reachable:
    """Values outside of a module that the code of its forward can reach.

    Args:
        module: the module. Its tensors and plain attributes are not digested, since a trial compares them.
        arguments: values that the forward is given, for functions among them.
        names: names of methods that are called.
        own: other modules that are not digested.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Any = (),
        names: Iterable[str] = ("forward",),
        own: Iterable[nn.Module] = (),
    ) -> None:
        self._module = module
        self._own = {id(part) for part in (*module.modules(), *own)}
        self._arguments = arguments
        self._names = set(names)
        self._functions: dict[int, types.FunctionType] = {}
        self._globals: dict[int, tuple[str, ...]] = {}
        self._owners: dict[int, tuple[str, Any]] = {}  # classes and modules
        self._seen: dict[int, tuple[int, Any]] = {}  # with the values, so that no other has the same identity
        self._exploring = True
        known = -1
        while known != len(self._functions) + len(self._owners) + len(self._names):
            known = len(self._functions) + len(self._owners) + len(self._names)
            self.digest()
        self._exploring = False

    def digest(self) -> dict[tuple[str, int], Digest]:
        """Return a digest for each place that holds a value, with the words for it."""
        collected = {(label, owner): self._digest(value) for label, owner, value in list(self._places())}
        self._seen = {}
        return collected

    def functions(self) -> list[types.FunctionType]:
        """Return the functions of the script that can be reached."""
        return [self._functions[number] for number in self._globals]

    def values_of(self, function: types.FunctionType) -> list[Any]:
        """Return the values outside of a function that its code names."""
        values: list[Any] = []
        for _, _, value in self._places_of_function(function):
            if isinstance(value, dict) and value is vars(function):
                continue
            values.append(value)
        return values

    def _places(self) -> Iterator[tuple[str, int, Any]]:
        for number, part in enumerate(self._module.modules()):
            for kind in type(part).__mro__:
                self._add_owner(kind, "class")
            for name, value in vars(part).items():
                if self._is_outside(part, name, value):
                    yield f"the attribute {name} of {type(part).__name__}", number, value
            if part is not self._module:  # its own hooks run outside of the call
                for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                    yield f"a hook of {type(part).__name__}", id(hook), hook
        yield "an argument", 0, self._arguments
        for function in list(self._functions.values()):
            yield from self._places_of_function(function)
        for label, owner in list(self._owners.values()):
            for name, value in list(vars(owner).items()):
                code = isinstance(value, types.FunctionType | staticmethod | classmethod | property)
                special = code and name.startswith("__") and label == "class"
                if name == "__init__" and issubclass(owner, nn.Module):
                    continue  # its names would be taken for those of the forward
                if name in self._names or special:
                    yield f"the variable {name} of the {label} {owner.__name__}", id(owner), value

    def _is_outside(self, part: nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute of the module holds more than its own plain state."""
        if name in _SKIPPED_ATTRIBUTES or name.endswith("_hooks") or is_plain(value):
            return False
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, *_GENERATORS)):
            return True
        return name in self._names and not is_library_class(type(part))

    def _places_of_function(self, function: types.FunctionType) -> Iterator[tuple[str, int, Any]]:
        name = function.__name__
        library = is_library_file(function.__code__.co_filename)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if not library or isinstance(value, types.FunctionType | types.MethodType):
                yield f"the variable {variable} of the closure {name}", id(cell), value
        if library:
            yield f"the function {name}", id(function), vars(function).get("__wrapped__")
            return
        for variable in self._globals[id(function)]:
            value = function.__globals__.get(variable, _ABSENT)
            yield f"the global variable {variable}", id(function.__globals__), value
        yield f"a default argument of {name}", id(function), (function.__defaults__, function.__kwdefaults__)
        yield f"an attribute of the function {name}", id(function), vars(function)

    # ----- code ------------------------------------------------------------------------------------------------------

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions:
            return
        self._functions[id(function)] = function
        if is_library_file(function.__code__.co_filename):
            return
        collected: set[str] = set()
        for code in codes(function.__code__):
            self._names.update(code.co_names)
            self._names.update(text for text in code.co_consts if isinstance(text, str))  # for getattr
            for name in sys.modules.keys() & set(code.co_names):  # imported in the function
                self._add_owner(sys.modules[name], "module")
            # Names of globals and of attributes stand in one list, which only the instructions tell apart.
            if _STORE_GLOBAL in code.co_code[::2] or not function.__globals__.keys().isdisjoint(code.co_names):
                instructions = dis.get_instructions(code)
                collected.update(step.argval for step in instructions if step.opname in _GLOBAL_OPERATIONS)
        namespace = function.__globals__
        self._globals[id(function)] = tuple(sorted(n for n in collected if n in namespace or not hasattr(builtins, n)))

    def _add_owner(self, owner: Any, label: str) -> None:
        if id(owner) in self._owners:
            return
        library = is_library_class(owner) if label == "class" else is_library_module(owner)
        if not library:
            self._owners[id(owner)] = (label, owner)

    # ----- values ----------------------------------------------------------------------------------------------------

    def _digest(self, value: Any, depth: int = 0) -> Digest:
        if isinstance(value, float | complex | numpy.generic):
            return repr(value)  # not-a-number is equal to itself
        if isinstance(value, _VALUES) or value is _ABSENT:
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return tensor_mark(value, content=not self._exploring and not isinstance(value, nn.Parameter))
        if id(value) in self._seen:
            return ("seen", self._seen[id(value)][0])
        if depth > _DEPTH or len(self._seen) > _VALUES_IN_ALL:
            return "not read"
        self._seen[id(value)] = (len(self._seen), value)
        return self._digest_new(value, depth + 1)

    def _digest_new(self, value: Any, depth: int) -> Digest:
        for read in (self._digest_code, self._digest_generator, self._digest_container, self._digest_object):
            collected = read(value, depth)
            if collected is not None:
                return (type(value).__qualname__, collected)
        return (type(value).__qualname__, id(value))

    def _digest_code(self, value: Any, depth: int) -> Digest | None:
        """Return a digest of a function, class or Python module; its code is followed."""
        collected: Digest | None = None
        if isinstance(value, types.FunctionType):
            self._add_function(value)
            collected = id(value)
        elif isinstance(value, type):
            for kind in value.__mro__:
                self._add_owner(kind, "class")
            collected = id(value)
        elif isinstance(value, types.ModuleType):
            self._add_owner(value, "module")
            collected = id(value)
        elif isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            collected = id(value)
            if isinstance(owner, _GENERATORS):
                collected = self._digest(owner, depth)
        else:
            parts = _parts_of_code(value)
            if parts is not None:
                collected = tuple(self._digest(part, depth) for part in parts)
        return collected

    def _digest_generator(self, value: Any, depth: int) -> Digest | None:
        """Return a digest of a random generator or an iterator."""
        collected: Digest | None = None
        if id(value) in _generators_of_process():
            collected = id(value)
        elif isinstance(value, torch.Generator):
            collected = value.get_state().numpy().tobytes()
        elif isinstance(value, numpy.random.Generator):
            collected = repr(value.bit_generator.state)
        elif isinstance(value, numpy.random.RandomState):
            name, key, *others = value.get_state(legacy=True)
            collected = (name, numpy.asarray(key).tobytes(), *others)
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            collected = value.getstate()
        elif isinstance(value, itertools.count):
            collected = repr(value)
        elif hasattr(type(value), "__next__") and is_library_class(type(value)):
            collected = _Incomparable(value)
        return collected

    def _digest_container(self, value: Any, depth: int) -> Digest | None:
        if isinstance(value, numpy.ndarray):
            step = max(1, value.size // _SAMPLED)
            return (value.shape, str(value.dtype), value.flat[::step].tobytes())
        if isinstance(value, Enum | range | slice):
            return repr(value)
        content: Digest | None = None
        if isinstance(value, dict | types.MappingProxyType):
            items = [item for pair in _sample(list(value.items())) for item in pair]
            content = (len(value), *(self._digest(item, depth) for item in items))
        elif isinstance(value, set | frozenset):
            content = frozenset(self._digest(item, depth) for item in itertools.islice(value, _ITEMS))
            content = (len(value), content)
        elif isinstance(value, list | tuple | collections.deque):
            content = (len(value), *(self._digest(item, depth) for item in _sample(list(value))))
        elif isinstance(value, bytearray | array.array):
            content = (len(value), bytes(memoryview(value)[-_SAMPLED:]))
        elif isinstance(value, contextvars.ContextVar):
            content = self._digest(value.get(None), depth)
        elif isinstance(value, collections.UserDict | collections.UserList):
            content = self._digest(value.data, depth)
        elif isinstance(value, types.CellType):
            content = repr(value)
        if content is None or is_library_class(type(value)):
            return content
        return (content, self._digest_object(value, depth))

    def _digest_object(self, value: Any, depth: int) -> Digest | None:
        """Return a digest of the attributes of an object that the code names."""
        kind = type(value)
        if isinstance(value, nn.Module):
            if id(value) in self._own:
                return id(value)
            attributes = {name: item for name, item in vars(value).items() if not name.endswith("_hooks")}
        elif is_library_class(kind):
            if f"{kind.__module__}.{kind.__qualname__}" not in _NAMESPACES:
                return None
            attributes = vars(value)
        else:
            attributes = {name: item for name, item in _attributes(value).items() if name in self._names}
        for base in kind.__mro__:
            self._add_owner(base, "class")
        return tuple((name, self._digest(item, depth)) for name, item in list(attributes.items()))


class _Incomparable:
    """Digest of a value with a state that cannot be read without changing it. Not equal to any other."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__

    __hash__ = object.__hash__


def _sample(items: list[Any]) -> list[Any]:
    if len(items) <= _ITEMS:
        return items
    return [*items[:: len(items) // _ITEMS + 1], *items[-16:]]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object in its dictionary and slots, without results that it caches."""
    collected = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, entry in vars(kind).items():
            if isinstance(entry, types.MemberDescriptorType) and hasattr(value, name):
                collected[name] = getattr(value, name)
            elif isinstance(entry, functools.cached_property):
                collected.pop(name, None)
    return collected


def changed(before: dict[tuple[str, int], Digest], after: dict[tuple[str, int], Digest]) -> str | None:
    """Return words for the first place with a value that a call has changed or which cannot be compared."""
    for place, new in after.items():  # a place that has gone is a hook or an attribute that was removed
        if new == before.get(place):
            continue
        kind = _incomparable_kind(new)
        if kind is None:
            return f"changes {place[0]}"
        return f"uses {place[0]}, which cannot be compared ({kind})"
    return None


def _incomparable_kind(digest: Digest) -> str | None:
    if isinstance(digest, _Incomparable):
        return digest.kind
    if isinstance(digest, tuple):
        kinds: Iterator[str | None] = (_incomparable_kind(part) for part in digest)
        return next((kind for kind in kinds if kind is not None), None)
    return None
