"""Something that differs between two runs, and all of that together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# In the order of cause and effect.
STAGES = (
    "before",
    "order",
    "shards",
    "inputs",
    "targets",
    "rates",
    "settings",
    "outputs",
    "loss",
    "gradients",
    "after",
    "optimizer",
    "steps",
    "evaluation",
)
# What is said of a comparison, from a stage (and for tensors their kind) to a line of the table.
QUANTITIES = {
    "order": "order of samples",
    "inputs": "inputs as augmented",
    "targets": "targets",
    "rates": "learning rates",
    "outputs": "outputs",
    "loss": "losses and counts",
    "gradients": "gradients",
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "evaluation": "evaluation",
}
_LAST = math.inf


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that differs.

    Attributes:
        quantity: the line of the table that it belongs to.
        step: the optimizer step; None for an evaluation.
        tensor: the model's or the optimizer's name for it, if it is one.
        ranks: the two ranks of the second trial that differ, if it is not the trials.
        distance: largest difference relative to the largest element; None where only bits were compared.
        detail: the two values, where they can be shown.
    """

    quantity: str
    stage: str
    step: int | None
    shard: int | None = None
    module: str | None = None
    tensor: str | None = None
    ranks: tuple[int, int] | None = None
    distance: float | None = None
    detail: str = ""

    @property
    def place(self) -> tuple[float, int]:
        """Where it stands in the order of cause and effect."""
        return (self.step if self.step is not None else _LAST, STAGES.index(self.stage))


@dataclass
class Comparison:
    """What two trials came to.

    Attributes:
        label: what the second trial was.
        failing: differences that are not allowed, in order.
        largest: the largest distance, by quantity, of those that are; 0 where all bits are the same.
        compared: how many things were compared, by quantity.
        seen: the first place where bits differ, allowed or not.
    """

    label: str
    failing: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    seen: Difference | None = None

    @property
    def first(self) -> Difference | None:
        return min(self.failing, key=lambda difference: difference.place, default=None)

    def verdict(self, quantity: str) -> str:
        """`bits`, the largest distance, `differs`, or `-` where there was nothing to compare."""
        if any(difference.quantity == quantity for difference in self.failing):
            return "differs"
        if not self.compared.get(quantity):
            return "-"
        largest = self.largest.get(quantity, 0.0)
        return f"{largest:.1e}" if largest else "bits"

    def distance(self, quantity: str) -> float | None:
        """The largest distance that was measured, allowed or not."""
        failing = [each.distance for each in self.failing if each.quantity == quantity and each.distance is not None]
        return max([*failing, *([self.largest[quantity]] if quantity in self.largest else [])], default=None)

    def add(self, difference: Difference, tolerance: float | None) -> None:
        """Take a difference; it fails unless its distance is known and within the tolerance."""
        quantity, distance = difference.quantity, difference.distance
        if self.seen is None or difference.place < self.seen.place:
            self.seen = difference
        if tolerance is not None and distance is not None and distance <= tolerance:
            self.largest[quantity] = max(self.largest.get(quantity, 0.0), distance)
        else:
            self.failing.append(difference)

    def count(self, quantity: str, number: int = 1) -> None:
        """So many things were looked at."""
        self.compared[quantity] = self.compared.get(quantity, 0) + number
