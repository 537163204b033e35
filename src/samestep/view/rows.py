"""Tensors of a whole batch that hold the rows of this rank: how to make, recognise and gather them.

Constructor: `Rows(own, bounds)`, or `rows_of(own, bounds, limit)`, which gathers small tensors.
"""

from __future__ import annotations

from samestep.view.rows_autograd import AUTOGRAD_RULES, METADATA_RULES, WRITERS, torch_gathers
from samestep.view.rows_dimensions import DIMENSION_RULES
from samestep.view.rows_elementwise import ELEMENTWISE_RULES
from samestep.view.rows_sums import LOSS_RULES, SUM_RULES
from samestep.view.rows_tensor import (
    EXPORTS,
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

RULES.update(ELEMENTWISE_RULES)
RULES.update(DIMENSION_RULES)
RULES.update(SUM_RULES)
RULES.update(LOSS_RULES)
RULES.update(AUTOGRAD_RULES)
RULES.update(METADATA_RULES)
METADATA.update(METADATA_RULES)
EXPORTS.update(WRITERS)

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
