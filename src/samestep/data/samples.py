"""Types of data sets and of functions that join samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """Map-style data set: a length, and one sample per index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...
