"""Replacement of attributes of modules and classes for the duration of a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes that a module or a class has itself inside the block."""
    before = {name: vars(owner)[name] for name in values}  # `getattr` would bind class methods
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
