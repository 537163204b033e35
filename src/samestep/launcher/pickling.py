"""Transfer of functions and results between the launcher and ranks, which are new processes.

A function of a notebook or an interactive interpreter cannot be imported by name; it is sent by
value, with all objects that it refers to. Results are sent by value too: torch would send tensors
as references to memory of the rank, which is gone after its end. All unpickled data was pickled by
processes of the same user and received through a pipe.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any

from samestep.errors import InputError, RunError
from samestep.report_text import message_of


@dataclass(frozen=True)
class ByName:
    """Function that only ranks import, because the import needs torch."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module(self.module), self.name)(*arguments, **options)


class ByValue:
    """Function that is sent by value."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            data = _dumps(self.function)
        except Exception as error:  # boundary: pickling calls methods of user objects
            raise InputError(
                f"the function cannot be sent to ranks: {message_of(error)}",
                expected="a function with variables that can all be pickled; ranks are new "
                "processes",
                fix="create locks, generators and connections inside the function",
                code="E_NOT_PICKLABLE",
            ) from error
        return _by_value, (data,)


def _by_value(data: bytes) -> ByValue:
    return ByValue(unpack(data))


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that can be sent to a new process.

    A function that the process can import by name is returned unchanged. A function of an
    interactive `__main__`, also inside `functools.partial`, is sent by value.

    Raises:
        InputError: the function is local.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    is_interactive = not hasattr(sys.modules["__main__"], "__file__")
    if is_interactive and getattr(inner, "__module__", None) == "__main__":
        return ByValue(function)
    name = getattr(inner, "__qualname__", "")
    if "<locals>" in name or "<lambda>" in name:
        raise InputError(
            f"{name} cannot be imported by name",
            expected="a function that ranks, which are new processes, can import",
            fix="define the function at the top level of its module, and pass variables as "
            "arguments",
            code="E_NOT_PICKLABLE",
        )
    return function


def pack(value: Any) -> bytes:
    """Pickle `value`, with tensors by value.

    Raises:
        RunError: a part of `value` cannot be pickled.
    """
    try:
        return _dumps(value)
    except Exception as error:  # boundary: pickling calls methods of user objects
        raise RunError(
            f"the result of the function ({type(value).__name__}) cannot be sent: "
            f"{message_of(error)}",
            expected="a result by value: numbers, strings, tensors, and lists, dicts and objects "
            "of these",
            fix="return plain values, or write them to a file on rank 0 and return the path",
            code="E_NOT_PICKLABLE",
        ) from error


def unpack(data: bytes) -> Any:
    """Return the value that `pack` has pickled."""
    return ForkingPickler.loads(data)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _pickler()(buffer).dump(value)
    return buffer.getvalue()


@cache
def _pickler() -> Any:
    """Return a pickler class that sends tensors by value, moved to the CPU."""
    import cloudpickle  # lazy: a launcher needs the package only for notebooks

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped package
        def reducer_override(self, value: Any) -> Any:
            torch = sys.modules.get("torch")
            is_tensor = torch is not None and isinstance(value, torch.Tensor)
            if is_tensor and value.device.type not in ("cpu", "meta"):
                return value.cpu().__reduce_ex__(self.proto)
            return super().reducer_override(value)

    return Pickler
