"""Functions of a script for its exit, as of `atexit` and temporary folders: the process of a rank ends without them.

Private: `weakref.finalize._registry`.
"""

from __future__ import annotations

import atexit
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from samestep.script.replaced import replaced


@contextmanager
def exit_functions_called() -> Iterator[None]:
    """Call the functions that are registered inside the block at its end, the last one first, as plain Python does."""
    functions: list[tuple[Callable[..., Any], Callable[[], Any]]] = []  # each alone, and with its arguments
    unregister_before = atexit.unregister
    registry: dict[weakref.finalize[Any, Any], Any] = vars(weakref.finalize)["_registry"]
    finalizers_before = set(registry)

    def register(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Callable[..., Any]:
        functions.append((function, partial(function, *arguments, **options)))
        return function

    def unregister(function: Callable[..., Any], /) -> None:
        functions[:] = [entry for entry in functions if entry[0] != function]
        unregister_before(function)

    with replaced(atexit, register=register, unregister=unregister):
        try:
            yield
        finally:
            while functions:
                _call(functions.pop()[1])
            for finalizer in reversed(list(registry)):
                if finalizer.atexit and finalizer not in finalizers_before:
                    _call(finalizer)


def _call(function: Callable[[], Any]) -> None:
    try:
        function()
    except Exception:  # boundary: as in plain Python, an error changes neither the others nor the exit code
        traceback.print_exc()
