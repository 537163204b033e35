"""What of its data a run's model depends on, kept in the run, so that the data itself is not needed again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import InputError

_FILE = "data.json"


@dataclass(frozen=True)
class DataFacts:
    """Facts of a dataset.

    Attributes:
        classes: their names, by number.
        model_options: options of the model that followed from the data.
    """

    classes: Sequence[str]
    model_options: Mapping[str, Any] = field(default_factory=dict)


def write_facts(facts: DataFacts, run: Path) -> None:
    """Keep them in a run's directory."""
    (run / _FILE).write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")


def read_facts(run: Path) -> DataFacts:
    """Those that a run has kept.

    Raises:
        InputError: it has none.
    """
    try:
        said = json.loads((run / _FILE).read_text(encoding="utf-8"))
        return DataFacts(tuple(said["classes"]), dict(said["model_options"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run / _FILE} cannot be read: {error}",
            rule="a run keeps there what its model depends on besides the recipe",
            do="samestep resume RUN writes it, where the data is",
        ) from error
