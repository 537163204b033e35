"""Values outside of a module that the code of its forward can reach, and digests that find changes.

The code is followed from the methods of classes that the script defines, through the functions,
classes and objects that they name. Objects of the script, of Python's own library and of NumPy are
read as `copy` reads them; other libraries are neither followed nor read.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import dis
import functools
import random
import sys
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves  # private; opens classes registered with torch

from samestep.distributed.collective_check import is_library_file
from samestep.distributed.device_reads import device_reads
from samestep.view.leaves import sample_of
from samestep.view.module_tensors import TABLES

Digest = tuple[Hashable, str | None]  # and the type of a value in it that cannot be compared
Digests = dict[tuple[str, int], Digest]  # by words for the place of a value, and its owner
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

_READ = sys.stdlib_module_names | {"numpy"}  # libraries with objects that are read
_GLOBAL_OPERATIONS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_NUMBERS = (bool, int, float, complex, type(None))
_HASHED = (str, bytes, torch.dtype, torch.device, torch.Size)
_PLAIN = (*_NUMBERS, *_HASHED, numpy.generic, set, frozenset, torch.Tensor)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_WRAPPERS = (types.MethodType, staticmethod, classmethod, property, functools._lru_cache_wrapper)
_WRAPPED = ("__func__", "__self__", "fget", "fset", "__wrapped__")
_SAMPLED = 4096  # elements of a tensor that are compared
_ITEMS = 1000  # items of a container that are compared
_VALUES = 100_000  # in all
_DEPTH = 50
_ABSENT = "(absent)"


def is_library(value: Any) -> bool:
    """Whether a function, class, module or the class of an object is of an installed library."""
    if isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        return is_library_file(value.__code__.co_filename)
    module = value
    if not isinstance(value, types.ModuleType):
        kind = value if isinstance(value, type) else type(value)
        module = sys.modules.get(kind.__module__)
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or is_library_file(file)


def tensor_mark(tensor: torch.Tensor, *, content: bool = True) -> Hashable:
    """Return facts that a write changes: version, address, shape and up to 4,096 elements."""
    version = None if tensor.is_inference() else tensor._version
    facts: tuple[Hashable, ...] = (id(tensor), version, tensor.requires_grad)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return facts
    facts = (*facts, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.data_ptr())
    sample = sample_of(tensor, _SAMPLED) if content else None
    if sample is None:
        return facts
    return (*facts, device_reads.copy(sample).view(torch.uint8).numpy().tobytes())


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Yield the variables of a closure that have a value, with their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell: not assigned yet
            yield name, cell


class Reachable:
    """Values outside of a module that the code of its forward can reach.

    Args:
        module: the module. Its tensors and plain attributes are not digested, since a trial
            compares them.
        arguments: arguments of the forward, for functions among them.
        names: names of methods that are called.
        own: other modules that are not digested.

    Attributes:
        names: names of variables and attributes in the code.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Any = (),
        names: Iterable[str] = ("forward",),
        own: Iterable[nn.Module] = (),
    ) -> None:
        self.names = set(names)
        self._module = module
        self._arguments = arguments
        # Functions with the global variables that they name, and classes and modules.
        self._globals: dict[types.FunctionType, tuple[str, ...]] = {}
        self._owners: dict[int, tuple[str, Any]] = {}
        # Generators of the process advance alike on every rank.
        python: Any = random.random
        array: Any = numpy.random.rand
        process = (python.__self__, array.__self__, torch.default_generator)
        self._own = {id(value) for value in (*module.modules(), *own, *process)}
        # Until nothing is new: names select values, and the code of these has further names.
        known = -1
        while known != len(self._globals) + len(self._owners) + len(self.names):
            known = len(self._globals) + len(self._owners) + len(self.names)
            self._digests(content=False)

    def digest(self) -> Digests:
        """Return a digest for each place that holds a value, with the words for it."""
        return self._digests(content=True)

    def _digests(self, *, content: bool) -> Digests:
        digests = _Digests(self, self._own, content=content)
        return {(label, owner): digests.digest(value) for label, owner, value in self._places()}

    def variables(self) -> Iterator[tuple[str, int, Mapping[str, Any], str]]:
        """Yield (words, owner, namespace, name) of variables that the code names, in all scopes."""
        for function, names in list(self._globals.items()):
            variables = function.__globals__
            for name in names:
                yield f"the global variable {name}", id(variables), variables, name
        for label, owner in list(self._owners.values()):
            variables = vars(owner)
            for name, value in list(variables.items()):
                is_method = isinstance(value, _METHODS)
                is_special = label == "class" and name.startswith("__") and is_method
                if name == "__init__" and issubclass(owner, nn.Module):
                    continue  # its names would be taken for those of the forward
                if name in self.names or is_special:
                    words = f"the variable {name} of the {label} {owner.__name__}"
                    yield words, id(owner), variables, name

    def _places(self) -> Iterator[tuple[str, int, Any]]:
        for number, part in enumerate(self._module.modules()):
            self.follow(type(part))
            for name, value in list(vars(part).items()):
                if self._is_outside(part, name, value):
                    yield f"the attribute {name} of {type(part).__name__}", number, value
            if part is not self._module:  # its own hooks run outside of the call
                for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                    yield f"a hook of {type(part).__name__}", id(hook), hook
        yield "an argument", 0, self._arguments
        for function in list(self._globals):
            yield from self._places_of_function(function)
        for label, owner, namespace, name in self.variables():
            yield label, owner, namespace.get(name, _ABSENT)

    def _is_outside(self, part: nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute of the module holds more than its own plain state."""
        if isinstance(value, (*FUNCTIONS, *_GENERATORS)):
            return True
        if name in TABLES or name.endswith("_hooks") or is_library(type(part)):
            return False
        if name not in self.names:
            return False
        leaves = tree_leaves(value, is_leaf=lambda item: isinstance(item, collections.deque))
        return not all(isinstance(leaf, _PLAIN) for leaf in leaves)

    def _places_of_function(self, function: types.FunctionType) -> Iterator[tuple[str, int, Any]]:
        name = function.__name__
        library = is_library(function)
        for variable, cell in cells(function):
            if not library or isinstance(cell.cell_contents, FUNCTIONS):
                yield f"the variable {variable} of the closure {name}", id(cell), cell.cell_contents
        if library:
            yield f"the function {name}", id(function), vars(function).get("__wrapped__")
            return
        defaults = (function.__defaults__, function.__kwdefaults__)
        yield f"a default argument of {name}", id(function), defaults
        yield f"an attribute of the function {name}", id(function), vars(function)

    def follow(self, value: Any) -> None:
        """Follow the code of a function, class or Python module."""
        if isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, type):
            bases = [base for base in value.__mro__ if not is_library(base)]
            self._owners.update({id(base): ("class", base) for base in bases})
        elif isinstance(value, types.ModuleType) and not is_library(value):
            self._owners[id(value)] = ("module", value)

    def _follow_function(self, function: types.FunctionType) -> None:
        if function in self._globals:
            return
        self._globals[function] = ()
        if is_library(function):
            return
        collected: set[str] = set()
        namespace = function.__globals__
        for code in _codes(function.__code__):
            self.names.update(code.co_names)
            # Texts may be names for getattr.
            self.names.update(text for text in code.co_consts if isinstance(text, str))
            for name in sys.modules.keys() & set(code.co_names):  # imported in the function
                self.follow(sys.modules[name])
            # Names of globals and of attributes are in one list; the instructions distinguish them.
            if _STORE_GLOBAL in code.co_code[::2] or not namespace.keys().isdisjoint(code.co_names):
                for step in dis.get_instructions(code):
                    if step.opname in _GLOBAL_OPERATIONS:
                        collected.add(step.argval)
        self._globals[function] = tuple(
            sorted(n for n in collected if n in namespace or not hasattr(builtins, n))
        )


class _Digests:
    """Makes digests of values, each read once; the code among them is followed."""

    def __init__(self, reachable: Reachable, own: set[int], *, content: bool) -> None:
        self._reachable = reachable
        self._own = own
        self._content = content
        # With the values, so that no other has the same identity.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._incomparable: str | None = None

    def digest(self, value: Any) -> Digest:
        """Return the digest of a value."""
        self._incomparable = None
        return self._digest(value, 0), self._incomparable

    def _digest(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if kind in _NUMBERS or isinstance(value, _HASHED):
            # The text of not-a-number is equal to itself.
            return repr(value) if kind in _NUMBERS else hash(value)
        if isinstance(value, torch.Tensor):
            return tensor_mark(value, content=self._content and not isinstance(value, nn.Parameter))
        is_code = isinstance(value, types.FunctionType | type | types.ModuleType)
        if is_code or id(value) in self._own:
            self._reachable.follow(value)
            return id(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        if depth > _DEPTH or len(self._seen) > _VALUES:
            return "not read"
        self._seen[id(value)] = (len(self._seen), value)
        return kind.__qualname__, *(self._digest(part, depth + 1) for part in self._parts(value))

    def _parts(self, value: Any) -> Iterable[Any]:
        parts: Iterable[Any]
        if type(value) in (list, tuple, set, frozenset, dict):
            items = list(value.items()) if isinstance(value, dict) else list(value)
            parts = items
            if len(items) > _ITEMS:
                # With the last ones: most containers grow at the end.
                parts = [len(items), *items[:: len(items) // _ITEMS + 1], *items[-16:]]
        elif isinstance(value, _WRAPPERS):
            parts = [getattr(value, name, None) for name in _WRAPPED]
        elif isinstance(value, types.BuiltinFunctionType):
            parts = [id(value), value.__self__]
        elif isinstance(value, numpy.ndarray):
            sample = value.flat[:: max(1, value.size // _SAMPLED)]
            parts = [value.shape, str(value.dtype), sample.tobytes()]
        elif isinstance(value, torch.Generator):
            parts = [value.get_state().numpy().tobytes()]
        elif isinstance(value, contextvars.ContextVar):
            parts = [value.get(None)]
        elif hasattr(type(value), "__next__") and is_library(type(value)):
            self._incomparable = type(value).__name__
            parts = [id(value)]
        else:
            parts = self._parts_of_object(value)
        return parts

    def _parts_of_object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        is_foreign = is_library(kind)
        is_module = isinstance(value, nn.Module)
        if is_foreign and not is_module and kind.__module__.partition(".")[0] not in _READ:
            return [id(value)]
        self._reachable.follow(kind)
        try:
            reduced: Any = value.__reduce_ex__(4)
        except Exception:  # boundary: objects that cannot be copied, such as locks, raise anything
            reduced = ""
        if isinstance(reduced, str):
            return [id(value), getattr(value, "__dict__", None)]
        create, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if not is_foreign and not is_module:
            state = self._named(kind, state)
        return [create, arguments, state, *(items or ()), *(pairs or ())]

    def _named(self, kind: type, state: Any) -> Any:
        """Return the attributes that the code names, without results that an object caches."""
        if isinstance(state, tuple):  # those in a dictionary, and those in slots
            return tuple(self._named(kind, part) for part in state)
        if not isinstance(state, dict):
            return state
        return {
            name: value
            for name, value in state.items()
            if name in self._reachable.names
            and not isinstance(getattr(kind, str(name), None), functools.cached_property)
        }


def changed(before: Digests, after: Digests) -> str | None:
    """Return words for the first value that a call has changed, or which cannot be compared."""
    # A place that has gone is a hook or an attribute.
    for place, (content, incomparable) in after.items():
        if incomparable is not None:
            return f"uses {place[0]}, which cannot be compared ({incomparable})"
        if before.get(place) != (content, incomparable):
            return f"changes {place[0]}"
    return None
