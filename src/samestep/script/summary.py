"""Summary of an unchanged script: what was divided, what was whole and why, and how data were read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from samestep.distributed.streams import report_line
from samestep.script.loaders import Reading
from samestep.view.view import ModuleSummary


@dataclass
class Summary:
    """What is divided in one rank.

    Attributes:
        readings: how the loaders of the script read.
        modules: calls of its modules.
    """

    readings: Mapping[Hashable, Reading]
    modules: Sequence[ModuleSummary] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary, each once."""
        for module in self.modules:
            calls = module.divided + module.watched + module.whole
            reasons = f"; whole: {'; '.join(module.reasons)}" if module.reasons else ""
            yield f"{module.module}: {module.divided} of {calls} calls divided{reasons}"
        for reading in self.readings.values():
            yield from reading.lines()

    def report(self) -> None:
        """Print the lines on standard error."""
        for line in dict.fromkeys(self.lines()):
            report_line(f"samestep: {line}")
