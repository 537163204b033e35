"""Tensors of a whole batch that hold the rows of this rank: how to make, recognise and gather them.

Constructor: `Rows(own, bounds)`, or `rows_of(own, bounds, limit)`, which gathers small tensors.
"""

from __future__ import annotations

from samestep.view.rows_autograd import AUTOGRAD_RULES, METADATA_RULES, torch_gathers
from samestep.view.rows_rules import RULES_BY_ROWS
from samestep.view.rows_sums import SUM_RULES
from samestep.view.rows_tensor import (
    METADATA,
    RULES,
    Rows,
    gathered,
    is_large,
    is_rows,
    own_rows,
    rows_of,
    with_all_rows,
)

BATCH_LIMIT = 2**16  # bytes of a tensor of a batch that is Rows
OUTPUT_LIMIT = 2**20  # bytes of an output that is Rows

RULES.update({**RULES_BY_ROWS, **SUM_RULES, **AUTOGRAD_RULES})
METADATA.update(METADATA_RULES)

__all__ = [
    "BATCH_LIMIT",
    "OUTPUT_LIMIT",
    "Rows",
    "gathered",
    "is_large",
    "is_rows",
    "own_rows",
    "rows_of",
    "torch_gathers",
    "with_all_rows",
]
