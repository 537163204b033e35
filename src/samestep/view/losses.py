"""Mean losses inside of a divided call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.view.operations import Rule

LOSS_RULES: dict[Callable[..., Any], Rule] = {}
