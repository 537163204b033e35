"""Numbers and random generators outside of modules' buffers and attributes, which a forward must leave unchanged.

A counter in a global variable, in a class or in the enclosing function, and a generator of the script, advance with
each microbatch that a rank computes, so their values would depend on the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy
import torch

from samestep.errors import InputError

_LIBRARIES = ("torch.", "builtins", "abc", "typing", "collections")
Place = tuple[str, partial[Any]]  # name, and call that returns the present value
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


class OutsideState:
    """The numbers and generators that the forward of a model and its loss can reach by name.

    Covered are generators in attributes of modules; and global variables, variables of enclosing functions and class
    attributes that are named in the classes of modules, in the loss and in the forward function. Torch's own modules
    are left out. Without a model, nothing is required.
    """

    def __init__(self, model: torch.nn.Module | None = None, loss: object = None) -> None:
        self._is_active, self._places = model is not None, _places_of(loss)
        self._function: tuple[object, list[Place]] = None, []  # the last forward function and its places
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
                elif _is_state(value):
                    self._places.append((f"{kind.__qualname__}.{key}", partial(vars(kind).get, key)))
        self._places = list({(read.func, id(read.args[0])): (name, read) for name, read in self._places}.values())

    def numbers(self) -> list[Any]:
        """Return the present values of the numbers."""
        return [value for _, read in self._places if _is_number(value := read())]

    @contextmanager
    def unchanged(self, function: object) -> Iterator[None]:
        """Require that the block, the forward of a microbatch, leaves all unchanged.

        Raises:
            InputError: a number or a generator has changed.
        """
        if function != self._function[0]:  # bound methods are equal, and other objects each time
            self._function = function, _places_of(function)
        places = [*self._places, *self._function[1]] if self._is_active else []
        before = [_snapshot(read()) for _, read in places]
        yield
        for (name, read), value in zip(places, before, strict=True):
            if _snapshot(read()) != value:
                raise _changed_error(name, read())


def _places_of(function: object) -> list[Place]:
    """Return the variables outside of a function that its code names, if they hold a number or a generator."""
    function = getattr(function, "func", function)  # of a partial function
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return []
    code, variables = function.__code__, function.__globals__
    places: list[Place] = [(name, partial(variables.get, name)) for name in sorted(_names(code)) if name in variables]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        places.append((name, partial(_contents, cell)))
    return [(name, read) for name, read in places if _is_state(read())]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and value is not torch.default_generator


def _is_state(value: Any) -> bool:
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
