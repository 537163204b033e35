"""Functions and results that travel to and from ranks by value.

Ranks are fresh processes. What a notebook or an interactive interpreter defines exists in its own process only, so
ranks cannot import it by name; it is sent whole, with what it refers to. Results are sent whole too: torch would send
tensors as references to memory of the rank, which is gone when it has ended.

What is unpacked here was packed by this user's own processes, and came through a pipe between them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

from samestep.errors import InputError, RunError


class ByValue:
    """A function that is sent whole."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ByValue, (_Packed(_packed_function(self._function)),)


class _Packed:
    """Bytes that become what they stand for when they are unpickled."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkingPickler.loads, (self._data,)


@cache
def _pickler() -> Any:
    """A pickler that sends tensors with their numbers, and those of other devices as they are on the CPU."""
    import cloudpickle  # not above: a launcher only needs it for a notebook

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
        def reducer_override(self, value: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
                return value.cpu().__reduce_ex__(self.proto)
            return super().reducer_override(value)

    return Pickler


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """What can be sent to a fresh process in place of `function`.

    Unchanged where the process can import it by name. A function of an interactive `__main__`, with arguments bound
    to it by `functools.partial` if there are any, is sent by value.

    Raises:
        InputError: it is neither.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if _is_interactive(inner):
        return ByValue(function)
    name = getattr(inner, "__qualname__", "")
    if "<locals>" in name or "<lambda>" in name:
        raise InputError(
            f"{name} cannot be imported by name",
            rule="ranks are fresh processes, which import the function they run",
            do="define it at the top level of its module, and hand it what it needs as arguments",
        )
    return function


def pack(value: Any) -> bytes:
    """`value` as bytes, tensors with their numbers.

    Raises:
        RunError: something in it cannot be sent.
    """
    buffer = io.BytesIO()
    try:
        _pickler()(buffer).dump(value)
    except Exception as error:  # boundary: whatever a value's own way to be sent raises
        raise RunError(
            f"what the function returned ({type(value).__name__}) cannot be sent: {error}",
            rule="a rank's result is sent by value: numbers, text, tensors, and lists, dicts and objects of such",
            do="return plain values, or have rank 0 write them to a file and return its path",
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` was given."""
    return ForkingPickler.loads(data)


def _packed_function(function: Callable[..., Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        _pickler()(buffer).dump(function)
    except Exception as error:  # boundary: whatever the way to send something that it refers to raises
        raise InputError(
            f"the function cannot be sent to ranks: {error}",
            rule="ranks are fresh processes; a function of a notebook is sent with all variables that it uses",
            do="make within the function what cannot be sent (locks, generators, connections)",
        ) from error
    return buffer.getvalue()


def _is_interactive(function: Callable[..., Any]) -> bool:
    """Whether it lives in a `__main__` that came from no file."""
    module = getattr(function, "__module__", None)
    return module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
