"""The line of a user's code from which something was called."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_BELOW = tuple(f"{_OURS}{room}{os.sep}" for room in ("runtime", "engine", "parallel"))


def call_site() -> str:
    """`train.py:40`: the innermost line that is neither ours, nor torch's, nor the standard library's.

    Where all of them are, as in `samestep train`, it is our own innermost line above the engine.
    """
    frame: FrameType | None = sys._getframe(1)
    own = "an unknown place"
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_library(file):
            return f"{os.path.relpath(file) if os.path.isabs(file) else file}:{frame.f_lineno}"
        if own == "an unknown place" and file.startswith(_OURS) and not file.startswith(_BELOW):
            own = f"samestep/{file.removeprefix(_OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return own


@cache
def _is_library(file: str) -> bool:
    if file.startswith(_STANDARD):
        return "-packages" not in file.removeprefix(_STANDARD)  # what is installed lies below the standard library
    return file.startswith((_OURS, _TORCH, "<frozen "))
