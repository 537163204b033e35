"""Functions of ranks by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ByName:
    """A function that ranks import: the launcher would import torch for the function itself."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(import_module(self.module), self.name)(*arguments)
