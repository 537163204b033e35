"""Interception of collectives that a script calls in `torch.distributed`, and the source lines of calls."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
# Internal folders of the package. A call site above them is more useful to a user.
_INTERNAL = tuple(
    f"{_PACKAGE}{name}{os.sep}"
    for name in ("distributed", "launcher", "reduce", "strategies", "view")
)


def call_site(innermost: FrameType | None = None) -> str:
    """Return the innermost caller outside of this package, torch and the standard library, as `train.py:40`.

    Without such a caller, as in `samestep train`, return the innermost line outside of internal
    folders. `innermost` is a frame of another thread.
    """
    internal = ""
    for frame, line in traceback.walk_stack(innermost or sys._getframe(1)):
        file = frame.f_code.co_filename
        if not _is_library(file):
            return f"{os.path.relpath(file) if os.path.isabs(file) else file}:{line}"
        if not internal and file.startswith(_PACKAGE) and not file.startswith(_INTERNAL):
            internal = f"samestep/{file.removeprefix(_PACKAGE)}:{line}"
    return internal or "an unknown place"


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith(_STANDARD):
        return "-packages" not in file.removeprefix(
            _STANDARD
        )  # site-packages is inside the standard library's folder
    return file.startswith((_PACKAGE, _TORCH, "<frozen "))


# Collectives of `torch.distributed`. Point-to-point messages differ from rank to rank.
_COLLECTIVES = (
    *(
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "barrier",
        "monitored_barrier",
    ),
    *(
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_coalesced",
        "all_reduce_coalesced",
    ),
    *(
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
    ),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
)

OnCollective = Callable[[bool], Callable[[], None] | None]


def intercept_collectives(
    is_active: Callable[[], bool], on_collective: OnCollective
) -> Callable[[], None]:
    """Call `on_collective(is_blocking)` before each collective of all ranks in `torch.distributed`.

    Only calls by name in `torch.distributed` are intercepted: not those of torch's C++ code, nor
    those of a name imported earlier (`from torch.distributed import all_reduce`). Collectives of a
    subgroup are ignored, because other ranks have no part in them.

    Args:
        is_active: evaluated first on every call; False passes the call through.
        on_collective: `is_blocking` is False with `async_op`. A returned function is called when
            the collective has returned.

    Returns:
        A function that restores `torch.distributed`.
    """
    # Some of the names are new, others deprecated: not every version has all.
    originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    for name, function in originals.items():
        setattr(dist, name, _intercepted(function, is_active, on_collective))
    return lambda: vars(dist).update(originals)


def _intercepted(
    function: Callable[..., Any], is_active: Callable[[], bool], on_collective: OnCollective
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises the proper error
        is_global = bound.get("group") in (None, dist.group.WORLD)
        on_end = on_collective(not bound.get("async_op", False)) if is_global else None
        try:
            return function(*args, **kwargs)
        finally:
            if on_end is not None:
                on_end()

    return wrapper
